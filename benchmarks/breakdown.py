"""Where the time of one decoding step goes: the model's own work, the cache, the compiled tiers, Python around them.

The step and its parts are timed in the running model. How the compiled call divides into tiers is measured on one
layer: each tier on its own, on one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.alternating import WARM_UP_ROUNDS
from benchmarks.decode import KeysValues, fill, resized, stepper, twin
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.tiers import time_tiers
from demos.smollm2 import load_model
from oval_core import OvalConfig, attach
from oval_core.kernels import cpu_loops
from oval_core.model_shape import head_dim_of
from oval_core.page_store import PageStore
from oval_core.sealed_pages import SealedPages

SHORT_TOKENS = 16  # a context whose attention costs next to nothing
STEPS = 64  # four pages, so that what sealing costs is spread over the steps that it serves
TIMED: tuple[tuple[Any, str, str], ...] = (
    (PageStore, "append", "append keys and values"),
    (SealedPages, "seal", "seal pages"),
    (cpu_loops, "cascade", "compiled"),
)


@dataclass(frozen=True)
class Row:
    """Milliseconds of one part of a step, all layers together, and its share of the step."""

    router: str
    context: int
    part: str
    ms: float
    share: float


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, _ = load_model(options.model)
    rows: list[Row] = []
    for router in options.routers:
        for context in options.contexts:
            measured = _measure(model, OvalConfig(router=router, stats_every=0), context)
            print("\n".join(f"{r.router:5} {r.context:6} {r.part:28} {r.ms:7.2f} ms {r.share:6.1%}" for r in measured))
            rows += measured
    result = {"benchmark": "breakdown", "command": command_line("breakdown", arguments), "machine": describe_machine()}
    publish(result | {"rows": [asdict(row) for row in rows]}, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.breakdown", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--routers", nargs="+", choices=("box", "basis"), default=["box", "basis"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[8128, 32768])
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    return parser.parse_args(arguments)


@torch.inference_mode()
def _measure(model: PreTrainedModel, config: OvalConfig, context: int) -> list[Row]:
    states = [resized(pair, context, 1) for pair in _some_states(model)]
    with attach(twin(model), config) as handle:
        step = stepper(handle.model, fill(DynamicCache(config=model.config), states), torch.full((1, 1), 28))
        for _ in range(WARM_UP_ROUNDS):  # the first steps seal the whole context
            step()
        with _timed() as seconds:
            total = _mean_s(step)
    plain = stepper(
        model,
        fill(DynamicCache(config=model.config), [resized(pair, SHORT_TOKENS, 1) for pair in states]),
        torch.full((1, 1), 28),
    )
    parts = {"projections, MLP, output head": _mean_s(plain)} | {name: sum(s) / STEPS for name, s in seconds.items()}
    compiled = parts.pop("compiled")
    tiers = time_tiers(config, model.config, context)
    whole = sum(tiers.values())
    parts |= {name: compiled * spent / whole for name, spent in tiers.items()}
    parts["Python around it"] = total - sum(parts.values())
    parts["step"] = total
    return [Row(str(config.router), context, name, 1e3 * s, s / total) for name, s in parts.items()]


def _some_states(model: PreTrainedModel) -> KeysValues:
    config = model.config
    shape = (1, config.num_key_value_heads, SHORT_TOKENS, head_dim_of(config))
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]


def _mean_s(step: Callable[[], object]) -> float:
    """Mean of STEPS steps."""
    seconds = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return statistics.mean(seconds)


@contextmanager
def _timed() -> Iterator[dict[str, list[float]]]:
    """Collect the seconds of the calls in TIMED, after the first steps."""
    seconds: dict[str, list[float]] = defaultdict(list)
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in TIMED]
    for (owner, name, label), (_, _, original) in zip(TIMED, originals, strict=True):
        setattr(owner, name, _clocked(original, seconds[label]))
    try:
        yield seconds
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


def _clocked(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    def clocked(*args: Any) -> Any:
        begin = time.perf_counter()
        result = function(*args)
        seconds.append(time.perf_counter() - begin)
        return result

    return clocked


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
