"""Every kernel of an implementation against the reference, on a layer of the shape that is measured next."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.gpu_rows import Check
from benchmarks.layer import bind, random_layer
from oval_core import OvalConfig, kernels
from oval_core.attention import paged_attention
from oval_core.layer import OvalLayer
from oval_core.page_view import reads_of, view_pages
from oval_core.routers import Pages, Selection

CONTEXT, ROWS = 1500, 2
QUERIES = (1, 5)  # a step, and a chunk as in verification
ALLOWED = 2**-7  # of the largest entry: a few roundings of bfloat16, in which keys and values are stored


@torch.inference_mode()
def check_kernels(
    impl: str, shape: str, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> list[Check]:
    """One `Check` a kernel. `sizes`: query heads, KV heads, head dimension."""
    heads, kv_heads, dim = sizes
    config = OvalConfig(router="basis", stats_every=0, budget_ratio=1.0)  # no near tie decides what is compared
    layer = random_layer(config, kv_heads, dim, CONTEXT, dtype, ROWS, device)
    checks = []
    for queries in QUERIES:
        query = 2 * torch.randn(ROWS, heads, queries, dim, dtype=dtype, device=device)
        some = selected(layer, query, layer.pages.num_pages // 3)
        ours, theirs = (dict(_results(name, layer, query, *some)) for name in (impl, "reference"))
        for name, expected in theirs.items():
            error, allowed = _difference(ours[name], expected)
            checks.append(Check(impl, shape, f"{name}, {queries} queries", error, allowed))
    return checks


def _results(
    impl: str, layer: OvalLayer, query: Tensor, grouped: Tensor, pages: Pages, selection: Selection
) -> Iterator[tuple[str, Tensor]]:
    """What each kernel gives, and all together with every page read."""
    module, scaling = kernels.load(impl), query.shape[-1] ** -0.5
    yield "layer", paged_attention(bind(layer.config, impl, query.device), layer, query, None, scaling).float()
    yield "tier 1", module.coarse_scores(grouped, pages.basis, scaling, None)
    tail = module.evaluate_bases(grouped, pages.basis, selection.pages, scaling, None)
    yield from (("tier 2, output", tail.out), ("tier 2, mass", tail.lse))
    reads = reads_of(layer, selection, query.shape[2], None)
    exact = module.attend_pages(grouped, *layer.store.dense(), reads, scaling, None)
    yield from (("exact, output", exact.out), ("exact, mass", exact.lse))
    yield "merge", module.merge([exact, exact._replace(lse=exact.lse - 1)], None)


def selected(layer: OvalLayer, query: Tensor, count: int) -> tuple[Tensor, Pages, Selection]:
    """The query by KV head, the pages, and `count` of them at random, others for every head."""
    binding = bind(layer.config, "reference", query.device)
    pages = view_pages(binding, layer, query.shape[2], None, query.shape[-1] ** -0.5, None)
    kv_heads = layer.store.storage[0].shape[1]
    order = torch.rand(query.shape[0], kv_heads, layer.pages.num_pages, device=query.device).argsort(-1)
    chosen = order[..., :count].contiguous()
    return (
        query.unflatten(1, (kv_heads, -1)).float(),
        pages,
        Selection(chosen, torch.ones_like(chosen, dtype=torch.bool)),
    )


def _difference(got: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest difference, and what is allowed; NaN where one is finite and the other is not."""
    finite = expected.isfinite()
    if got.shape != expected.shape or not torch.equal(finite, got.isfinite()):
        return float("nan"), 0.0
    error = (got - expected).masked_fill(~finite, 0.0).abs().max()
    return float(error), ALLOWED * float(expected.masked_fill(~finite, 0.0).abs().max())
