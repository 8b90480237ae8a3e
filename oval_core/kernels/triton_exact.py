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
from oval_core.kernels.triton_maths import (
    LEAST_ROWS,
    cap_of,
    capped,
    ceil_div,
    finite,
    full,
    power_of_two,
    processors,
    product,
    rows_of,
    tile_rows,
)
from oval_core.kernels.triton_merge import merge_stacked

TILE_BYTES = 32 << 10  # of keys and values in a tile: two of them in flight fit into any GPU's shared memory
LEAST_TOKENS, MOST_TOKENS, MOST_ROWS = 16, 64, 64  # of a tile
MOST_FLOAT32 = 4096  # numbers of a tile of queries that is multiplied in three parts: with it, those tiles still fit
ROW_BYTES_OF_FEW_WARPS = 8 << 10
PROGRAMS_A_PROCESSOR = 2  # enough to hide latency behind each other


class Stored(NamedTuple):
    """A tensor `[B, H, T, D]` as kernels see it: its steps from row to row, head to head, token to token."""

    data: Any
    row: Any
    head: Any
    token: Any


class Runs(NamedTuple):
    """The tensors of `Reads` as kernels see them."""

    starts: Any
    lengths: Any
    last: Any
    mask: Any


class Tile(NamedTuple):
    """Rows and tokens that a program works on at a time, its warps, and the programs that share a row's tokens."""

    rows: int
    tokens: int
    warps: int
    splits: int


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float, softcap: float | None
) -> Partial:
    """See `reference.attend_pages`; products are rounded to the dtype of the storage, sums are float32."""
    rows = rows_of(query)
    tile = tile_of(rows, keys, values, reads.starts.shape[2] * reads.page_size)
    outs = full((tile.splits, *query.shape[:4], values.shape[3]), query)
    lses = full((tile.splits, *query.shape[:4]), query)
    attend_into(outs, lses, tile, rows, query.shape[3], keys, values, reads, scaling, softcap)
    return Partial(outs[0], lses[0]) if tile.splits == 1 else merge_stacked(outs, lses)


def attend_into(
    outs: Tensor,
    lses: Tensor,
    tile: Tile,
    rows: Tensor,
    queries: int,
    keys: Tensor,
    values: Tensor,
    reads: Reads,
    scaling: float,
    softcap: float | None,
) -> None:
    """The same into the first `tile.splits` parts of float32 `[parts, B, H, ..., D_v]` and `[parts, B, H, ...]`.

    `rows` are contiguous `[B, H, G Q, D]` in any float dtype, Q is `queries`.
    """
    batch, heads, count, dim = rows.shape
    value_dim, (starts, lengths, page_size, last, mask) = values.shape[3], reads
    runs = Runs(starts.contiguous(), lengths.contiguous(), last.contiguous(), last if mask is None else mask)
    tiles = ceil_div(ceil_div(starts.shape[2] * page_size, tile.tokens), tile.splits)
    exact_kernel[(tile.splits, ceil_div(count, tile.rows), batch * heads)](
        rows, _stored(keys), _stored(values), runs, outs, lses, batch * heads * count, heads, count, queries,
        starts.shape[2], tiles, *((0, 0, 0) if mask is None else mask[:, 0].stride()), cap_of(scaling, softcap),
        PAGE=page_size, MASKED=mask is not None, DIM=dim, BLOCK_DIM=_block(dim),
        VALUE_DIM=value_dim, BLOCK_VALUE=_block(value_dim), ROWS=tile.rows, TOKENS=tile.tokens,
        WIDE=interpreted() and keys.dtype == torch.bfloat16, num_stages=2,
        num_warps=tile.warps,
    )  # fmt: skip


def tile_of(rows: Tensor, keys: Tensor, values: Tensor, tokens: int) -> Tile:
    """How `rows [B, H, n, D]` and that many tokens are shared out: to as many programs as keep the device busy."""
    width, size = _block(keys.shape[3]), keys.element_size()
    fitting = 1 << (TILE_BYTES // ((width + _block(values.shape[3])) * size)).bit_length() - 1
    at_once = max(LEAST_TOKENS, min(MOST_TOKENS, fitting))
    tile = tile_rows(rows.shape[2], MOST_ROWS if size < 4 else max(LEAST_ROWS, min(MOST_ROWS, MOST_FLOAT32 // width)))
    warps = 4 if tile == LEAST_ROWS and tile * width * size <= ROW_BYTES_OF_FEW_WARPS else 8
    programs = rows.shape[0] * rows.shape[1] * ceil_div(rows.shape[2], tile)
    wanted = PROGRAMS_A_PROCESSOR * processors(rows.device) // programs
    return Tile(tile, at_once, warps, max(1, min(ceil_div(tokens, at_once), wanted)))


def _block(dim: int) -> int:
    return max(16, power_of_two(dim))


def _stored(tensor: Tensor) -> Stored:
    tensor = tensor if tensor.stride(3) == 1 else tensor.contiguous()
    return Stored(tensor, *tensor.stride()[:3])


@triton.jit
def tile_of_runs(runs, head, count, tile, PAGE: tl.constexpr, TOKENS: tl.constexpr):
    """Positions of the tokens of a tile, and which of them belong to a run, `[TOKENS]`."""
    token = tile * TOKENS + tl.arange(0, TOKENS)
    run, offset = token // PAGE, token % PAGE
    start = tl.load(runs.starts + head * count + run, mask=run < count, other=0)
    length = tl.load(runs.lengths + head * count + run, mask=run < count, other=0)
    return start + offset, offset < length


@triton.jit
def load_tokens(stored, row, head, position, there, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """`[TOKENS, BLOCK]` of what is stored."""
    dim = tl.arange(0, BLOCK)
    at = stored.data + row * stored.row + head * stored.head + position[:, None] * stored.token + dim
    return tl.load(at, mask=there[:, None] & (dim < DIM), other=0.0)


@triton.jit
def readable_tokens(mask, queries, to_token, limit, position, there, MASKED: tl.constexpr):
    """Which tokens the queries `[ROWS]`, whose masks start at `mask + queries`, may read: `[ROWS, TOKENS]`."""
    readable = there[None] & (position[None] <= limit[:, None])
    if MASKED:
        at = mask + queries[:, None] + position[None] * to_token
        readable = readable & (tl.load(at, mask=readable, other=0) != 0)
    return readable


@triton.jit(do_not_specialize=["all_rows", "run_count", "tiles", "mask_row", "mask_query", "mask_token"])
def exact_kernel(
    query, keys, values, runs, outs, lses, all_rows, heads, count, queries, run_count, tiles,
    mask_row, mask_query, mask_token, cap,
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
    shown = b * mask_row + asked.to(tl.int64) * mask_query
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    out = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    for tile in range(split * tiles, (split + 1) * tiles):
        position, there = tile_of_runs(runs, head, run_count, tile, PAGE, TOKENS)
        k = load_tokens(keys, b, h, position, there, DIM, BLOCK_DIM)
        logits = capped(product(q, tl.trans(k), tl.zeros((ROWS, TOKENS), tl.float32), WIDE), cap)
        readable = readable_tokens(runs.mask, shown, mask_token, limit, position, there, MASKED)
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
