"""Selection in Triton: what pages are ranked by, and the runs of tokens that the selected ones stand for.

The formulas are those of `routers.base.Pages` and `routers.basis.BasisRouter`, for one query a row and no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from oval_core.kernels.triton_maths import finite

COLUMNS = 512  # pages that are looked at together


class Rows(NamedTuple):
    """Of each row, int64 `[B]`: sealed pages, pages to read, pages to evaluate, first open token, tokens."""

    counts: Any
    budget: Any
    shortlist: Any
    sealed_end: Any
    length: Any


@triton.jit
def ranked(values, page, tokens, count, sinks, window):
    """What pages are sorted by: forced ones first, absent ones last."""
    forced = (page < sinks) | (page >= count - window)
    present = (page >= 0) & (page < count) & (tokens > 0)
    return tl.where(present, tl.where(forced, float("inf"), values), float("-inf"))


@triton.jit
def add_mass(most, total, logits):
    """A running log-sum-exp `most + log(total)` of rows `[ROWS]`, with `logits [ROWS, n]` added."""
    higher = tl.maximum(most, tl.max(logits, 1))
    weights = tl.exp(logits - finite(higher)[:, None])
    return higher, total * tl.exp(most - finite(higher)) + tl.sum(weights, 1)


@triton.jit
def load_block(scores, head, group, begin, width, limit, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`scores [heads, group, width]` of a head, columns from `begin` on: `[ROWS, COLUMNS]`, -inf from `limit` on."""
    row, column = tl.arange(0, ROWS)[:, None], begin + tl.arange(0, COLUMNS)
    at = scores + (head * group + row) * width + column
    return tl.load(at, mask=(row < group) & (column < limit), other=float("-inf"))


@triton.jit(do_not_specialize=["capacity", "width"])
def share_kernel(
    scores, tokens, rows, shares, capacity, width, heads, group, sinks, window,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: the share of each page of one KV head, mean over the group, as pages are sorted by."""
    head = tl.program_id(0).to(tl.int64)
    count = tl.load(rows.counts + head // heads)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for begin in range(0, width, COLUMNS):
        block = load_block(scores, head, group, begin, width, count, ROWS, COLUMNS)
        most, total = add_mass(most, total, block)
    some = tl.where(total == 0, 1.0, total)[:, None]
    for begin in range(0, width, COLUMNS):
        page = begin + tl.arange(0, COLUMNS)
        block = load_block(scores, head, group, begin, width, count, ROWS, COLUMNS)
        share = tl.sum(tl.exp(block - finite(most)[:, None]) / some, 0) / group
        held = tl.load(tokens + head * capacity + page, mask=page < width, other=0)
        tl.store(shares + head * width + page, ranked(share, page, held, count, sinks, window), mask=page < width)


@triton.jit(do_not_specialize=["capacity", "listed", "width"])
def impact_kernel(
    query, mass, pages, tokens, key_error, value_error, norm, rows, impact, capacity, listed, width, heads, group,
    scaling, sinks, window, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One program: how far the approximation of each shortlisted page of one KV head could move the output."""
    head, row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    q = tl.load(query + (head * group + row)[:, None] * DIM + dim, mask=(row < group)[:, None] & (dim < DIM), other=0.0)
    reach = scaling * tl.sqrt(tl.sum(q * q, 1) / DIM)[:, None]
    count, mean_norm = tl.load(rows.counts + head // heads), tl.load(norm + head // heads)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    for begin in range(0, listed, COLUMNS):
        most, total = add_mass(most, total, load_block(mass, head, group, begin, listed, listed, ROWS, COLUMNS))
    some = tl.where(total == 0, 1.0, total)[:, None]
    for begin in range(0, listed, COLUMNS):
        slot = begin + tl.arange(0, COLUMNS)
        page = tl.load(pages + head * width + slot, mask=slot < listed, other=-1)
        page = tl.where(slot < tl.load(rows.shortlist + head // heads), page, -1)
        at = head * capacity + page
        rho_k = tl.load(key_error + at, mask=page >= 0, other=0.0)
        rho_v = tl.load(value_error + at, mask=page >= 0, other=0.0)
        share = (
            tl.exp(load_block(mass, head, group, begin, listed, listed, ROWS, COLUMNS) - finite(most)[:, None]) / some
        )
        moved = tl.sum(share * (rho_v / mean_norm + reach * rho_k), 0) / group
        held = tl.load(tokens + at, mask=page >= 0, other=0)
        tl.store(impact + head * listed + slot, ranked(moved, page, held, count, sinks, window), mask=slot < listed)


@triton.jit(do_not_specialize=["listed", "width", "chosen", "ordered", "runs", "capacity"])
def runs_kernel(
    order, values, pages, page_starts, page_lengths, rows, mass, picked, valid, starts, lengths,
    listed, width, chosen, ordered, runs, capacity, heads, group,
    REFINED: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: the selected pages of one KV head and the open tail as runs of tokens; read pages lose their mass.

    `order` and `values` are the sorted ranks `[heads, ordered]`; they number pages, or, `REFINED`, places in `pages`.
    """
    head, place, row = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, ROWS)
    b, is_page = head // heads, place < chosen
    slot = tl.load(order + head * ordered + place, mask=is_page, other=0)
    value = tl.load(values + head * ordered + place, mask=is_page, other=float("-inf"))
    read = is_page & (place < tl.load(rows.budget + b)) & (value > float("-inf"))
    page = slot
    if REFINED:
        page = tl.load(pages + head * width + slot, mask=is_page, other=0)
        at = mass + (head * group + row)[:, None] * listed + slot
        tl.store(at, tl.full((ROWS, BLOCK), float("-inf"), tl.float32), mask=(row < group)[:, None] & read)
    tl.store(picked + head * chosen + place, page, mask=is_page)
    tl.store(valid + head * chosen + place, read, mask=is_page)
    start = tl.load(page_starts + b * capacity + page, mask=read, other=0)
    length = tl.load(page_lengths + b * capacity + page, mask=read, other=0)
    begin = tl.load(rows.sealed_end + b) + (place - chosen) * PAGE
    left = tl.minimum(tl.maximum(tl.load(rows.length + b) - begin, 0), PAGE)
    tl.store(starts + head * runs + place, tl.where(is_page, start, begin), mask=place < runs)
    tl.store(lengths + head * runs + place, tl.where(is_page, length, left), mask=place < runs)
