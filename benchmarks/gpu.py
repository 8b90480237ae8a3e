"""OVAL on one GPU, in a few minutes: every kernel checked against the reference, then the speed of layers and models.

Layers are compared with SDPA's FlashAttention over the same keys and values, and with the floor: the bytes that OVAL
reads over the bandwidth that a large copy reaches. Steps are those of a randomly initialised model under transformers'
caches and under OVAL, launched kernel by kernel and as CUDA graphs. Everything is timed in turns; figures are medians.
An implementation that fails a check gets no figures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.gpu_checks import check_kernels
from benchmarks.gpu_clock import Budget, layer_clock
from benchmarks.gpu_layer import Case, measure_layer
from benchmarks.gpu_model import LLAMA_8B, measure_step, random_model
from benchmarks.gpu_rows import Check, Row, gpu_table
from benchmarks.layer import copy_bandwidth
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from oval_core import kernels

SHAPES = {"Llama-3.1-8B": (32, 8, 128), "LLaVA-1.5-7B": (32, 32, 128)}  # query heads, KV heads, head dimension
MODEL, MODEL_SIZES = "Llama-3.1-8B", LLAMA_8B
DTYPE = torch.bfloat16
LAYERS_SHARE = 0.5  # of the time; the rest is for models
PACKAGES = ("triton", "flash-attn", "flash-attn-3")


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`. Exits with status 2 where there is no such device."""
    options = _parse(arguments)
    device = torch.device(options.device)
    budget = Budget(options.minutes)
    impls = options.impls or kernels.available(device)[:0:-1]
    bandwidth = copy_bandwidth(device, layer_clock(device))
    print(f"copy: {bandwidth / 1e9:.0f} GB/s", flush=True)
    checks = [check for impl in impls for check in _checks(impl, device)]
    for check in checks:
        print(f"{'ok    ' if check.passed else 'FAILED'} {check}", flush=True)
    failed = {check.impl: f"failed the check of {check.kernel}" for check in checks if not check.passed}
    rows = list(_rows(options, device, budget, impls, failed, bandwidth))
    result = {
        "benchmark": "gpu",
        "command": command_line("gpu", arguments),
        "machine": describe_machine() | {"device": str(device), "cuda": torch.version.cuda, "packages": _packages()},
        "bandwidth_bytes_per_s": bandwidth,
        "checks": [asdict(check) | {"passed": check.passed} for check in checks],
        "rows": [asdict(row) for row in rows],
    }
    print(gpu_table(result))
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10, help="begin nothing new after these (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="the shortest context, one row, few rounds")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--impls", nargs="+", help="(default: all for this device but the reference)")
    parser.add_argument("--rounds", type=int, default=20, help="calls timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch finds none here")
    try:
        for impl in options.impls or ():
            kernels.check_implementation(impl, torch.device(options.device))
    except ValueError as error:
        parser.error(str(error))
    if options.quick:
        options.contexts, options.batches, options.rounds = options.contexts[:1], options.batches[:1], 5
    return options


def _checks(impl: str, device: torch.device) -> list[Check]:
    """Of all kernels on all shapes; a kernel that raises has failed."""
    try:
        return [check for shape, sizes in SHAPES.items() for check in check_kernels(impl, shape, sizes, DTYPE, device)]
    except Exception as error:  # whatever a compiler or a driver raises: the other implementations go on
        return [Check(impl, "", f"all kernels ({type(error).__name__}: {error})", float("inf"), 0.0)]


def _rows(
    options: argparse.Namespace,
    device: torch.device,
    budget: Budget,
    impls: list[str],
    failed: dict[str, str],
    bandwidth: float,
) -> Iterator[Row]:
    """Layers first, for as long as is theirs; then models, captured ones last: a failed capture may spoil the rest."""
    good = [impl for impl in impls if impl not in failed]
    plan = [(context, batch) for context in options.contexts for batch in options.batches]
    yield from (Row("layer", "all", 0, 0, impl, reason) for impl, reason in failed.items())
    if not good:
        return
    for context, batch in plan:
        for shape in options.shapes:
            case = Case(shape, SHAPES[shape], context, batch)
            layer = partial(measure_layer, case, good, DTYPE, device, bandwidth, options.rounds)
            empty = [Row("layer", shape, context, batch, impl) for impl in good]
            yield from _measured(layer, empty, budget.spent(LAYERS_SHARE))
    yield from _steps(options, device, budget, good[0], plan)


def _steps(
    options: argparse.Namespace, device: torch.device, budget: Budget, impl: str, plan: list[tuple[int, int]]
) -> Iterator[Row]:
    model = cache(partial(random_model, MODEL_SIZES, DTYPE, device))
    for graph in (False, True):
        for context, batch in plan:
            step = partial(_step, model, MODEL, context, batch, impl, graph, options.rounds)
            empty = [Row("graph" if graph else "eager", MODEL, context, batch, impl)]
            yield from _measured(step, empty, budget.spent())


def _step(model: Callable[[], PreTrainedModel], *arguments: Any) -> list[Row]:
    """A step of a model that is made when it is wanted first."""
    return measure_step(model(), *arguments)


def _measured(measure: Callable[[], list[Row]], empty: list[Row], reason: str | None) -> list[Row]:
    """What `measure` gives; with a reason not to begin, and where it fails, rows without figures."""
    rows: list[Row] = []
    if reason is None:
        try:
            rows = measure()
        except Exception as error:  # whatever a driver raises: what was measured before must not be lost
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
    rows = rows or [replace(row, reason=reason) for row in empty]
    for row in rows:
        print(row, flush=True)
    return rows


def _packages() -> dict[str, str | None]:
    """Versions of what kernels may be made of."""
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
