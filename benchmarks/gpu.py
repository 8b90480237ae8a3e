"""OVAL on one GPU, in a few minutes: every kernel checked against the reference, then the speed of layers and models.

Layers are compared with SDPA's FlashAttention over the same keys and values, and with the floor: the bytes that OVAL
reads over the bandwidth that a large copy reaches. Steps are those of a randomly initialised model under transformers'
caches and under OVAL, launched kernel by kernel and as CUDA graphs. Everything is timed in turns; figures are medians.
An implementation that fails a check gets no figures. Every part is measured in a process of its own, and the JSON file
is written after every row: what ends one of them takes no other row with it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_clock import Budget
from benchmarks.gpu_model import LLAMA_8B
from benchmarks.gpu_parts import Bandwidth, Item, Part, measure
from benchmarks.gpu_process import apart, stoppable
from benchmarks.gpu_rows import Case, Check, Row, gpu_table
from benchmarks.machine import command_line, describe_machine, publish, save
from benchmarks.readme import MEASUREMENTS
from oval_core import kernels

SHAPES = {"Llama-3.1-8B": (32, 8, 128), "LLaVA-1.5-7B": (32, 32, 128)}  # query heads, KV heads, head dimension
MODEL, MODEL_SIZES = "Llama-3.1-8B", LLAMA_8B
DTYPES = (torch.bfloat16, torch.float32)  # measured, checked: next to no rounding hides a fault in the second
SHARES = {"layer": 0.5, "eager": 0.7, "graph": 0.85}  # of the time when the best implementation is done with each
LATE_S = 60  # beyond the end of the time for what has begun
PACKAGES = ("triton", "flash-attn", "flash-attn-3")
Run = Callable[[Part], Iterator[Item]]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`. Exits with status 2 where there is no such device."""
    options = _parse(arguments)
    device, result = torch.device(options.device), _empty_result(options.device, arguments)
    with stoppable():
        try:
            for item in _items(options, device):
                print(item, flush=True)
                _add(result, item)
                save(result, options.out)
        finally:  # also where it is stopped
            print(gpu_table(result))
            publish(result, options.out)


def _empty_result(device: str, arguments: list[str] | None) -> dict[str, Any]:
    return {
        "benchmark": "gpu",
        "command": command_line("gpu", arguments),
        "machine": describe_machine() | {"device": device, "cuda": torch.version.cuda, "packages": _packages()},
        "bandwidth_bytes_per_s": None,
        "checks": [],
        "rows": [],
    }


def _add(result: dict[str, Any], item: Item) -> None:
    if isinstance(item, Bandwidth):
        result["bandwidth_bytes_per_s"] = item.bytes_per_s
    elif isinstance(item, Check):
        result["checks"].append(asdict(item) | {"passed": item.passed})
    else:
        result["rows"].append(asdict(item))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing new after these (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="the shortest context, one row, few rounds")
    parser.add_argument("--device", default="cuda", help="(default: %(default)s)")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 32768, 131072])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--impls", nargs="+", help="(default: all for this device but the reference)")
    parser.add_argument("--rounds", type=int, default=20, help="calls timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    _check(parser, options)
    if options.quick:
        options.contexts, options.batches, options.rounds = options.contexts[:1], options.batches[:1], 5
    return options


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what cannot be measured."""
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("this needs a CUDA device, and torch finds none here")
    try:
        device = torch.device(options.device)
        for impl in options.impls or ():
            kernels.check_implementation(impl, device)
    except (RuntimeError, ValueError) as error:
        parser.error(str(error))
    if not kernels.available(device)[1:]:
        parser.error(f"there is nothing to measure on {options.device}: only the reference runs there")
    if min(*options.contexts, *options.batches, options.rounds) < 1 or not options.minutes >= 0:
        parser.error("--contexts, --batches and --rounds take 1 or more, --minutes 0 or more")


def _items(options: argparse.Namespace, device: torch.device) -> Iterator[Item]:
    """The best implementation first: its checks, layers, and steps of a model; then checks and layers of the others."""
    budget, steps_wanted = Budget(options.minutes), True
    run = partial(apart, budget.end + LATE_S, measure) if device.type == "cuda" else measure
    plan = [(context, batch) for context in options.contexts for batch in options.batches]
    shapes = {shape: SHAPES[shape] for shape in options.shapes}
    layers = tuple(Case(shape, heads, *sizes) for sizes in plan for shape, heads in shapes.items())
    steps = tuple(Case(MODEL, _sizes_of_model(), *sizes) for sizes in plan)
    for impl in options.impls or kernels.available(device)[:0:-1]:
        part = Part(
            "checks",
            impl,
            layers,
            shapes,
            MODEL_SIZES,
            DTYPES,
            device,
            options.rounds,
            budget,
            1.0,
        )
        failed = None
        for check in _checks(part, run):
            failed = failed or (None if check.passed else check.kernel)
            yield check
        if failed is not None:
            yield Row("layer", "all", 0, 0, impl, f"failed the check of {failed}")
            continue
        yield from _rows(replace(part, kind="layer", share=SHARES["layer"] if steps_wanted else 1.0), run)
        for kind in ("eager", "graph") if steps_wanted else ():
            yield from _rows(replace(part, kind=kind, cases=steps, share=SHARES[kind]), run)
        steps_wanted = False


def _sizes_of_model() -> tuple[int, int, int]:
    heads = MODEL_SIZES["num_attention_heads"]
    return heads, MODEL_SIZES["num_key_value_heads"], MODEL_SIZES["hidden_size"] // heads


def _checks(part: Part, run: Run) -> Iterator[Check]:
    """A kernel that raises, or ends its process, has failed."""
    try:
        for item in run(part):
            assert isinstance(item, Check)
            yield item
    except Exception as error:  # whatever a compiler or a driver raises: the other implementations go on
        yield Check(part.impl, "", f"all kernels ({_line(error)})", float("inf"), 0.0)


def _rows(part: Part, run: Run) -> Iterator[Item]:
    """One row a case. A case that ends its process has no figures, and the next process goes on behind it."""
    left = part.cases
    while left:
        reason = part.budget.spent(part.share)
        if reason is not None:
            yield from (part.empty(case, reason) for case in left)
            return
        try:
            for item in run(replace(part, cases=left)):
                left = left[1:] if isinstance(item, Row) else left
                yield item
            return
        except Exception as error:  # the same
            if left:
                yield part.empty(left[0], _line(error))
            left = left[1:]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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
    main()
