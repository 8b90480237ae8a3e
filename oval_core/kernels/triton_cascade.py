"""Selecting and reading in few launches, for the routers in `FUSED_ROUTERS`: a decoding step of a GPU is short.

The selection never leaves the device. Between the kernels there are one or two sorts of torch and two small copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from oval_core.kernels.api import Reads
from oval_core.kernels.triton_basis import MOST_ROWS, bases_of, sizes_of, warps_of
from oval_core.kernels.triton_coarse import coarse_scores
from oval_core.kernels.triton_exact import attend_into, splits_of
from oval_core.kernels.triton_maths import cap_of, full, in_one_layout, tile_rows
from oval_core.kernels.triton_merge import merge_stacked
from oval_core.kernels.triton_select import COLUMNS, Rows, impact_kernel, runs_kernel, share_kernel
from oval_core.kernels.triton_tail import mass_kernel, tail_kernel
from oval_core.memory import on_device
from oval_core.routers.base import Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter

if TYPE_CHECKING:
    from oval_core.layer import OvalLayer

FUSED_ROUTERS = (BasisRouter, BoxRouter)
PAGES_A_PROGRAM = 8  # of the tail
NUMBERS_OF_TIER_3 = ("tokens", "key_error", "value_error")


class Step(NamedTuple):
    """A decoding step of a layer: `query` float32 `[B, H, G, 1, D]`; `budget`, `shortlist`: the most of any row."""

    layer: OvalLayer
    query: Tensor
    scaling: float
    rows: Rows
    budget: int
    shortlist: int


class Listed(NamedTuple):
    """A shortlist: page numbers `[B, H, P]`, the first `shortlist` of which count, and their masses `[B, H, G, n]`."""

    pages: Tensor
    mass: Tensor


def unsupported(
    query: Tensor, layer: OvalLayer, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> str | None:
    """Why `cascade` cannot serve this call, which then goes tier by tier, or None. `query` is `[B, heads, Q, D]`."""
    if query.requires_grad:
        return "gradients"
    if query.shape[2] != 1:
        return "several queries"
    if mask is not None or layer.store.visible is not None:
        return "attention mask"
    if query.shape[2] != 1:
        return "several queries"
    if softcap is not None:
        return "softcap"
    return None if sinks is None else "sink logits"


def cascade(query: Tensor, layer: OvalLayer, mask: Tensor | None, scaling: float) -> tuple[Tensor, Selection]:
    """Select pages as the layer's router does, read them and the open tail exactly, add the estimated tail.

    Args:
        query: `[B, heads, 1, D]`.
        mask: None.

    Returns: float32 `[B, 1, heads, D_v]`, and the selection (its tail is already inside the output).
    """
    step = _step(query, layer, scaling)
    values, order = _shares(step).sort(dim=-1, descending=True, stable=True)
    router, listed = layer.router, None
    if isinstance(router, BasisRouter):
        listed = _listed(step, order)
        values, order = _impact(step, listed).sort(dim=-1, descending=True, stable=True)
    selection, reads = _runs(step, values, order, listed)
    out = _read(step, reads, listed if isinstance(router, BasisRouter) and router.estimate_tail else None)
    return out.flatten(1, 2).transpose(1, 2).contiguous(), selection


def _step(query: Tensor, layer: OvalLayer, scaling: float) -> Step:
    pages, device, config = layer.pages, query.device, layer.config
    derived = pages.derived
    if "triton" not in derived:
        budget = [config.budget_for(count) - 1 for count in pages.counts]  # the open tokens are read anyway
        shortlist = [config.shortlist_for(count) for count in pages.counts]
        derived["triton"] = (on_device([pages.counts, budget, shortlist], device), max(budget), max(shortlist))
    sizes, budget, shortlist = derived["triton"]
    ends = on_device([[table.sealed_end for table in layer.tables], layer.store.lengths], device)
    grouped = query.float().unflatten(1, (layer.store.storage[0].shape[1], -1)).contiguous()
    return Step(layer, grouped, scaling, Rows(*sizes.unbind(), *ends.unbind()), budget, shortlist)


def _shares(step: Step) -> Tensor:
    """What pages are shortlisted by, float32 `[B, H, P]`."""
    pages, config = step.layer.pages, step.layer.config
    basis = pages.basis.narrow(pages.num_pages)
    scores = coarse_scores(step.query, basis, step.scaling, None)
    batch, heads, group, _, width = scores.shape
    (tokens,), capacity = in_one_layout(basis, ("tokens",))
    shares = full((batch, heads, width), scores)
    share_kernel[(batch * heads,)](
        scores, tokens, step.rows, shares, capacity, width, heads, group, config.sink_pages, config.window_pages,
        ROWS=triton.next_power_of_2(group), COLUMNS=COLUMNS,
    )  # fmt: skip
    return shares


def _listed(step: Step, order: Tensor) -> Listed:
    batch, heads, group, _, _ = step.query.shape
    basis = step.layer.pages.basis
    (bases, capacity), sizes = bases_of(basis), sizes_of(basis)
    mass = full((batch, heads, group, step.shortlist), step.query)
    tile = tile_rows(group, MOST_ROWS, least=1)
    mass_kernel[(step.shortlist, triton.cdiv(group, tile), batch * heads)](
        step.query, bases, order, step.rows, mass, capacity, step.shortlist, order.shape[2], heads, group,
        cap_of(step.scaling, None), **{name: size for name, size in sizes.items() if "VALUE" not in name},
        ROWS=tile, num_warps=warps_of(basis, tile),
    )  # fmt: skip
    return Listed(order, mass)


def _impact(step: Step, listed: Listed) -> Tensor:
    """What pages are read by, float32 `[B, H, n]`, in the order of the shortlist."""
    batch, heads, group, _, dim = step.query.shape
    pages, config = step.layer.pages, step.layer.config
    fields, capacity = in_one_layout(pages.basis, NUMBERS_OF_TIER_3)
    impact = full((batch, heads, step.shortlist), step.query)
    impact_kernel[(batch * heads,)](
        step.query, listed.mass, listed.pages, *fields, pages.mean_value_norm, step.rows, impact, capacity,
        step.shortlist, listed.pages.shape[2], heads, group, step.scaling, config.sink_pages, config.window_pages,
        DIM=dim, BLOCK_DIM=triton.next_power_of_2(dim), ROWS=triton.next_power_of_2(group), COLUMNS=COLUMNS,
    )  # fmt: skip
    return impact


def _runs(step: Step, values: Tensor, order: Tensor, listed: Listed | None) -> tuple[Selection, Reads]:
    """The selection and the runs of tokens that it means; what is read loses its mass in the shortlist."""
    batch, heads, ordered = order.shape
    layer, chosen = step.layer, min(step.budget, ordered)
    size, most_open = layer.config.page_size, max(table.open_tokens for table in layer.tables)
    runs = chosen + triton.cdiv(most_open, size)
    picked = torch.empty(batch, heads, chosen, dtype=torch.long, device=order.device)
    valid = torch.empty_like(picked, dtype=torch.bool)
    starts = torch.empty(batch, heads, runs, dtype=torch.long, device=order.device)
    lengths = torch.empty_like(starts)
    pages, mass = (order, values) if listed is None else listed
    runs_kernel[(batch * heads,)](
        order, values, pages, layer.pages.starts, layer.pages.lengths, step.rows, mass, picked, valid, starts, lengths,
        step.shortlist, pages.shape[2], chosen, ordered, runs, layer.pages.starts.shape[1], heads, step.query.shape[2],
        REFINED=listed is not None, PAGE=size, ROWS=triton.next_power_of_2(step.query.shape[2]),
        BLOCK=triton.next_power_of_2(runs),
    )  # fmt: skip
    return Selection(picked, valid), Reads(starts, lengths, size, step.rows.length[:, None] - 1, None)


def _read(step: Step, reads: Reads, tail: Listed | None) -> Tensor:
    """Exact part and tail, each by many programs, and one merge: float32 `[B, H, G, 1, D_v]`."""
    keys, values = step.layer.store.dense()
    exact = splits_of(step.query, keys, values, reads)
    parts = exact if tail is None else exact + triton.cdiv(step.shortlist, PAGES_A_PROGRAM)
    shape = (parts, *step.query.shape[:4])
    outs, lses = full((*shape, values.shape[3]), step.query), full(shape, step.query)
    attend_into(outs[:exact], lses[:exact], step.query, keys, values, reads, step.scaling, None)
    if tail is not None:
        _add_tail(step, tail, outs[exact:], lses[exact:])
    return merge_stacked(outs, lses).out


def _add_tail(step: Step, tail: Listed, outs: Tensor, lses: Tensor) -> None:
    batch, heads, group, _, _ = step.query.shape
    basis = step.layer.pages.basis
    bases, capacity = bases_of(basis)
    tile = tile_rows(group, MOST_ROWS, least=1)
    tail_kernel[(len(outs), triton.cdiv(group, tile), batch * heads)](
        step.query, bases, tail.pages, tail.mass, outs, lses, capacity, step.shortlist, tail.pages.shape[2],
        PAGES_A_PROGRAM, batch * heads * group, group, cap_of(step.scaling, None),
        **sizes_of(basis), ROWS=tile, num_warps=warps_of(basis, tile),
    )  # fmt: skip
