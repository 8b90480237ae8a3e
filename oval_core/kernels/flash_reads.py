"""Runs of stored tokens as FlashAttention takes them: sequences of pages, or of copied tokens.

Every KV head of every row is a sequence of its own, with its group's queries as rows of one head: heads read different
pages, and a batch of sequences is what FlashAttention takes page tables for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oval_core.kernels.api import Partial, Reads
from oval_core.memory import rows_of, take

Paged = Callable[..., Any]  # `flash_attn_with_kvcache` of either version


def by_blocks(
    function: Paged, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float
) -> tuple[Partial, Reads | None]:
    """FlashAttention 2 reads the full runs that all queries may read; and what else there is to read."""
    size = reads.page_size
    whole = (reads.lengths == size) & (reads.starts + size - 1 <= reads.last[:, :1, None])
    starts, counts = _in_front(reads.starts, whole)
    keys_by_row, first = rows_of(keys)
    blocks, value_blocks = (_blocks(rows, size) for rows in (keys_by_row, rows_of(values)[0]))
    part = _paged(function, query, blocks, value_blocks, first + starts, size * counts, scaling, "block_table")
    return part, reads._replace(lengths=reads.lengths.masked_fill(whole, 0))


def _blocks(rows: Tensor, size: int) -> Tensor:
    """`rows [R, D]` as blocks `[R - size + 1, size, 1, D]`, one beginning at every row: no run has to be aligned."""
    step = rows.stride(0)
    return rows.as_strided((rows.shape[0] - size + 1, size, 1, rows.shape[1]), (step, step, step, 1))


def by_tokens(
    function: Paged | None, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float
) -> tuple[Partial, Reads | None]:
    """FlashAttention 3 (torch's own on a copy) reads what all queries may read; and what only some of them may."""
    offset = torch.arange(reads.page_size, device=query.device)
    position = (reads.starts[..., None] + offset).flatten(2)  # [B, H, n S]
    there = (offset < reads.lengths[..., None]).flatten(2) & (position <= reads.last[:, :1, None])
    tokens, counts = _in_front(position, there)
    if function is None:
        part = _copied(query, take(keys, tokens), take(values, tokens), counts, scaling)
    else:
        keys_by_row, first = rows_of(keys)
        pages, value_pages = (rows[:, None, None] for rows in (keys_by_row, rows_of(values)[0]))
        part = _paged(function, query, pages, value_pages, first + tokens, counts, scaling, "page_table")
    if query.shape[3] == 1:
        return part, None
    starts = torch.maximum(reads.starts, reads.last[:, :1, None] + 1)
    return part, reads._replace(starts=starts, lengths=(reads.starts + reads.lengths - starts).clamp_min(0))


def _in_front(items: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """The wanted `items [B, H, n]` in their order, then zeros, and how many are wanted, int32 `[B, H]`."""
    slot = (wanted.cumsum(-1) - 1).masked_fill(~wanted, items.shape[2])  # the last column takes what is not wanted
    room = items.new_zeros(*items.shape[:2], items.shape[2] + 1)
    return room.scatter_(-1, slot, items.masked_fill(~wanted, 0))[..., :-1], wanted.sum(-1, dtype=torch.int32)


def _paged(
    function: Paged,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    counts: Tensor,
    scaling: float,
    table: str,
) -> Partial:
    """Attention over the first `counts [B, H]` tokens in `pages [B, H, n]` of `keys [P, S, 1, D]`.

    Args:
        table: what the function calls its page table.
    """
    out, lse, *_ = function(
        _sequences(query, keys.dtype),
        keys,
        values,
        cache_seqlens=counts.flatten(),
        softmax_scale=scaling,
        return_softmax_lse=True,
        **{table: pages.flatten(0, 1).int()},
    )
    return _finished(out, lse, counts, query)


def _copied(query: Tensor, keys: Tensor, values: Tensor, counts: Tensor, scaling: float) -> Partial:
    """Attention over the first `counts [B, H]` tokens of `keys [B, H, n, D]`."""
    rows, room = query.shape[2] * query.shape[3], keys.shape[2]
    sequence = torch.arange(counts.numel() + 1, device=query.device, dtype=torch.int32)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        _sequences(query, keys.dtype).flatten(0, 1),
        keys.flatten(0, 2)[:, None],
        values.flatten(0, 2)[:, None],
        rows * sequence,
        room * sequence,
        rows,
        room,
        0.0,  # dropout
        False,  # causal
        False,  # debug mask
        scale=scaling,
        seqused_k=counts.flatten(),
    )
    return _finished(out, lse, counts, query)


def _sequences(query: Tensor, dtype: torch.dtype) -> Tensor:
    """`[B, H, G, Q, D]` -> `[B H, G Q, 1, D]`: with one head, every version lays out its log-sum-exp alike."""
    return query.to(dtype).flatten(2, 3).flatten(0, 1)[:, :, None]


def _finished(out: Tensor, lse: Tensor, counts: Tensor, query: Tensor) -> Partial:
    """Back to `[B, H, G, Q, D]`; what FlashAttention says where there is nothing to read is replaced."""
    nothing = (counts == 0)[:, :, None, None]
    shape = query.shape[:4]
    out = out.reshape(*shape, -1).float().masked_fill(nothing[..., None], 0.0)
    return Partial(out, lse.reshape(shape).masked_fill(nothing, -torch.inf))
