"""Tier 2 in Triton: mass and output of shortlisted pages, read by page number from the 8- and 4-bit numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels.api import Partial
from oval_core.kernels.triton_maths import (
    cap_of,
    capped,
    ceil_div,
    finite,
    full,
    in_one_layout,
    power_of_two,
    rows_of,
    signed4,
    tile_rows,
)

MOST_ROWS = 8  # of a tile: its products with all directions of a page are held at once
PRODUCTS_A_WARP = 2048  # 64 registers a thread


class Bases(NamedTuple):
    """The fields of `PageBasis` that tier 2 reads, one layout for all, and the pages from one KV head to the next."""

    centroid: Any
    centroid_scale: Any
    directions: Any
    directions_scale: Any
    coefficients: Any
    coefficients_scale: Any
    regression: Any
    regression_scale: Any
    value_offset: Any
    value_offset_scale: Any
    tokens: Any


def evaluate_bases(query: Tensor, basis: PageBasis, pages: Tensor, scaling: float, softcap: float | None) -> Partial:
    """See `reference.evaluate_bases`."""
    batch, heads, listed = pages.shape
    rows, (bases, capacity) = rows_of(query), bases_of(basis)
    shape, count = (*query.shape[:4], listed), rows.shape[2]
    out, lse = full((*shape, basis.value_offset.shape[3]), query), full(shape, query)
    tile = tile_rows(count, MOST_ROWS, least=1)
    grid = (listed, ceil_div(count, tile), batch * heads)
    if listed:
        evaluate_kernel[grid](
            rows, bases, pages.contiguous(), out, lse, capacity, listed, count, cap_of(scaling, softcap),
            **sizes_of(basis), ROWS=tile, num_warps=warps_of(basis, tile),
        )  # fmt: skip
    return Partial(out, lse)


def bases_of(basis: PageBasis) -> tuple[Bases, int]:
    """What kernels take of a basis, and the pages from one KV head to the next."""
    fields, capacity = in_one_layout(basis, Bases._fields)
    return Bases(*fields), capacity


def sizes_of(basis: PageBasis) -> dict[str, int]:
    """The compile-time sizes of a page's basis: dimensions, bytes of packed vectors, and powers of two they fit in."""
    dim, value_dim = basis.centroid.shape[3], basis.value_offset.shape[3]
    halves = (dim + 1) // 2, (value_dim + 1) // 2
    blocks = [power_of_two(half) for half in halves]
    return {
        "DIM": dim, "HALF": halves[0], "BLOCK_HALF": blocks[0], "VALUE_DIM": value_dim, "VALUE_HALF": halves[1],
        "BLOCK_VALUE": blocks[1], "RANK": basis.rank, "BLOCK_RANK": power_of_two(basis.rank),
        "PAGE_HALF": basis.page_size // 2,
    }  # fmt: skip


def warps_of(basis: PageBasis, rows: int) -> int:
    """Warps of a program that holds the products of that many rows with the directions of a page."""
    products = rows * power_of_two(basis.rank) * power_of_two(basis.centroid.shape[3]) // 2
    return max(1, min(8, products // PRODUCTS_A_WARP))


@triton.jit
def load_halves(start, rows, count, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of `DIM` numbers from `start` on, as float32: their first and second halves `[rows, BLOCK]`."""
    dim = tl.arange(0, BLOCK)
    at = start + rows[:, None].to(tl.int64) * DIM + dim
    first = tl.load(at, mask=(rows < count)[:, None] & (dim < HALF), other=0).to(tl.float32)
    second = tl.load(at + HALF, mask=(rows < count)[:, None] & (dim + HALF < DIM), other=0).to(tl.float32)
    return first, second


@triton.jit
def load_signed4(packed, scales, page, HALF: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, B_R: tl.constexpr):
    """The vectors of a page's directions in halves `[1, B_R, BLOCK]`, as they are stored, and their scales `[B_R]`."""
    direction, byte = tl.arange(0, B_R), tl.arange(0, BLOCK)
    inside = (direction < RANK)[:, None] & (byte < HALF)
    both = tl.load(packed + (page * RANK + direction)[:, None] * HALF + byte, mask=inside, other=0)
    scale = tl.load(scales + page * RANK + direction, mask=direction < RANK, other=0.0)
    return signed4(both, 0)[None], signed4(both, 1)[None], scale


@triton.jit
def page_logits(
    low, high, bases, page, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PAGE_HALF: tl.constexpr,
):  # fmt: skip
    """Logits of a page's tokens for the query halves `low`, `high` `[rows, BLOCK_HALF]`, in halves as well."""
    mu_low, mu_high = load_halves(bases.centroid + page * DIM, tl.arange(0, 1), 1, HALF, DIM, BLOCK_HALF)
    middle = tl.sum(low * mu_low + high * mu_high, 1) * tl.load(bases.centroid_scale + page)
    b_low, b_high, b_scale = load_signed4(
        bases.directions, bases.directions_scale, page, HALF, BLOCK_HALF, RANK, BLOCK_RANK
    )
    c_low, c_high, c_scale = load_signed4(
        bases.coefficients, bases.coefficients_scale, page, PAGE_HALF, PAGE_HALF, RANK, BLOCK_RANK
    )
    along = tl.sum(low[:, None] * b_low + high[:, None] * b_high, 2) * b_scale * c_scale  # [rows, BLOCK_RANK]
    first = capped(middle[:, None] + tl.sum(along[:, :, None] * c_low, 1), cap)
    second = capped(middle[:, None] + tl.sum(along[:, :, None] * c_high, 1), cap)
    token, tokens = tl.arange(0, PAGE_HALF), tl.load(bases.tokens + page)
    first = tl.where(token < tokens, first, float("-inf"))
    return first, tl.where(token + PAGE_HALF < tokens, second, float("-inf"))


@triton.jit
def page_weights(first, second):
    """Softmax over the tokens of both halves, and the log-sum-exp `[rows]`; zeros and -inf where there is no token."""
    most = tl.maximum(tl.max(first, 1), tl.max(second, 1))
    shift = finite(most)[:, None]
    first, second = tl.exp(first - shift), tl.exp(second - shift)
    total = tl.sum(first, 1) + tl.sum(second, 1)
    some = tl.where(total == 0, 1.0, total)
    return first / some[:, None], second / some[:, None], most + tl.log(some)


@triton.jit
def page_output(
    first, second, bases, page,
    VALUE_DIM: tl.constexpr, VALUE_HALF: tl.constexpr, BLOCK_VALUE: tl.constexpr, RANK: tl.constexpr,
    BLOCK_RANK: tl.constexpr, PAGE_HALF: tl.constexpr,
):  # fmt: skip
    """`v0 + weights C W` of a page, its halves `[rows, BLOCK_VALUE]`."""
    v_low, v_high = load_halves(
        bases.value_offset + page * VALUE_DIM, tl.arange(0, 1), 1, VALUE_HALF, VALUE_DIM, BLOCK_VALUE
    )
    c_low, c_high, c_scale = load_signed4(
        bases.coefficients, bases.coefficients_scale, page, PAGE_HALF, PAGE_HALF, RANK, BLOCK_RANK
    )
    w_low, w_high, w_scale = load_signed4(
        bases.regression, bases.regression_scale, page, VALUE_HALF, BLOCK_VALUE, RANK, BLOCK_RANK
    )
    moved = tl.sum(first[:, None] * c_low, 2) + tl.sum(second[:, None] * c_high, 2)
    moved = (moved * c_scale * w_scale)[:, :, None]
    v_scale = tl.load(bases.value_offset_scale + page)
    return v_low * v_scale + tl.sum(moved * w_low, 1), v_high * v_scale + tl.sum(moved * w_high, 1)


@triton.jit(do_not_specialize=["capacity", "listed"])
def evaluate_kernel(
    query, bases, pages, out, lse, capacity, listed, count, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_HALF: tl.constexpr, BLOCK_VALUE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PAGE_HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: one shortlisted page and a tile of rows of one KV head."""
    slot, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    page = head * capacity + tl.load(pages + head * listed + slot)
    low, high = load_halves(query + head * count * DIM, rows, count, HALF, DIM, BLOCK_HALF)
    first, second = page_logits(low, high, bases, page, cap, DIM, HALF, BLOCK_HALF, RANK, BLOCK_RANK, PAGE_HALF)
    first, second, mass = page_weights(first, second)
    low, high = page_output(first, second, bases, page, VALUE_DIM, VALUE_HALF, BLOCK_VALUE, RANK, BLOCK_RANK, PAGE_HALF)
    at, there, dim = (head * count + rows) * listed + slot, rows < count, tl.arange(0, BLOCK_VALUE)
    to = out + at[:, None] * VALUE_DIM + dim
    tl.store(lse + at, mass, mask=there)
    tl.store(to, low, mask=there[:, None] & (dim < VALUE_HALF))
    tl.store(to + VALUE_HALF, high, mask=there[:, None] & (dim + VALUE_HALF < VALUE_DIM))
