"""Speed of one attention layer on a GPU: the tiers one by one and together, against SDPA's FlashAttention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.alternating import median_ms, speedup, time_in_turns
from benchmarks.gpu_checks import selected
from benchmarks.gpu_clock import lacking_memory, layer_clock
from benchmarks.gpu_rows import Row
from benchmarks.layer import bind, random_layer
from oval_core import OvalConfig
from oval_core.attention import paged_attention
from oval_core.binding import Binding
from oval_core.layer import OvalLayer
from oval_core.page_view import reads_of

PEAK = 2.6  # times the keys and values: what making them needs


@dataclass(frozen=True)
class Case:
    """What is measured: a name, query heads, KV heads and head dimension, tokens in the cache, rows."""

    shape: str
    sizes: tuple[int, int, int]
    context: int
    batch: int


@torch.inference_mode()
def measure_layer(
    case: Case, impls: list[str], dtype: torch.dtype, device: torch.device, bandwidth: float, rounds: int
) -> list[Row]:
    """One row an implementation; `bandwidth` in bytes a second."""
    heads, kv_heads, dim = case.sizes
    lacking = lacking_memory(device, PEAK * 2 * case.batch * kv_heads * case.context * dim * dtype.itemsize)
    if lacking:
        return [Row("layer", case.shape, case.context, case.batch, impl, lacking) for impl in impls]
    config = OvalConfig(router="basis", stats_every=0)
    layer = random_layer(config, kv_heads, dim, case.context, dtype, case.batch, device)
    query = 2 * torch.randn(case.batch, heads, 1, dim, dtype=dtype, device=device)
    bindings = {impl: bind(config, impl, device) for impl in impls}
    variants: dict[str, Callable[[], object]] = {"dense": partial(_dense, layer, query)}
    for impl, binding in bindings.items():
        variants |= {f"{impl}: {name}": call for name, call in _tiers(binding, layer, query).items()}
    seconds = time_in_turns(variants, rounds, layer_clock(device))
    floor_ms = sum(states.nbytes for states in layer.store.dense()) / bandwidth * 1e3  # of reading everything
    return [_row(case, impl, seconds, floor_ms, binding.recorder.report()) for impl, binding in bindings.items()]


def _row(case: Case, impl: str, seconds: dict[str, list[float]], dense_floor_ms: float, stats: dict[str, Any]) -> Row:
    own = f"{impl}: "
    parts = {name.removeprefix(own): median_ms(values) for name, values in seconds.items() if name.startswith(own)}
    oval_ms, ratio = parts.pop("all"), stats["bytes_read"] / stats["bytes_dense"]
    floor_ms = ratio * dense_floor_ms
    return Row(
        *("layer", case.shape, case.context, case.batch, impl),
        dense_ms=median_ms(seconds["dense"]),
        oval_ms=oval_ms,
        vs_dense=speedup(seconds, "dense", f"{own}all"),
        floor_ms=floor_ms,
        of_floor=floor_ms / oval_ms,
        read_ratio=ratio,
        parts_ms=parts,
    )


def _dense(layer: OvalLayer, query: Tensor) -> Tensor:
    """The queries of a KV head's group as rows of one head: FlashAttention then reads every key once."""
    keys, values = layer.store.dense()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query.view(query.shape[0], keys.shape[1], -1, query.shape[3]), keys, values)


def _tiers(binding: Binding, layer: OvalLayer, query: Tensor) -> dict[str, Callable[[], object]]:
    """Calls of each kernel as a step makes them, and of the whole layer."""
    module, scaling = binding.kernels, query.shape[-1] ** -0.5
    grouped, pages, selection = selected(layer, query, layer.config.budget_for(layer.pages.num_pages) - 1)
    short = torch.arange(pages.most[1], device=query.device).expand(*selection.pages.shape[:2], -1).contiguous()
    reads = reads_of(layer, selection, 1, None)
    exact = module.attend_pages(grouped, *layer.store.dense(), reads, scaling, None)
    return {
        "tier 1": partial(module.coarse_scores, grouped, pages.basis, scaling, None),
        "tier 2": partial(module.evaluate_bases, grouped, pages.basis, short, scaling, None),
        "exact": partial(module.attend_pages, grouped, *layer.store.dense(), reads, scaling, None),
        "merge": partial(module.merge, [exact, exact], None),
        "all": partial(paged_attention, binding, layer, query, None, scaling),
    }
