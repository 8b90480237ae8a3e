"""Every kernel of an implementation against the reference, on layers of the shapes that are measured next.

First the tiers one by one, then whole steps that leave pages out, so that a fault in any kernel of a step shows: in the
output, or in the pages that are read. Sizes of shortlist and budget are chosen such that no near tie decides.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.gpu_rows import Check
from benchmarks.layer import bind, random_layer
from oval_core import OvalConfig
from oval_core.attention import paged_attention
from oval_core.kernels import load, reference
from oval_core.layer import OvalLayer
from oval_core.page_view import reads_of, view_pages
from oval_core.routers import Pages, Selection, make_router
from oval_core.routers.basis import BasisRouter

CONTEXT, ROWS = 1500, 2
QUERIES = (1, 5)  # a step, and a chunk as in verification
ROUTERS = ("basis", "box")
ALLOWED = 1e-4  # of what is computed in float32; a few in a million are usual
ROUNDED = {"exact, output", *(f"{router} step, output" for router in ROUTERS)}  # to the dtype of keys and values


@torch.inference_mode()
def check_kernels(
    impl: str, shape: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Check]:
    """One `Check` a kernel. `sizes`: query heads, KV heads, head dimension."""
    heads, kv_heads, dim = sizes
    config = OvalConfig(router="basis", stats_every=0)
    layer = random_layer(config, kv_heads, dim, CONTEXT, dtype, ROWS, device)
    checks = []
    for queries in QUERIES:
        query = 2 * torch.randn(ROWS, heads, queries, dim, dtype=dtype, device=device).float()
        ours, theirs = (dict(found) for found in _both(impl, layer, query))
        for name, expected in theirs.items():
            error, largest = _difference(ours[name], expected)
            allowed = max(ALLOWED, largest * torch.finfo(dtype).eps / 2) if name in ROUNDED else ALLOWED
            kind = f"{str(dtype).removeprefix('torch.')}, {queries} queries"
            checks.append(Check(impl, shape, f"{name}, {kind}", error, allowed))
    return checks


def _both(impl: str, layer: OvalLayer, query: Tensor) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """What each kernel gives, of `impl` and of the reference, by name."""
    grouped, pages = _seen(layer, query)
    some, steps = _some_pages(pages), {router: _step_without_ties(layer, query, router) for router in ROUTERS}
    for name in (impl, "reference"):
        yield _results(name, layer, grouped, pages, some, steps, query)


def _results(
    impl: str,
    layer: OvalLayer,
    grouped: Tensor,
    pages: Pages,
    some: Selection,
    steps: dict[str, OvalLayer],
    query: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    module, scaling = load(impl), pages.scaling
    yield "tier 1", module.coarse_scores(grouped, pages.basis, scaling, None)
    tail = module.evaluate_bases(grouped, pages.basis, some.pages, scaling, None)
    yield from (("tier 2, output", tail.out), ("tier 2, mass", tail.lse))
    exact = module.attend_pages(
        grouped, *layer.store.dense(), reads_of(layer, some, query.shape[2], None), scaling, None
    )
    yield from (("exact, output", exact.out), ("exact, mass", exact.lse))
    # parts that do not depend on the implementation
    parts = reference.evaluate_bases(grouped, pages.basis, some.pages, scaling, None)
    yield "merge", module.merge([parts._replace(out=parts.out[..., i, :], lse=parts.lse[..., i]) for i in (0, 1)], None)
    for router, step in steps.items():
        binding = bind(step.config, impl, query.device)
        with binding.recorder.tracing() as entries:
            yield f"{router} step, output", paged_attention(binding, step, query, None, scaling)
        yield f"{router} step, pages", entries[0].read.float()


def _seen(layer: OvalLayer, query: Tensor) -> tuple[Tensor, Pages]:
    """The query by KV head, `[B, H, G, Q, D]`, and the pages as a router sees them."""
    binding = bind(layer.config, "reference", query.device)
    pages = view_pages(binding, layer, query.shape[2], None, query.shape[-1] ** -0.5, None)
    return query.unflatten(1, (layer.store.storage[0].shape[1], -1)), pages


def _some_pages(pages: Pages) -> Selection:
    """A third of them at random, others for every head."""
    order = torch.rand(pages.basis.tokens.shape, device=pages.starts.device).argsort(-1)
    chosen = order[..., : order.shape[-1] // 3].contiguous()
    return Selection(chosen, torch.ones_like(chosen, dtype=torch.bool))


def _step_without_ties(layer: OvalLayer, query: Tensor, router: str) -> OvalLayer:
    """The same tokens under `router`, with the budget, and the shortlist, that are clearest cut for this query."""
    grouped, pages = _seen(layer, query)
    count = len(pages.index)
    ranks = pages.weights(reference.coarse_scores(grouped, pages.basis, pages.scaling, None))
    config = replace(layer.config, router=router)
    if router == "basis":
        listed = _clearest_cut(ranks, pages, range(count // 2, 3 * count // 4))
        config = replace(config, shortlist_ratio=1.0, shortlist_pages=listed)
        shortlist, _ = pages.top(ranks, torch.full_like(pages.shortlist, listed), listed)
        mass = reference.evaluate_bases(grouped, pages.basis, shortlist, pages.scaling, None).lse
        impact = BasisRouter()._impact(grouped, mass, shortlist, pages)
        ranks = torch.zeros_like(ranks).scatter_(-1, shortlist, impact)
    budget = _clearest_cut(ranks, pages, range(count // 6, count // 3))
    step = copy.deepcopy(layer)
    step.config = replace(config, budget_pages=budget + 1)  # the open tokens count as a page
    step.router = make_router(step.config)
    return step


def _clearest_cut(ranks: Tensor, pages: Pages, counts: range) -> int:
    """How many pages, out of `counts`, are best told from the others by `ranks [B, H, P]` in every head."""
    ordered = ranks.masked_fill(pages.forced(), torch.inf).sort(-1, descending=True).values
    kept = 1 - ordered[..., 1:] / ordered[..., :-1]  # the n-th: share of its rank by which the next one is below it
    return counts.start + int(kept.amin((0, 1))[counts.start - 1 : counts.stop - 1].argmax())


def _difference(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest difference and largest entry; NaN where one is finite and the other is not."""
    finite = expected.isfinite()
    if got.shape != expected.shape or not torch.equal(finite, got.isfinite()):
        return float("nan"), 0.0
    error = (got - expected).masked_fill(~finite, 0.0).abs().max()
    return float(error), float(expected.masked_fill(~finite, 0.0).abs().max())
