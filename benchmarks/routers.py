"""Every optional part beside the routers that need no training, at equal bytes: what it gains and what it costs.

Learned routers, locality, the selection cache and pages of other sizes each get as many pages as a share of the dense
bytes pays for. The last positions of each text are re-read token by token, as in `benchmarks.quality`; then once more
without hit rates, to take the time of an attention layer. What an input repair does to the hit rate on a quantised
model is what its training measured on held-out passages.

    python -m benchmarks.routers --learned DIR

Every folder in `DIR` is the `--out` of one `python -m oval_core.training`, of a router or of a repair, or holds a
`sizing.safetensors`, the `--out` of one `python -m oval_core.page_sizing.training`; `python -m benchmarks.train_routers
--out DIR` trains all routers and repairs. Bytes, hit rate, KL and time are means over the texts.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.attention_clock import attention_clock
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.quality import COMPILED
from benchmarks.readme import MEASUREMENTS
from benchmarks.router_parts import Part, Repair, learned, learned_on, repairs, untrained
from benchmarks.settings import paid_for
from benchmarks.teacher_forcing import WARM_UP_TOKENS, Prefix, compare, positions_fit, prefill, text_tokens
from demos.smollm2 import load_model
from demos.texts import TEXTS
from oval_core.model_shape import head_dim_of
from oval_core.routers.selection_cache import HITS, MISSES

PASSES = 2  # one for the quality, one for the time


@dataclass(frozen=True)
class Row:
    """One part; None where it was not measured.

    `step_ms` is what a layer spends at a step selecting and reading, `compiled` whether both are one compiled call;
    `reused` is the share of the selections that a selection cache did not make anew, over layers, steps and texts;
    `weights_ratio` is what a trained head reads of its own at every step and layer, whatever the batch, over a dense
    cache of one row, if both are stored alike; it is not in `bytes_ratio`.
    `train_s` are the seconds of a training's steps, without those in which the dense model showed what to learn.
    """

    router: str
    pages: str
    budget_pages: int | None
    bytes_ratio: float | None
    hit_rate: float | None
    kl: float | None
    step_ms: float | None
    train_s: float | None
    compiled: bool | None = None
    reused: float | None = None
    weights_ratio: float | None = None
    kl_texts: dict[str, float] = field(default_factory=dict)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    parts, rows = untrained(), list[Row]()
    if options.learned is not None:
        try:
            parts += learned(options.learned, model)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        rows += [row for repair in repairs(options.learned) for row in _repaired(repair)]
    parts = [paid_for(part, options.share, options.context, head_dim_of(model.config)) for part in parts]
    work = options.context + PASSES * len(parts) * (options.positions + WARM_UP_TOKENS)
    with tqdm(total=len(options.texts) * work, unit="token") as progress:
        prefixes = {name: _prefix(model, tokenizer, name, options, progress.update) for name in options.texts}
        rows = [_row(part, model, prefixes, progress) for part in parts] + rows
    found: dict[str, Any] = {
        "benchmark": options.name, "command": options.command, "machine": describe_machine(), "texts": options.texts,
        "context": options.context, "positions": options.positions, "share": options.share,
        "learned_on": [] if options.learned is None else learned_on(options.learned),
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    publish(found, options.out)


def _prefix(
    model: PreTrainedModel, tokenizer: Any, name: str, options: argparse.Namespace, advance: Callable[[int], object]
) -> Prefix:
    tokens = text_tokens(tokenizer, name)[None, : options.context]
    return prefill(model, tokens, options.positions, advance)


def _row(part: Part, model: PreTrainedModel, prefixes: dict[str, Prefix], progress: tqdm[Any]) -> Row:
    advance = progress.update
    results = {name: compare(model, prefix, part.config(), advance) for name, prefix in prefixes.items()}
    compiled = part.impl == "auto" and part.router in COMPILED
    row = Row(
        router=part.router if compiled or part.router not in COMPILED else f"{part.router}, not compiled",
        pages=part.pages,
        budget_pages=part.budget_pages,
        bytes_ratio=mean(result.bytes_ratio for result in results.values()),
        hit_rate=mean(result.stats["route_hit_rate"] for result in results.values()),
        kl=mean(mean(result.kl) for result in results.values()),
        step_ms=mean(_layer_ms(model, prefix, part, advance) for prefix in prefixes.values()),
        train_s=part.train_s,
        compiled=compiled,
        weights_ratio=part.weights_ratio(next(iter(prefixes.values())).tokens.shape[1]),
        reused=_reused([result.stats["router_counts"] for result in results.values()]),
        kl_texts={name: mean(result.kl) for name, result in results.items()},
    )
    tqdm.write(str(row))
    return row


def _reused(counts: list[dict[str, int]]) -> float | None:
    hits, misses = (sum(of_text.get(name, 0) for of_text in counts) for name in (HITS, MISSES))
    return hits / (hits + misses) if hits + misses else None


def _layer_ms(model: PreTrainedModel, prefix: Prefix, part: Part, advance: Callable[[int], object]) -> float:
    """Mean over layers and steps: not every step of a selection cache selects."""
    with attention_clock() as seconds:
        compare(model, prefix, part.config(stats_every=0), advance)
    warm_up = len(seconds) * WARM_UP_TOKENS // (WARM_UP_TOKENS + prefix.positions)
    return mean(seconds[warm_up:]) * 1e3


def _repaired(repair: Repair) -> Iterator[Row]:
    for name, hit_rate in repair.hit_rates.items():
        trained = repair.train_s if name == "after" else None
        where = "unquantised" if name == "float" else f"{repair.quantised}, {name} repair"
        yield Row(f"{repair.router}, {where}", "held-out passages", None, None, hit_rate, None, None, trained)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.routers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--learned", type=Path, metavar="DIR", help="of trained routers (default: none)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="(default: all)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=24, help="last positions of each (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.2, help="of the dense bytes (default: %(default)s)")
    parser.add_argument("--name", default="routers", help="of the JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if not positions_fit(options.positions, options.context) or not 0 < options.share <= 1:
        parser.error(
            f"--positions takes 2 or more and fewer than the tokens of a text, --share more than 0 and at most 1, got "
            f"{options.positions} and {options.share}"
        )
    options.command = command_line("routers", arguments)
    return options


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
