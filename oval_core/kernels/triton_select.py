"""Selection in Triton: what pages are ranked by, which ones are listed or read, and the runs of tokens these stand for.

The formulas are those of `routers.base.Pages` and `routers.basis.BasisRouter`, for one query a row and no mask. A
program holds the ranks of all pages of a KV head, so that nothing has to be sorted: the smallest rank that counts is
found bit by bit, and what is selected is written in the order of the pages.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from oval_core.kernels.triton_maths import finite

RANKS_A_WARP = 512
FORCED = tl.constexpr(0x7F800000)  # infinity as an integer
ABSENT = tl.constexpr(-1)


class Rows(NamedTuple):
    """Of each row, int64 `[B]`: sealed pages, pages to read, pages to evaluate, first open token."""

    counts: Any
    budget: Any
    shortlist: Any
    sealed_end: Any


class Scored(NamedTuple):
    """Tier 1: scores `[B, H, G, P]`, and the log-mass of each tile of pages, `[B, H, G, tiles]`."""

    scores: Any
    masses: Any


class Chosen(NamedTuple):
    """The pages to read, `[B, H, K]`, which of them count, and the runs of tokens to read, `[B, H, runs]`."""

    pages: Any
    valid: Any
    starts: Any
    lengths: Any


class Table(NamedTuple):
    """First token and tokens of each sealed page, int64 `[B, capacity]`."""

    starts: Any
    lengths: Any


def warps_for(ranks: int) -> int:
    """Warps of a program that holds that many ranks."""
    return max(1, min(16, ranks // RANKS_A_WARP))


@triton.jit
def ranks_of(values, page, tokens, count, sinks, window):
    """What pages are ordered by, int32: numbers >= 0 as their bits, forced pages first, absent ones negative."""
    forced = (page < sinks) | (page >= count - window)
    present = (page >= 0) & (page < count) & (tokens > 0)
    return tl.where(present, tl.where(forced, FORCED, values.to(tl.int32, bitcast=True)), ABSENT)


@triton.jit
def largest(ranks, wanted):
    """Which are the `wanted` largest of `ranks`, the first ones among equals; negative ones never are."""
    least, bit = tl.zeros((), tl.int32), tl.full((), 1 << 30, tl.int32)
    reached = tl.sum((ranks >= 0).to(tl.int32), 0)
    while (bit > 0) & (reached > wanted):
        count = tl.sum((ranks >= least + bit).to(tl.int32), 0)
        enough = count >= wanted
        least, reached = tl.where(enough, least + bit, least), tl.where(enough, count, reached)
        bit = bit >> 1
    above, equal = ranks > least, (ranks == least).to(tl.int32)
    left = wanted - tl.sum(above.to(tl.int32), 0)
    return above | ((equal > 0) & (tl.cumsum(equal, 0) <= left))


@triton.jit
def share_ranks(
    scored, tokens, counts, head, page, capacity, width, tiles, heads, group, sinks, window,
    ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Ranks of pages by their share, mean over the group."""
    row, tile = tl.arange(0, ROWS), tl.arange(0, TILES)
    inside = (row < group)[:, None] & (tile < tiles)
    mass = tl.load(scored.masses + (head * group + row)[:, None] * tiles + tile, mask=inside, other=float("-inf"))
    most = finite(tl.max(mass, 1))
    total = tl.sum(tl.exp(mass - most[:, None]), 1)
    some = tl.where(total == 0, 1.0, total)
    count = tl.load(counts + head // heads)
    share = tl.zeros_like(page).to(tl.float32)
    for member in tl.range(group, loop_unroll_factor=2):
        at = scored.scores + (head * group + member) * width + page
        score = tl.load(at, mask=page < count, other=float("-inf"))
        shift, scale = tl.sum(tl.where(row == member, most, 0.0), 0), tl.sum(tl.where(row == member, some, 0.0), 0)
        share += tl.exp(score - shift) / scale
    held = tl.load(tokens + head * capacity + page, mask=page < count, other=0)
    return ranks_of(share / group, page, held, count, sinks, window)


@triton.jit(do_not_specialize=["capacity", "width", "tiles", "listed"])
def shortlist_kernel(
    scored, tokens, rows, pages, capacity, width, tiles, listed, heads, group, sinks, window,
    ROWS: tl.constexpr, TILES: tl.constexpr, PAGES: tl.constexpr, LISTED: tl.constexpr,
):  # fmt: skip
    """One program: the shortlist of one KV head `[listed]`, filled up with -1."""
    head, page = tl.program_id(0).to(tl.int64), tl.arange(0, PAGES)
    ranks = share_ranks(
        scored, tokens, rows.counts, head, page, capacity, width, tiles, heads, group, sinks, window, ROWS, TILES
    )
    chosen = largest(ranks, tl.load(rows.shortlist + head // heads).to(tl.int32))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(pages + head * listed + place, page, mask=chosen)
    slot = tl.arange(0, LISTED)
    spare = (slot >= tl.sum(chosen.to(tl.int32), 0)) & (slot < listed)
    tl.store(pages + head * listed + slot, tl.full((LISTED,), -1, tl.int32), mask=spare)


@triton.jit(do_not_specialize=["capacity", "width", "tiles", "most", "runs", "length"])
def box_kernel(
    scored, tokens, rows, table, chosen, capacity, width, tiles, most, runs, length, heads, group, sinks, window,
    ROWS: tl.constexpr, TILES: tl.constexpr, PAGES: tl.constexpr, RUNS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program: what is read for one KV head, by share."""
    head, page = tl.program_id(0).to(tl.int64), tl.arange(0, PAGES)
    ranks = share_ranks(
        scored, tokens, rows.counts, head, page, capacity, width, tiles, heads, group, sinks, window, ROWS, TILES
    )
    read = largest(ranks, tl.load(rows.budget + head // heads).to(tl.int32))
    store_chosen(read, page, rows, table, chosen, capacity, most, runs, length, head, heads, RUNS, SIZE)


@triton.jit(do_not_specialize=["capacity", "listed", "most", "runs", "length"])
def impact_kernel(
    query, mass, pages, tokens, key_error, value_error, norm, rows, table, chosen, capacity, listed, most, runs, length,
    heads, group, scaling, sinks, window,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, ROWS: tl.constexpr, LISTED: tl.constexpr, RUNS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """One program: what is read for one KV head, by how far the approximation of a page could move the output.

    Pages that are read lose their mass, so that the tail leaves them out.
    """
    head, row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS), tl.arange(0, BLOCK_DIM)
    slot, member = tl.arange(0, LISTED), (head * group + row)[:, None]
    q = tl.load(query + member * DIM + dim, mask=(row < group)[:, None] & (dim < DIM), other=0.0).to(tl.float32)
    reach = scaling * tl.sqrt(tl.sum(q * q, 1) / DIM)
    page = tl.load(pages + head * listed + slot, mask=slot < listed, other=-1)
    logits = tl.load(mass + member * listed + slot, mask=(row < group)[:, None] & (slot < listed), other=float("-inf"))
    weight = tl.exp(logits - finite(tl.max(logits, 1))[:, None])
    total = tl.sum(weight, 1)
    share = weight / tl.where(total == 0, 1.0, total)[:, None]
    at = head * capacity + page
    rho_k = tl.load(key_error + at, mask=page >= 0, other=0.0)
    rho_v = tl.load(value_error + at, mask=page >= 0, other=0.0) / tl.load(norm + head // heads)
    impact = tl.sum(share * (rho_v[None] + reach[:, None] * rho_k[None]), 0) / group
    held = tl.load(tokens + at, mask=page >= 0, other=0)
    ranks = ranks_of(impact, page, held, tl.load(rows.counts + head // heads), sinks, window)
    read = largest(ranks, tl.load(rows.budget + head // heads).to(tl.int32))
    store_chosen(read, page, rows, table, chosen, capacity, most, runs, length, head, heads, RUNS, SIZE)
    nothing = tl.full((ROWS, LISTED), float("-inf"), tl.float32)
    tl.store(mass + member * listed + slot, nothing, mask=(row < group)[:, None] & read[None])


@triton.jit
def store_chosen(
    read, page, rows, table, chosen, capacity, most, runs, length, head, heads, RUNS: tl.constexpr, SIZE: tl.constexpr
):
    """Write which pages are `read`, at most `most`, and after their runs those of the open tail."""
    b, found = head // heads, tl.sum(read.to(tl.int32), 0)
    place = tl.cumsum(read.to(tl.int32), 0) - 1
    tl.store(chosen.pages + head * most + place, page.to(tl.int64), mask=read)
    tl.store(chosen.valid + head * most + place, read, mask=read)
    start = tl.load(table.starts + b * capacity + page, mask=read, other=0)
    tl.store(chosen.starts + head * runs + place, start, mask=read)
    length_of = tl.load(table.lengths + b * capacity + page, mask=read, other=0)
    tl.store(chosen.lengths + head * runs + place, length_of, mask=read)
    place = tl.arange(0, RUNS)
    spare, nothing = (place >= found) & (place < most), tl.zeros((RUNS,), tl.int64)
    tl.store(chosen.pages + head * most + place, nothing, mask=spare)
    tl.store(chosen.valid + head * most + place, nothing != 0, mask=spare)
    begin = tl.load(rows.sealed_end + b) + (place - most) * SIZE
    left = tl.minimum(tl.maximum(length - begin, 0), SIZE)
    rest = (place >= found) & (place < runs)
    tl.store(chosen.starts + head * runs + place, tl.where(place < most, 0, begin), mask=rest)
    tl.store(chosen.lengths + head * runs + place, tl.where(place < most, 0, left), mask=rest)
