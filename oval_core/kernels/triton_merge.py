"""The log-sum-exp merge in Triton: of parts, and of what the programs of one read found."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from oval_core.kernels.api import Partial
from oval_core.kernels.triton_maths import finite, full


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
    outs, lses = outs.contiguous(), lses.contiguous()
    parts, rows, dim = len(outs), lses[0].numel(), outs.shape[-1]
    sinks = lses if sink_logits is None else sink_logits.float().expand(lses.shape[1:]).contiguous()
    out, lse = full(outs.shape[1:], outs), full(lses.shape[1:], outs)
    merge_kernel[(rows,)](
        outs, lses, sinks, out, lse, parts, rows,
        DIM=dim, BLOCK=triton.next_power_of_2(dim), SINKS=sink_logits is not None, num_warps=1,
    )  # fmt: skip
    return Partial(out, lse)


@triton.jit(do_not_specialize=["parts"])
def merge_kernel(outs, lses, sinks, out, lse, parts, rows, DIM: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr):
    """One program: one row."""
    row, dim = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    most, total = tl.full((), float("-inf"), tl.float32), tl.zeros((), tl.float32)
    if SINKS:
        most = tl.load(sinks + row)
        total += tl.exp(most - finite(most))
    moved = tl.zeros((BLOCK,), tl.float32)
    for part in range(parts):
        mass = tl.load(lses + part * rows + row)
        higher = tl.maximum(most, mass)
        keep, weight = tl.exp(most - finite(higher)), tl.exp(mass - finite(higher))
        moved = moved * keep + weight * tl.load(outs + (part * rows + row) * DIM + dim, mask=dim < DIM, other=0.0)
        total, most = total * keep + weight, higher
    some = tl.where(total == 0, 1.0, total)
    tl.store(out + row * DIM + dim, moved / some, mask=dim < DIM)
    tl.store(lse + row, most + tl.log(some))
