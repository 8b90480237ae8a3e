"""Speed of one attention layer: OVAL against SDPA on a preallocated cache and against the memory floor.

Random keys and values. The floor is the bytes that the step reads over the memory bandwidth that a large copy reaches
here. Figures are medians of alternated calls; the tiers are timed one by one.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.alternating import Clock, median_ms, speedup, time_in_turns, wall_s
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from oval_core import OvalConfig, kernels
from oval_core.attention import paged_attention
from oval_core.binding import Binding
from oval_core.layer import OvalLayer
from oval_core.stats import Recorder

SHAPES = {"SmolLM2-135M": (9, 3, 64), "Llama-3.1-8B": (32, 8, 128)}  # query heads, KV heads, head dimension
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COPY_BYTES = 256 * 1024**2
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """One shape and context: how many times faster than SDPA, and how many times slower than the floor."""

    shape: str
    context: int
    dtype: str
    vs_sdpa: float
    vs_floor: float
    oval_ms: float
    sdpa_ms: float
    floor_ms: float


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for shape in options.shapes:
        for dtype in options.dtypes:
            for context in options.contexts:
                rows.append(_measure(shape, dtype, context, options.calls, bandwidth))
                print(rows[-1], flush=True)
    result = {
        "benchmark": "layer",
        "command": command_line("layer", arguments),
        "machine": describe_machine(),
        "bandwidth_bytes_per_s": bandwidth,
    }
    result["rows"] = [asdict(row) for row in rows]
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layer", description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768])
    parser.add_argument("--calls", type=int, default=40, help="calls timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    return parser.parse_args(arguments)


def copy_bandwidth(device: torch.device = CPU, clock: Clock = wall_s) -> float:
    """Bytes a second that a large copy reads and writes."""
    source, target = torch.ones(COPY_BYTES // 4, device=device), torch.empty(COPY_BYTES // 4, device=device)
    return 2 * COPY_BYTES / min(clock(lambda: target.copy_(source)) for _ in range(6))


def _measure(shape: str, dtype: str, context: int, calls: int, bandwidth: float) -> Row:
    heads, kv_heads, dim = SHAPES[shape]
    config = OvalConfig(stats_every=0)
    layer = random_layer(config, kv_heads, dim, context, DTYPES[dtype])
    binding = bind(config)
    query = 2 * torch.randn(1, heads, 1, dim).to(DTYPES[dtype])
    keys, values = (states.contiguous() for states in layer.store.dense())
    grouped = query.view(1, kv_heads, heads // kv_heads, dim)
    variants: dict[str, Callable[[], object]] = {
        "oval": partial(paged_attention, binding, layer, query, None, dim**-0.5),
        "sdpa": partial(scaled_dot_product_attention, grouped, keys, values),
    }
    seconds = time_in_turns(variants, calls)
    stats = binding.recorder.report()
    step_bytes = stats["bytes_read"] / stats["bytes_dense"] * (keys.nbytes + values.nbytes)
    oval_ms, floor_ms = median_ms(seconds["oval"]), step_bytes / bandwidth * 1e3
    faster = speedup(seconds, "sdpa", "oval")
    return Row(shape, context, dtype, faster, oval_ms / floor_ms, oval_ms, median_ms(seconds["sdpa"]), floor_ms)


def time_configs(configs: list[OvalConfig], shape: tuple[int, int, int], context: int, calls: int = 40) -> list[float]:
    """Median milliseconds of a call under each config, in turns; `shape` as in SHAPES, float32."""
    heads, kv_heads, dim = shape
    query = 2 * torch.randn(1, heads, 1, dim)
    variants: dict[str, Callable[[], object]] = {
        str(index): partial(
            paged_attention, bind(config), random_layer(config, kv_heads, dim, context), query, None, dim**-0.5
        )
        for index, config in enumerate(replace(config, stats_every=0, always_paged=True) for config in configs)
    }
    return [median_ms(seconds) for seconds in time_in_turns(variants, calls).values()]


def random_layer(
    config: OvalConfig,
    kv_heads: int,
    dim: int,
    context: int,
    dtype: torch.dtype = torch.float32,
    rows: int = 1,
    device: torch.device = CPU,
) -> OvalLayer:
    """A layer whose keys come in clusters, as those of neighbouring tokens do."""
    layer = OvalLayer(config, None, 0)
    random = partial(torch.randn, dtype=dtype, device=device)
    for tokens in (context - 1, 1):
        keys: Tensor = random(rows, kv_heads, tokens // 16 + 1, dim).repeat_interleave(16, 2)[:, :, :tokens]
        layer.update(keys + random(rows, kv_heads, tokens, dim), random(rows, kv_heads, tokens, dim))
        layer.attended(None)
    return layer


def bind(config: OvalConfig, impl: str = "auto", device: torch.device = CPU) -> Binding:
    """A binding outside of any model."""
    return Binding(kernels.resolve(impl, device), "sdpa", Recorder(config))


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
