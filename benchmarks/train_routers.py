"""Train every router that can be trained, and repairs of one of them, for `benchmarks.routers --learned`.

    python -m benchmarks.train_routers --out results/routers

They learn from the texts that the benchmarks read, without the beginnings that these read. What is there already is not
trained again; an interrupted run goes on where it stopped. One to two hours on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from demos.smollm2 import load_model
from demos.texts import TEXTS, load_text
from oval_core.training.passages import PassageSettings
from oval_core.training.quantised import KINDS
from oval_core.training.run import LearningSettings
from oval_core.training.tasks import ROUTER_FILE, ROUTERS, load_router, train_repair, train_router
from oval_core.training.texts import tokens_of

READ_BYTES = 60_000  # of each text, by benchmarks
REPAIRED = "position-mlp"


def main(arguments: list[str] | None = None) -> None:
    """Train; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    tokens, lessons = tokens_of(texts_to_learn(options.texts), tokenizer), options.out / "lessons"
    passages = PassageSettings(options.passages, options.context, asked_tokens=options.asked)
    shorter = PassageSettings(options.repair_passages, options.context, asked_tokens=options.asked)
    for name in ROUTERS:
        for coarse in (False, True):
            learning = LearningSettings(options.steps, coarse=coarse, budget_pages=options.budget)
            out = options.out / (f"{name}-coarse" if coarse else name)
            print(out, train_router(out, model, tokens, name, passages, learning, lessons))
    repaired = load_router(options.out / REPAIRED / ROUTER_FILE)
    for kind in KINDS:
        learning, out = (
            LearningSettings(options.steps // 4, budget_pages=options.budget),
            options.out / f"repair-{kind}",
        )
        print(out, train_repair(out, model, tokens, repaired, kind, shorter, learning))


def texts_to_learn(names: Sequence[str]) -> dict[str, str]:
    """What benchmarks do not read of the texts."""
    return {name: load_text(name).encode()[READ_BYTES:].decode(errors="ignore") for name in names}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_routers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of all trainings")
    add("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    add("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="(default: all)")
    add("--passages", type=int, default=24, help="to learn from (default: %(default)s)")
    add("--repair-passages", type=int, default=9, help="for a repair (default: %(default)s)")
    add("--context", type=int, default=4096, help="tokens of each (default: %(default)s)")
    add("--asked", type=int, default=32, help="queries of each stop (default: %(default)s)")
    add("--steps", type=int, default=1000, help="of a router; a repair takes a quarter (default: %(default)s)")
    add("--budget", type=int, default=47, help="pages a KV head, for hit rates (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
