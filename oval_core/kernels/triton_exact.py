"""Exact reading in Triton: attention over runs of stored tokens, split over programs and merged by log-sum-exp.

The rows of a tile are the queries of a chunk for all query heads of a KV head, so that a token is loaded once for all
of them (as in FlashDecoding, https://crfm.stanford.edu/2023/10/12/flashdecoding.html, here with tables of runs).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oval_core.kernels import interpreted
from oval_core.kernels.api import Partial, Reads
from oval_core.kernels.triton_maths import LEAST_ROWS, cap_of, capped, finite, full, rows_of, tile_rows
from oval_core.kernels.triton_merge import merge_stacked

TILE_BYTES = 32 << 10  # of keys and values in a tile: two of them in flight fit into any GPU's shared memory
LEAST_TOKENS, MOST_TOKENS, MOST_ROWS = 16, 64, 64  # of a tile
PROGRAMS_A_PROCESSOR = 2  # enough to hide latency behind each other
INTERPRETED_PROCESSORS = 4


class Stored(NamedTuple):
    """A tensor `[B, H, T, D]` as kernels see it: its steps from row to row, head to head, token to token."""

    data: Any
    row: Any
    head: Any
    token: Any


class Runs(NamedTuple):
    """`Reads` as kernels see them; the steps are those of the mask from row to row, query to query, token to token."""

    starts: Any
    lengths: Any
    count: Any
    last: Any
    mask: Any
    row: Any
    query: Any
    token: Any


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float, softcap: float | None
) -> Partial:
    """See `reference.attend_pages`; products are rounded to the dtype of the storage, sums are float32."""
    splits = splits_of(query, keys, values, reads)
    outs, lses = full((splits, *query.shape[:4], values.shape[3]), query), full((splits, *query.shape[:4]), query)
    attend_into(outs, lses, query, keys, values, reads, scaling, softcap)
    return Partial(outs[0], lses[0]) if splits == 1 else merge_stacked(outs, lses)


def attend_into(
    outs: Tensor,
    lses: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    reads: Reads,
    scaling: float,
    softcap: float | None,
) -> None:
    """The same into one part a split: contiguous float32 `[splits, B, H, G, Q, D_v]` and `[splits, B, H, G, Q]`."""
    batch, heads, _, queries, dim = query.shape
    rows, value_dim, tokens = rows_of(query), values.shape[3], tile_tokens(keys, values)
    count, tile, splits = rows.shape[2], tile_rows(rows.shape[2], MOST_ROWS), len(outs)
    tiles = triton.cdiv(reads.starts.shape[2] * reads.page_size, tokens)
    exact_kernel[(splits, triton.cdiv(count, tile), batch * heads)](
        rows, _stored(keys), _stored(values), _runs(reads), outs, lses,
        batch * heads * count, heads, count, queries, triton.cdiv(tiles, splits), cap_of(scaling, softcap),
        PAGE=reads.page_size, MASKED=reads.mask is not None, DIM=dim, BLOCK_DIM=_block(dim),
        VALUE_DIM=value_dim, BLOCK_VALUE=_block(value_dim), ROWS=tile, TOKENS=tokens,
        WIDE=interpreted() and keys.dtype == torch.bfloat16, num_stages=2,
        num_warps=4 if tile == LEAST_ROWS else 8,
    )  # fmt: skip


def splits_of(query: Tensor, keys: Tensor, values: Tensor, reads: Reads) -> int:
    """Programs that share the tokens of one tile of rows: as many as keep the device busy, at most one a tile."""
    heads, rows = query.shape[0] * query.shape[1], query.shape[2] * query.shape[3]
    wanted = PROGRAMS_A_PROCESSOR * _processors(query.device)
    tiles = triton.cdiv(reads.starts.shape[2] * reads.page_size, tile_tokens(keys, values))
    return max(1, min(tiles, wanted // (heads * triton.cdiv(rows, tile_rows(rows, MOST_ROWS)))))


def tile_tokens(keys: Tensor, values: Tensor) -> int:
    """Tokens of a tile."""
    token = (_block(keys.shape[3]) + _block(values.shape[3])) * keys.element_size()
    fitting = 1 << (TILE_BYTES // token).bit_length() - 1  # the largest power of two
    return max(LEAST_TOKENS, min(MOST_TOKENS, fitting))


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _block(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _stored(tensor: Tensor) -> Stored:
    tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
    return Stored(tensor, *tensor.stride()[:3])


def _runs(reads: Reads) -> Runs:
    starts, lengths, last = (tensor.contiguous() for tensor in (reads.starts, reads.lengths, reads.last))
    mask, steps = (last, (0, 0, 0)) if reads.mask is None else (reads.mask, reads.mask[:, 0].stride())
    return Runs(starts, lengths, starts.shape[2], last, mask, *steps)


@triton.jit
def tile_of_runs(runs, head, tile, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Positions of the tokens of a tile, and which of them belong to a run, `[TOKENS]`."""
    token = tile * TOKENS + tl.arange(0, TOKENS)
    run, offset = token // PAGE, token % PAGE
    start = tl.load(runs.starts + head * runs.count + run, mask=run < runs.count, other=0)
    length = tl.load(runs.lengths + head * runs.count + run, mask=run < runs.count, other=0)
    return start + offset, offset < length


@triton.jit
def load_tokens(stored, row, head, position, there, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`[TOKENS, BLOCK]` of what is stored."""
    dim = tl.arange(0, BLOCK)
    at = stored.data + row * stored.row + head * stored.head + position[:, None] * stored.token + dim
    return tl.load(at, mask=there[:, None] & (dim < DIM), other=0.0)


@triton.jit
def readable_tokens(runs, row, query, limit, position, there, MASKED: tl.constexpr):
    """Which tokens the queries `[ROWS]` may read, `[ROWS, TOKENS]`."""
    readable = there[None] & (position[None] <= limit[:, None])
    if MASKED:
        at = runs.mask + row * runs.row + query[:, None] * runs.query + position[None] * runs.token
        readable = readable & (tl.load(at, mask=readable, other=0) != 0)
    return readable


@triton.jit
def exact_kernel(
    query, keys, values, runs, outs, lses, all_rows, heads, count, queries, tiles, cap,
    PAGE: tl.constexpr, MASKED: tl.constexpr, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a share of the tiles of tokens and a tile of rows of one KV head."""
    split, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    b, h, asked, at = head // heads, head % heads, rows % queries, head * count + rows
    dim, value = tl.arange(0, BLOCK_DIM), tl.arange(0, BLOCK_VALUE)
    q = tl.load(query + at[:, None] * DIM + dim, mask=(rows < count)[:, None] & (dim < DIM), other=0.0)
    q, limit = q.to(keys.data.dtype.element_ty), tl.load(runs.last + b * queries + asked)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    for tile in range(split * tiles, (split + 1) * tiles):
        position, there = tile_of_runs(runs, head, tile, PAGE, TOKENS)
        k = load_tokens(keys, b, h, position, there, DIM, BLOCK_DIM)
        logits = capped(product(q, tl.trans(k), tl.zeros((ROWS, TOKENS), tl.float32), WIDE), cap)
        readable = readable_tokens(runs, b, asked, limit, position, there, MASKED)
        out, total, most = add_tile(
            out, total, most, tl.where(readable, logits, float("-inf")),
            load_tokens(values, b, h, position, there, VALUE_DIM, BLOCK_VALUE), WIDE,
        )  # fmt: skip
    some = tl.where(total == 0, 1.0, total)
    to, inside = split.to(tl.int64) * all_rows + at, rows < count
    tl.store(outs + to[:, None] * VALUE_DIM + value, out / some[:, None], mask=inside[:, None] & (value < VALUE_DIM))
    tl.store(lses + to, most + tl.log(some), mask=inside)


@triton.jit
def add_tile(out, total, most, logits, v, WIDE: tl.constexpr):
    """Online softmax: what the rows have gathered, with a tile of logits `[ROWS, TOKENS]` and values added."""
    higher = tl.maximum(most, tl.max(logits, 1))
    keep, weights = tl.exp(most - finite(higher)), tl.exp(logits - finite(higher)[:, None])
    out = product(weights.to(v.dtype), v, out * keep[:, None], WIDE)
    return out, total * keep + tl.sum(weights, 1), higher


@triton.jit
def product(left, right, onto, WIDE: tl.constexpr):
    """`left @ right + onto`; `WIDE`: of the rounded operands in float32, for the interpreter knows no bfloat16."""
    if WIDE:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, onto, input_precision="tf32x3")
