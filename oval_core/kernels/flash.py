"""Exact reading by FlashAttention (Dao, arXiv:2307.08691; Shah et al., arXiv:2407.08608), on GPUs.

The first of these that serves:

- `flash_attn_interface` (FlashAttention 3, Ampere and Hopper): pages of any size, so runs are read as pages of one
  token, wherever they start. `flash_attn_with_kvcache` of hopper/flash_attn_interface.py, version 3.0.
- `flash_attn` (FlashAttention 2): pages of 256 tokens. Full runs of that size are read by it, all others by another
  implementation. `flash_attn_with_kvcache` of flash_attn/flash_attn_interface.py, version 2.8.
- torch's own FlashAttention 2, on a copy of the runs. Of the public functions `scaled_dot_product_attention` gives no
  log-sum-exp, and `torch.nn.attention.varlen.varlen_attn` takes sequences that fill a part of their room only from
  torch 2.12 on; `aten::_flash_attention_forward`, which both call, does so since 2.5 with the same arguments.

What only some queries of a chunk may read, masks, capped logits and dtypes other than bfloat16 and float16 are left to
the next best implementation, as the other tiers are. Outputs are rounded to the dtype of the cache. Not yet run on a
GPU.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from oval_core import kernels
from oval_core.basis import PageBasis
from oval_core.kernels.api import Kernels, Partial, Reads
from oval_core.kernels.flash_reads import Paged, by_blocks, by_tokens

__all__ = ["attend", "attend_pages", "coarse_scores", "evaluate_bases", "merge", "unsupported_reads"]

PAGE_TOKENS = 256  # FlashAttention 2 takes pages of a multiple of this
LARGEST_HEAD = 256  # dimensions


def coarse_scores(query: Tensor, basis: PageBasis, scaling: float, softcap: float | None) -> Tensor:
    """Tier 1, see `reference.coarse_scores`."""
    return _other(query.device.type).coarse_scores(query, basis, scaling, softcap)


def evaluate_bases(query: Tensor, basis: PageBasis, pages: Tensor, scaling: float, softcap: float | None) -> Partial:
    """Tier 2, see `reference.evaluate_bases`."""
    return _other(query.device.type).evaluate_bases(query, basis, pages, scaling, softcap)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Partial:
    """Exact attention over copied tokens, see `reference.attend`."""
    return _other(query.device.type).attend(query, keys, values, mask, scaling, softcap)


def merge(parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
    """Log-sum-exp merge, see `reference.merge`."""
    return _other(parts[0].out.device.type).merge(parts, sink_logits)


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float, softcap: float | None
) -> Partial:
    """Exact attention over runs of stored tokens, see `reference.attend_pages`."""
    other = _other(query.device.type)
    if unsupported_reads(query, keys, values, reads, softcap) is not None:
        return other.attend_pages(query, keys, values, reads, scaling, softcap)
    by_token, by_block = _flash_3(query.device), _flash_2()
    if by_token is None and by_block is not None and _has_blocks(keys, reads):
        part, rest = by_blocks(by_block, query, keys, values, reads, scaling)
    else:
        part, rest = by_tokens(by_token, query, keys, values, reads, scaling)
    if rest is None:
        return part
    parts = [part, other.attend_pages(query, keys, values, rest, scaling, softcap)]
    return Partial(other.merge(parts, None), torch.logaddexp(parts[0].lse, parts[1].lse))


def unsupported_reads(query: Tensor, keys: Tensor, values: Tensor, reads: Reads, softcap: float | None) -> str | None:
    """Why FlashAttention cannot serve this call, or None."""
    dim, device = keys.shape[-1], keys.device
    if query.requires_grad:
        return "gradients"
    if softcap is not None:
        return "softcap"
    if reads.mask is not None:
        return "attention mask"
    if keys.dtype not in (torch.bfloat16, torch.float16) or values.dtype != keys.dtype:
        return f"{keys.dtype} cache" if values.dtype == keys.dtype else "keys and values of different dtypes"
    if values.shape[-1] != dim or dim % 8 or dim > LARGEST_HEAD:
        return f"head dimensions {dim} and {values.shape[-1]}"
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device)[0] < 8):
        return "GPU without FlashAttention"
    return None


@cache
def _other(device: str) -> Kernels:
    """The best implementation on `device` beside this one."""
    names = [name for name in kernels.available(torch.device(device)) if name != "flash"]
    return kernels.load(names[-1])


@cache
def _flash_3(device: torch.device) -> Paged | None:
    """FlashAttention 3 for paged caches, if it is installed and made for `device`."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in (8, 9):
        return None
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError:
        return None
    function: Paged = flash_attn_with_kvcache
    return function


@cache
def _flash_2() -> Paged | None:
    """FlashAttention 2 for paged caches, if it is installed."""
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    function: Paged = flash_attn_with_kvcache
    return function


def _has_blocks(keys: Tensor, reads: Reads) -> bool:
    """Whether runs may be pages of FlashAttention 2."""
    return reads.page_size % PAGE_TOKENS == 0 and keys.shape[2] >= reads.page_size
