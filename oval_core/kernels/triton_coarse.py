"""Tier 1 in Triton: scores of all pages of all KV heads in one launch, straight from the 8- and 4-bit numbers."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from oval_core.basis import COARSE_FIELDS, PageBasis
from oval_core.kernels.triton_maths import LEAST_ROWS, cap_of, capped, full, in_one_layout, rows_of, unsigned4

TILE_PAGES = 32  # with LEAST_ROWS all that fits into registers


def coarse_scores(query: Tensor, basis: PageBasis, scaling: float, softcap: float | None) -> Tensor:
    """See `reference.coarse_scores`."""
    batch, heads, _, _, dim = query.shape
    rows = rows_of(query)
    fields, capacity = in_one_layout(basis, COARSE_FIELDS)
    count, pages = rows.shape[2], basis.tokens.shape[2]
    scores = full((*query.shape[:4], pages), query)
    grid = (triton.cdiv(pages, TILE_PAGES), triton.cdiv(count, LEAST_ROWS), batch * heads)
    half = (dim + 1) // 2
    if pages:
        coarse_kernel[grid](
            rows, *fields, scores, capacity, pages, count, cap_of(scaling, softcap),
            DIM=dim, HALF=half, BLOCK_HALF=triton.next_power_of_2(max(half, 16)), ROWS=LEAST_ROWS, PAGES=TILE_PAGES,
        )  # fmt: skip
    return scores


@triton.jit(do_not_specialize=["capacity", "pages"])
def coarse_kernel(
    query, centroid, centroid_scale, radius, radius_scale, tokens, scores, capacity, pages, count, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, ROWS: tl.constexpr, PAGES: tl.constexpr,
):  # fmt: skip
    """One program: a tile of pages and a tile of rows (queries and group) of one KV head."""
    head = tl.program_id(2).to(tl.int64)
    page = tl.program_id(0) * PAGES + tl.arange(0, PAGES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    byte = tl.arange(0, BLOCK_HALF)
    there, at = page < pages, head * capacity + page
    spread = tl.load(radius + at[:, None] * HALF + byte, mask=there[:, None] & (byte < HALF), other=0)
    along = tl.zeros((ROWS, PAGES), tl.float32)
    across = tl.zeros((ROWS, PAGES), tl.float32)
    for half in tl.static_range(2):  # of the dimensions: those in the low, those in the high halves of the bytes
        dim = byte + half * HALF
        inside = (byte < HALF) & (dim < DIM)
        q = tl.load(query + (head * count + row)[:, None] * DIM + dim, mask=(row < count)[:, None] & inside, other=0.0)
        mu = tl.load(centroid + at[:, None] * DIM + dim, mask=there[:, None] & inside, other=0).to(tl.float32)
        along = tl.dot(q, tl.trans(mu), along, input_precision="tf32x3")
        across = tl.dot(tl.abs(q), tl.trans(unsigned4(spread, half)), across, input_precision="tf32x3")
    logits = along * tl.load(centroid_scale + at, mask=there, other=0.0)
    logits = capped(logits + across * tl.load(radius_scale + at, mask=there, other=0.0), cap)
    size = tl.load(tokens + at, mask=there, other=1)
    logits = tl.where(size > 0, logits + tl.log(tl.maximum(size, 1).to(tl.float32)), float("-inf"))
    tl.store(scores + (head * count + row)[:, None] * pages + page, logits, mask=(row < count)[:, None] & there)
