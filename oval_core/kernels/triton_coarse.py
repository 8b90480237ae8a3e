"""Tier 1 in Triton: scores of all pages of all KV heads in one launch, straight from the 8- and 4-bit numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oval_core.basis import COARSE_FIELDS, PageBasis
from oval_core.kernels import interpreted
from oval_core.kernels.triton_maths import (
    LEAST_ROWS,
    cap_of,
    capped,
    ceil_div,
    finite,
    full,
    in_one_layout,
    power_of_two,
    product,
    rows_of,
    unsigned4,
)


class Coarse(NamedTuple):
    """The fields of `PageBasis` that tier 1 reads, one layout for all."""

    centroid: Any
    centroid_scale: Any
    radius: Any
    radius_scale: Any
    tokens: Any


def coarse_scores(query: Tensor, basis: PageBasis, scaling: float, softcap: float | None) -> Tensor:
    """See `reference.coarse_scores`."""
    rows, (fields, capacity) = rows_of(query), in_one_layout(basis, COARSE_FIELDS)
    pages = basis.tokens.shape[2]
    scores = full((*query.shape[:4], pages), query)
    if pages:
        score_into(scores, None, rows, Coarse(*fields), None, capacity, scaling, softcap)
    return scores


def tile_pages(dtype: torch.dtype) -> int:
    """Pages of a tile, as many as fit into registers: float32 queries are multiplied in three parts."""
    return 32 if dtype == torch.float32 else 64


def score_into(
    scores: Tensor,
    masses: Tensor | None,
    rows: Tensor,
    fields: Coarse,
    counts: Tensor | None,
    capacity: int,
    scaling: float,
    softcap: float | None,
) -> None:
    """Scores of the first P pages.

    Args:
        scores: float32, to be filled, contiguous `[B, H, ..., P]`, one row a query.
        masses: float32, to be filled with the log-mass of each tile of `tile_pages`, `[B, H, ..., tiles]`; or None.
        rows: contiguous `[B, H, n, D]`, any float dtype.
        counts: with `masses`: int64 `[B]`, pages of each row; what comes after them has no mass.
        capacity: pages from one KV head to the next in `fields`.
    """
    batch, heads, count, dim = rows.shape
    half, tile, pages = (dim + 1) // 2, tile_pages(rows.dtype), scores.shape[-1]
    coarse_kernel[(ceil_div(pages, tile), ceil_div(count, LEAST_ROWS), batch * heads)](
        rows, fields, scores, scores if masses is None else masses, fields.tokens if counts is None else counts,
        capacity, pages, heads, count, cap_of(scaling, softcap),
        DIM=dim, HALF=half, BLOCK_HALF=power_of_two(max(half, 16)), ROWS=LEAST_ROWS, PAGES=tile,
        MASSES=masses is not None, WIDE=interpreted() and rows.dtype == torch.bfloat16,
        num_warps=4 if dim <= 128 else 8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["capacity", "pages"])
def coarse_kernel(
    query, fields, scores, masses, counts, capacity, pages, heads, count, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    MASSES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pages and a tile of rows (queries and group) of one KV head.

    Numbers of 8 and 4 bits are exact in any dtype of the query.
    """
    head = tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there, at = page < pages, head * capacity + page
    logits = tile_logits(
        query + head * count * DIM, row, count, fields, at, there, cap, DIM, HALF, BLOCK_HALF, ROWS, PAGES, WIDE
    )
    size = tl.load(fields.tokens + at, mask=there, other=0)
    logits = tl.where(size > 0, logits + tl.log(tl.maximum(size, 1).to(tl.float32)), float("-inf"))
    tl.store(scores + (head * count + row)[:, None] * pages + page, logits, mask=(row < count)[:, None] & there)
    if MASSES:
        mass = log_mass(tl.where(page < tl.load(counts + head // heads), logits, float("-inf")))
        tl.store(masses + (head * count + row) * tl.num_programs(0) + tl.program_id(0), mass, mask=row < count)


@triton.jit
def log_mass(logits):
    """Log-sum-exp of rows; -inf where there is nothing."""
    most = tl.max(logits, 1)
    total = tl.sum(tl.exp(logits - finite(most)[:, None]), 1)
    return most + tl.log(tl.where(total == 0, 1.0, total))


@triton.jit
def tile_logits(
    query, row, count, fields, at, there, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Logits of the pages `at` for rows of queries, `[ROWS, PAGES]`."""
    byte = tl.arange(0, BLOCK_HALF)
    spread = tl.load(fields.radius + at[:, None] * HALF + byte, mask=there[:, None] & (byte < HALF), other=0)
    along = tl.zeros((ROWS, PAGES), tl.float32)
    across = tl.zeros((ROWS, PAGES), tl.float32)
    for half in tl.static_range(2):  # of the dimensions: those in the low, those in the high halves of the bytes
        dim = byte + half * HALF
        inside = (byte < HALF) & (dim < DIM)
        q = tl.load(query + row[:, None] * DIM + dim, mask=(row < count)[:, None] & inside, other=0.0)
        if WIDE:  # the interpreter knows no bfloat16
            q = q.to(tl.float32)
        mu = tl.load(fields.centroid + at[:, None] * DIM + dim, mask=there[:, None] & inside, other=0)
        along = product(q, tl.trans(mu.to(q.dtype)), along, False)
        across = product(tl.abs(q), tl.trans(unsigned4(spread, half).to(q.dtype)), across, False)
    logits = along * tl.load(fields.centroid_scale + at, mask=there, other=0.0)
    return capped(logits + across * tl.load(fields.radius_scale + at, mask=there, other=0.0), cap)
