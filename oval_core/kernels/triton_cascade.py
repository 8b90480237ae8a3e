"""Selecting and reading in few launches, for the routers in `FUSED_ROUTERS`: a decoding step of a GPU is short.

The selection never leaves the device, and nothing but the kernels runs there. What they are given stays the same as
long as no page is sealed, but for the query and the number of tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from oval_core.basis import COARSE_FIELDS
from oval_core.kernels.api import Reads
from oval_core.kernels.triton_basis import MOST_ROWS, Bases, sizes_of, warps_of
from oval_core.kernels.triton_coarse import Coarse, score_into, tile_pages
from oval_core.kernels.triton_exact import attend_into, tile_of
from oval_core.kernels.triton_maths import cap_of, ceil_div, full, in_one_layout, power_of_two, processors, tile_rows
from oval_core.kernels.triton_merge import merge_into
from oval_core.kernels.triton_select import (
    Chosen,
    Rows,
    Scored,
    Table,
    box_kernel,
    impact_kernel,
    shortlist_kernel,
    warps_for,
)
from oval_core.kernels.triton_tail import mass_kernel, tail_kernel
from oval_core.memory import on_device, refuse_capture
from oval_core.routers.base import Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter

if TYPE_CHECKING:
    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer

FUSED_ROUTERS = (BasisRouter, BoxRouter)
TAIL_PROGRAMS_A_PROCESSOR, MOST_TAIL_PAGES = 16, 8
LEAST_RANKS, LEAST_LISTED = 2048, 512  # fewer pages are ranked by the same compiled kernels
ANY_TOKEN = 1 << 62  # the runs of a step end where its row ends


class Plan(NamedTuple):
    """What steps have in common until pages or config change; `budget`, `shortlist`: the most of any row."""

    config: OvalConfig
    ends: list[int]
    rows: Rows
    budget: int
    shortlist: int
    capacity: int
    coarse: Coarse
    bases: Bases | None
    sizes: dict[str, int]
    errors: tuple[Tensor, ...]
    table: Table
    last: Tensor


class Step(NamedTuple):
    """A decoding step of a layer: `query` `[B, H, G, D]`, contiguous, in the dtype of the model."""

    layer: OvalLayer
    plan: Plan
    query: Tensor
    scaling: float


class Listed(NamedTuple):
    """A shortlist: page numbers, int32 `[B, H, n]`, -1 where a row has fewer, and their log-masses `[B, H, G, n]`."""

    pages: Tensor
    mass: Tensor


def unsupported(
    query: Tensor, layer: OvalLayer, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> str | None:
    """Why `cascade` cannot serve this call, which then goes tier by tier, or None. `query` is `[B, heads, Q, D]`."""
    if query.requires_grad:
        return "gradients"
    if mask is not None or layer.store.visible is not None or layer.store.is_ragged:
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

    Returns: `[B, 1, heads, D_v]` in the dtype of `query`, and the selection in the order of the pages (its tail is
    already inside the output).

    Raises:
        RuntimeError: a CUDA graph is being captured, see `memory.refuse_capture`.
    """
    refuse_capture(query.device)
    batch, _, _, dim = query.shape
    grouped = query.contiguous().view(batch, layer.store.storage[0].shape[1], -1, dim)
    step, router = Step(layer, _plan(layer), grouped, scaling), layer.router
    scored = _scored(step)
    listed = _listed(step, scored) if isinstance(router, BasisRouter) else None
    chosen = _chosen(step, scored, listed)
    out = _read(step, chosen, listed if isinstance(router, BasisRouter) and router.estimate_tail else None)
    return out, Selection(chosen.pages, chosen.valid)


def _plan(layer: OvalLayer) -> Plan:
    derived, ends = layer.pages.derived, [table.sealed_end for table in layer.tables]
    plan: Plan | None = derived.get("triton")
    if plan is None or plan.config is not layer.config or plan.ends != ends:
        plan = derived["triton"] = _new_plan(layer, ends)
    return plan


def _new_plan(layer: OvalLayer, ends: list[int]) -> Plan:
    pages, config, basis = layer.pages, layer.config, layer.pages.basis
    device, refined = pages.starts.device, basis.rank > 0
    budget = [config.budget_for(count) - 1 for count in pages.counts]  # the open tokens are read anyway
    shortlist = [config.shortlist_for(count) for count in pages.counts]
    names = (*COARSE_FIELDS, *Bases._fields, "key_error", "value_error") if refined else COARSE_FIELDS
    fields, capacity = in_one_layout(basis, names)
    return Plan(
        config,
        ends,
        Rows(*on_device([pages.counts, budget, shortlist, ends], device).unbind()),
        max(budget),
        max(shortlist),
        capacity,
        Coarse(*fields[: len(COARSE_FIELDS)]),
        Bases(*fields[len(COARSE_FIELDS) : -2]) if refined else None,
        sizes_of(basis),
        (basis.tokens, *fields[-2:], pages.mean_value_norm) if refined else (),
        Table(pages.starts, pages.lengths),
        on_device([[ANY_TOKEN]] * len(ends), device),
    )


def _scored(step: Step) -> Scored:
    """Tier 1 of all pages."""
    pages, query = step.layer.pages.num_pages, step.query
    scores = full((*query.shape[:3], pages), query)
    masses = full((*query.shape[:3], ceil_div(pages, tile_pages(query.dtype))), query)
    plan = step.plan
    score_into(scores, masses, query, plan.coarse, plan.rows.counts, plan.capacity, step.scaling, None)
    return Scored(scores, masses)


def _ranking(step: Step, scored: Scored) -> tuple[tuple[Any, ...], dict[str, int]]:
    """What every kernel that ranks by share takes last, and its compile-time sizes."""
    _, heads, group, _ = step.query.shape
    config, tiles = step.layer.config, scored.masses.shape[3]
    ranks = max(LEAST_RANKS, power_of_two(scored.scores.shape[3]))
    sizes = {"ROWS": power_of_two(group), "TILES": max(32, power_of_two(tiles)), "PAGES": ranks}
    return (heads, group, config.sink_pages, config.window_pages), {**sizes, "num_warps": warps_for(ranks)}


def _listed(step: Step, scored: Scored) -> Listed:
    """The shortlist and its masses."""
    plan, (batch, heads, group, _) = step.plan, step.query.shape
    listed, tile = plan.shortlist, tile_rows(group, MOST_ROWS, least=1)
    pages = torch.empty(batch, heads, listed, dtype=torch.int32, device=step.query.device)
    mass = full((batch, heads, group, listed), step.query)
    last, sizes = _ranking(step, scored)
    shortlist_kernel[(batch * heads,)](
        scored, plan.coarse.tokens, plan.rows, pages, plan.capacity, *scored.scores.shape[3:],
        scored.masses.shape[3], listed, *last, **sizes, LISTED=max(LEAST_LISTED, power_of_two(listed)),
    )  # fmt: skip
    mass_kernel[(listed, ceil_div(group, tile), batch * heads)](
        step.query, plan.bases, pages, mass, plan.capacity, listed, group, cap_of(step.scaling, None),
        **{name: size for name, size in plan.sizes.items() if "VALUE" not in name},
        ROWS=tile, num_warps=warps_of(step.layer.pages.basis, tile),
    )  # fmt: skip
    return Listed(pages, mass)


def _chosen(step: Step, scored: Scored, listed: Listed | None) -> Chosen:
    """What is read; its pages lose their mass in the shortlist."""
    plan, (batch, heads, group, dim) = step.plan, step.query.shape
    layer, device, most, runs = step.layer, step.query.device, plan.budget, plan.budget + _open_runs(step.layer)
    pages = torch.empty(batch, heads, most, dtype=torch.long, device=device)
    starts = torch.empty(batch, heads, runs, dtype=torch.long, device=device)
    chosen = Chosen(pages, torch.empty_like(pages, dtype=torch.bool), starts, torch.empty_like(starts))
    numbers, last_sizes = (most, runs, layer.store.num_tokens), {"RUNS": power_of_two(runs)}
    last, sizes = _ranking(step, scored)
    if listed is None:
        box_kernel[(batch * heads,)](
            scored, plan.coarse.tokens, plan.rows, plan.table, chosen, plan.capacity, *scored.scores.shape[3:],
            scored.masses.shape[3], *numbers, *last, **sizes, **last_sizes, SIZE=layer.config.page_size,
        )  # fmt: skip
        return chosen
    width, rows = max(LEAST_LISTED, power_of_two(plan.shortlist)), power_of_two(group)
    impact_kernel[(batch * heads,)](
        step.query, listed.mass, listed.pages, *plan.errors, plan.rows, plan.table, chosen, plan.capacity,
        plan.shortlist, *numbers, heads, group, step.scaling, *last[2:],
        DIM=dim, BLOCK_DIM=power_of_two(dim), ROWS=rows, LISTED=width, SIZE=layer.config.page_size,
        **last_sizes, num_warps=warps_for(width * rows),
    )  # fmt: skip
    return chosen


def _open_runs(layer: OvalLayer) -> int:
    """Runs that the open tail has room in: as many as it may ever need, for other kernels would be other programs."""
    config, most_open = layer.config, max(table.open_tokens for table in layer.tables)
    return ceil_div(max(most_open, config.page_size + 1, config.seal_tokens + 1), config.page_size)


def _read(step: Step, chosen: Chosen, tail: Listed | None) -> Tensor:
    """Exact part and tail, each by many programs, and one merge: `[B, 1, heads, D_v]`."""
    query, plan, (keys, values) = step.query, step.plan, step.layer.store.dense()
    batch, heads, group, _ = query.shape
    size = step.layer.config.page_size
    tile = tile_of(query, keys, values, chosen.starts.shape[2] * size)
    share = _tail_pages(step)
    parts = tile.splits + (0 if tail is None else ceil_div(plan.shortlist, share))
    outs, lses = (
        full((parts, batch * heads * group, values.shape[3]), query),
        full((parts, batch * heads * group), query),
    )
    reads = Reads(chosen.starts, chosen.lengths, size, plan.last, None)
    attend_into(outs, lses, tile, query, 1, keys, values, reads, step.scaling, None)
    if tail is not None:
        _add_tail(step, tail, share, tile.splits, outs, lses)
    out = torch.empty(batch, 1, heads * group, values.shape[3], dtype=query.dtype, device=query.device)
    merge_into(out, None, outs, lses, None)
    return out


def _tail_pages(step: Step) -> int:
    """Pages of a program of the tail: as few as keep the device busy, for one waits for the other."""
    batch, heads, group, _ = step.query.shape
    work = step.plan.shortlist * batch * heads * ceil_div(group, MOST_ROWS)
    return max(1, min(MOST_TAIL_PAGES, ceil_div(work, TAIL_PROGRAMS_A_PROCESSOR * processors(step.query.device))))


def _add_tail(step: Step, tail: Listed, share: int, first: int, outs: Tensor, lses: Tensor) -> None:
    """Write the parts from `first` on."""
    plan, (batch, heads, group, _) = step.plan, step.query.shape
    tile = tile_rows(group, MOST_ROWS, least=1)
    warps = warps_of(step.layer.pages.basis, tile) * (1 if plan.sizes["BLOCK_VALUE"] <= 64 else 2)  # for the output
    tail_kernel[(len(outs) - first, ceil_div(group, tile), batch * heads)](
        step.query, plan.bases, tail.pages, tail.mass, outs, lses, plan.capacity, plan.shortlist,
        share, first, batch * heads * group, group, cap_of(step.scaling, None),
        **plan.sizes, ROWS=tile, num_warps=min(8, warps),
    )  # fmt: skip
