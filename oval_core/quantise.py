"""Vectors in 8 or 4 bits, symmetric around zero, with one float32 scale each.

4-bit numbers are kept two in a byte: the first half of a vector in the low halves of the bytes, the rest in the high
ones, so that a vector is unpacked without shuffling.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MOST, INT4_MOST, UINT4_MOST = 127, 7, 15


def int8(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round vectors `[..., n]` to int8: what is stored `[..., n]`, its scale `[...]`, and what both stand for."""
    rounded, scale = _rounded(x, INT8_MOST)
    return rounded.to(torch.int8), scale, rounded * scale[..., None]


def int4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in -7..7, stored as uint8 `[..., packed_size(n)]`."""
    rounded, scale = _rounded(x, INT4_MOST)
    return _packed(rounded), scale, rounded * scale[..., None]


def uint4(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in 0..15, for vectors without negative entries."""
    rounded, scale = _rounded(x, UINT4_MOST)
    return _packed(rounded), scale, rounded * scale[..., None]


def packed_size(n: int) -> int:
    """Bytes of n 4-bit numbers."""
    return (n + 1) // 2


def unpack_int4(packed: Tensor, n: int) -> Tensor:
    """The numbers `[..., n]` that `int4` stored, int8."""
    return (unpack_uint4(packed, n) ^ 8) - 8


def unpack_uint4(packed: Tensor, n: int) -> Tensor:
    """The numbers `[..., n]` that `uint4` stored, int8."""
    return torch.cat([packed & 15, packed[..., : n - packed.shape[-1]] >> 4], dim=-1).to(torch.int8)


def _rounded(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax(-1) / most
    return (x / scale.clamp_min(torch.finfo(x.dtype).tiny)[..., None]).round().clamp(-most, most), scale


def _packed(rounded: Tensor) -> Tensor:
    nibbles = rounded.to(torch.int8).view(torch.uint8) & 15
    half = packed_size(nibbles.shape[-1])
    low, high = nibbles[..., :half], nibbles[..., half:]
    return low | (torch.nn.functional.pad(high, (0, half - high.shape[-1])) << 4)
