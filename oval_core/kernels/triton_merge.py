"""The log-sum-exp merge in Triton: of parts, and of what the programs of one read found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oval_core.kernels.api import Partial
from oval_core.kernels.triton_maths import ceil_div, finite, full, power_of_two

PARTS, MOST_DIMS = 64, 32  # of a tile


def merge(parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
    """See `reference.merge`."""
    first = parts[0]
    if len(parts) == 1:
        return merge_stacked(first.out[None], first.lse[None], sink_logits).out
    out, lse = torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts])
    return merge_stacked(out, lse, sink_logits).out


def merge_stacked(outs: Tensor, lses: Tensor, sink_logits: Tensor | None = None) -> Partial:
    """Merge N parts that lie in one tensor.

    Args:
        outs, lses: float32 `[N, B, H, G, Q, D_v]` and `[N, B, H, G, Q]`.
        sink_logits: see `reference.merge`.

    Returns: `out [B, H, G, Q, D_v]` and the log-sum-exp with the sink in it, `lse [B, H, G, Q]`.
    """
    sinks = None if sink_logits is None else sink_logits.float().expand(lses.shape[1:]).contiguous()
    found = Partial(full(outs.shape[1:], outs), full(lses.shape[1:], outs))
    merge_into(found.out, found.lse, outs.contiguous(), lses.contiguous(), sinks)
    return found


def merge_into(out: Tensor, lse: Tensor | None, outs: Tensor, lses: Tensor, sinks: Tensor | None) -> None:
    """The same for contiguous tensors into `out`, in any float dtype, and `lse`, float32; None: it is not wanted."""
    parts, dim = outs.shape[0], outs.shape[-1]
    rows, block = outs.numel() // max(1, parts * dim), min(MOST_DIMS, power_of_two(dim))
    merge_kernel[(rows, ceil_div(dim, block))](
        outs, lses, lses if sinks is None else sinks, out, lses if lse is None else lse, parts, rows,
        DIM=dim, BLOCK=block, PARTS=PARTS, SINKS=sinks is not None, MASS=lse is not None, num_warps=2,
    )  # fmt: skip


@triton.jit(do_not_specialize=["parts", "rows"])
def merge_kernel(
    outs, lses, sinks, out, lse, parts, rows,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr, MASS: tl.constexpr,
):  # fmt: skip
    """One program: some dimensions of one row."""
    row, dim = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    if SINKS:
        most = tl.load(sinks + row)
        total += tl.exp(most - finite(most))
    moved = tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        at = part.to(tl.int64) * rows + row
        mass = tl.load(lses + at, mask=part < parts, other=float("-inf"))
        tile = tl.load(outs + at[:, None] * DIM + dim, mask=(part < parts)[:, None] & (dim < DIM), other=0.0)
        higher = tl.maximum(most, tl.max(mass, 0))
        keep, weight = tl.exp(most - finite(higher)), tl.exp(mass - finite(higher))
        moved = moved * keep + tl.sum(weight[:, None] * tile, 0)
        total, most = total * keep + tl.sum(weight, 0), higher
    some = tl.where(total == 0, 1.0, total)
    tl.store(out + row * DIM + dim, (moved / some).to(out.dtype.element_ty), mask=dim < DIM)
    if MASS:
        tl.store(lse + row, most + tl.log(some), mask=tl.program_id(1) == 0)
