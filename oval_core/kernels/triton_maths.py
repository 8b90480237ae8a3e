"""What the Triton kernels share: packed numbers, capped logits, sums that may be empty, and sizes of tiles."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oval_core.basis import PageBasis

LEAST_ROWS = 16  # of a tile that goes through the tensor cores
INTERPRETED_PROCESSORS = 4


class Cap(NamedTuple):
    """How logits are made of products: `softcap * tanh(scaling * x / softcap)`; softcap 0: not capped."""

    scaling: float
    softcap: float


def cap_of(scaling: float, softcap: float | None) -> Cap:
    """The scale and the cap as kernels take them."""
    return Cap(float(scaling), 0.0 if softcap is None else float(softcap))


def power_of_two(number: int) -> int:
    """The smallest one that is at least `number` (and 1), in plain Python: this runs dozens of times a layer."""
    return 1 << max(0, number - 1).bit_length()


def ceil_div(number: int, by: int) -> int:
    """How many `by` it takes to make up `number`."""
    return -(-number // by)


def processors(device: torch.device) -> int:
    """Multiprocessors of a device, which programs are to be shared out among."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_of(query: Tensor) -> Tensor:
    """`[B, H, G, Q, D]` -> `[B, H, G Q, D]`, contiguous; the query as it is if it is that already."""
    return query.flatten(2, 3).contiguous()


def tile_rows(rows: int, most: int, least: int = LEAST_ROWS) -> int:
    """Rows of a tile: a power of two that `rows` fit in, within bounds."""
    return max(least, min(most, power_of_two(rows)))


def in_one_layout(basis: PageBasis, names: tuple[str, ...]) -> tuple[list[Tensor], int]:
    """Fields of a basis, and how many pages lie from one KV head to the next in all of them.

    `PageBasis.narrow` of one allocation is taken as it is; fields that are laid out in different ways are copied.
    """
    fields = [getattr(basis, name) for name in names]
    capacity = {_capacity(field) for field in fields}
    if len(capacity) == 1 and None not in capacity:
        return fields, capacity.pop() or 0
    return [field.contiguous() for field in fields], fields[0].shape[2]


def _capacity(field: Tensor) -> int | None:
    """Pages from one head `[B, H, P, ...]` to the next, None if pages do not lie one after the other."""
    size, (to_row, to_head, to_page, *steps) = 1, field.stride()
    for extent, step in zip(reversed(field.shape[3:]), reversed(steps), strict=True):
        if extent != 1 and step != size:
            return None
        size *= extent
    packed = size and to_page == size and to_head % size == 0
    return to_head // size if packed and to_row == field.shape[1] * to_head else None


@triton.jit
def product(left, right, onto, WIDE: tl.constexpr):
    """`left @ right + onto`; `WIDE`: of the rounded operands in float32, for the interpreter knows no bfloat16."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, onto, input_precision="tf32x3")


@triton.jit
def capped(product, cap):
    """Logits of `product`."""
    logits = product * cap.scaling
    if cap.softcap > 0:
        small = tl.exp(-2 * tl.abs(logits) / cap.softcap)
        tanh = (1 - small) / (1 + small)
        logits = cap.softcap * tl.where(logits < 0, -tanh, tanh)
    return logits


@triton.jit
def finite(most):
    """A maximum over nothing is -inf: 0 instead, so that weights become zeros and no NaN."""
    return tl.where(most == float("-inf"), 0.0, most)


@triton.jit
def unsigned4(packed, half):
    """The low (half 0) or high (half 1) numbers of bytes, 0 to 15."""
    return ((packed >> (4 * half)) & 15).to(tl.float32)


@triton.jit
def signed4(packed, half):
    """The same in -8 to 7."""
    nibble = ((packed >> (4 * half)) & 15).to(tl.int32)
    return ((nibble ^ 8) - 8).to(tl.float32)


def full(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Float32 memory for a kernel to fill."""
    return torch.empty(shape, dtype=torch.float32, device=like.device)
