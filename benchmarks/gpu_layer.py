"""Speed of one attention layer on a GPU: called, replayed as a CUDA graph, kernel by kernel; against SDPA's flash."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.alternating import median_ms, speedup, time_in_turns
from benchmarks.gpu_clock import lacking_memory, layer_clock
from benchmarks.gpu_graph import Call, captured, root_of
from benchmarks.gpu_profile import kernel_ms
from benchmarks.gpu_rows import Case, Row
from benchmarks.layer import bind, random_layer
from oval_core import OvalConfig
from oval_core.attention import paged_attention
from oval_core.layer import OvalLayer

PEAK = 2.6  # times the keys and values: what making them needs


@torch.inference_mode()
def measure_layer(
    case: Case, impl: str, dtype: torch.dtype, device: torch.device, bandwidth: float, rounds: int
) -> Row:
    """One row; `bandwidth` in bytes a second."""
    row = partial(Row, "layer", case.shape, case.context, case.batch, impl)
    heads, kv_heads, dim = case.sizes
    lacking = lacking_memory(device, PEAK * 2 * case.batch * kv_heads * case.context * dim * dtype.itemsize)
    if lacking:
        return row(lacking)
    config = OvalConfig(router="basis", stats_every=0)
    layer = random_layer(config, kv_heads, dim, case.context, dtype, case.batch, device)
    query = 2 * torch.randn(case.batch, heads, 1, dim, dtype=dtype, device=device)
    binding, silent = (bind(config, impl, device) for _ in range(2))  # replays are not counted
    step, again = (partial(paged_attention, b, layer, query, None, dim**-0.5) for b in (binding, silent))

    dense = partial(_dense, layer, query)
    seconds = time_in_turns({"dense": dense, "oval": step}, rounds, layer_clock(device))
    stats, parts, notes = binding.recorder.report(), *_parts(again, device)
    graph, refused = _graph(dense, again, rounds, device)
    ratio = stats["bytes_read"] / stats["bytes_dense"]
    floor_ms = ratio * sum(states.nbytes for states in layer.store.dense()) / bandwidth * 1e3
    oval_ms, graph_ms = median_ms(seconds["oval"]), median_ms(graph["oval"]) if graph else None
    return row(
        "; ".join(filter(None, (notes, refused))) or None,
        dense_ms=median_ms(seconds["dense"]),
        oval_ms=oval_ms,
        graph_ms=graph_ms,
        vs_dense=speedup(seconds, "dense", "oval"),
        graph_vs_dense=speedup(graph, "dense", "oval") if graph else None,
        floor_ms=floor_ms,
        of_floor=floor_ms / (graph_ms or oval_ms),
        read_ratio=ratio,
        parts_ms=parts,
    )


def _parts(step: Call, device: torch.device) -> tuple[dict[str, float], str]:
    """Milliseconds of the kernels; without them, why."""
    try:
        return kernel_ms(step, device), ""
    except RuntimeError as error:  # some machines do not let a process look
        return {}, f"kernels were not timed: {root_of(error)}"


def _graph(dense: Call, step: Call, rounds: int, device: torch.device) -> tuple[dict[str, list[float]], str]:
    """Seconds of `step` replayed as a CUDA graph, in turns with `dense`; empty if it cannot be captured, and why."""
    if device.type != "cuda":
        return {}, ""
    graphs, refused = captured({"oval": step})
    return (time_in_turns({"dense": dense, **graphs}, rounds, layer_clock(device)) if graphs else {}), refused


def _dense(layer: OvalLayer, query: Tensor) -> Tensor:
    """The queries of a KV head's group as rows of one head: FlashAttention then reads every key once."""
    keys, values = layer.store.dense()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query.view(query.shape[0], keys.shape[1], -1, query.shape[3]), keys, values)
