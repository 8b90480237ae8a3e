"""The estimated tail in Triton: masses of shortlisted pages, then what those that are not read contribute together."""

from __future__ import annotations

import triton
import triton.language as tl

from oval_core.kernels.triton_basis import load_halves, page_logits, page_output, page_weights
from oval_core.kernels.triton_maths import finite


@triton.jit(do_not_specialize=["capacity", "listed"])
def mass_kernel(
    query, bases, pages, mass, capacity, listed, count, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PAGE_HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: the log-mass of one page of the shortlist for one KV head; -inf where the row lists fewer."""
    slot, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    number = tl.load(pages + head * listed + slot)
    low, high = load_halves(query + head * count * DIM, row, count, HALF, DIM, BLOCK_HALF)
    page = head * capacity + tl.maximum(number, 0)
    first, second = page_logits(low, high, bases, page, cap, DIM, HALF, BLOCK_HALF, RANK, BLOCK_RANK, PAGE_HALF)
    first, second, found = page_weights(first, second)
    tl.store(mass + (head * count + row) * listed + slot, tl.where(number >= 0, found, float("-inf")), mask=row < count)


@triton.jit(do_not_specialize=["capacity", "listed", "share", "first", "all_rows"])
def tail_kernel(
    query, bases, pages, mass, outs, lses, capacity, listed, share, first, all_rows, count, cap,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_HALF: tl.constexpr, BLOCK_VALUE: tl.constexpr, RANK: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PAGE_HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: `share` places of the shortlist of one KV head; pages whose mass is -inf are left out unread.

    What it finds is one of the parts `outs`, `lses`, from part `first` on.
    """
    part, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    low, high = load_halves(query + head * count * DIM, row, count, HALF, DIM, BLOCK_HALF)
    most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
    left = tl.zeros((ROWS, BLOCK_VALUE), tl.float32)
    right = left
    for slot in range(part * share, tl.minimum((part + 1) * share, listed)):
        found = tl.load(mass + (head * count + row) * listed + slot, mask=row < count, other=float("-inf"))
        if tl.max(found, 0) > float("-inf"):
            page = head * capacity + tl.load(pages + head * listed + slot)
            a, b = page_logits(low, high, bases, page, cap, DIM, HALF, BLOCK_HALF, RANK, BLOCK_RANK, PAGE_HALF)
            a, b, _ = page_weights(a, b)
            a, b = page_output(a, b, bases, page, VALUE_DIM, VALUE_HALF, BLOCK_VALUE, RANK, BLOCK_RANK, PAGE_HALF)
            higher = tl.maximum(most, found)
            keep, weight = tl.exp(most - finite(higher)), tl.exp(found - finite(higher))
            left, right = blend(left, a, keep, weight), blend(right, b, keep, weight)
            total, most = total * keep + weight, higher
    some, to = tl.where(total == 0, 1.0, total), (first + part).to(tl.int64) * all_rows + head * count + row
    store_part(outs, to, row < count, left / some[:, None], right / some[:, None], VALUE_HALF, VALUE_DIM, BLOCK_VALUE)
    tl.store(lses + to, most + tl.log(some), mask=row < count)


@triton.jit
def blend(old, new, keep, weight):
    """Rows of both, each row with weights of its own."""
    return old * keep[:, None] + new * weight[:, None]


@triton.jit
def store_part(outs, to, there, left, right, HALF: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Write the halves of rows `to` of `outs [..., DIM]`."""
    dim = tl.arange(0, BLOCK)
    at = outs + to[:, None] * DIM + dim
    tl.store(at, left, mask=there[:, None] & (dim < HALF))
    tl.store(at + HALF, right, mask=there[:, None] & (dim + HALF < DIM))
