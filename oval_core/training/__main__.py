"""Train a router, or its input repair, on what the frozen dense model attends to.

    python -m oval_core.training --model NAME --text FILE [FILE ...] --router position-mlp --out DIR
    python -m oval_core.training --model NAME --text FILE [FILE ...] --router output-head --out DIR
    python -m oval_core.training --model NAME --text FILE [FILE ...] --repair ROUTER.safetensors --out DIR

The model reads passages of the texts; at every stop the attention mass per page of a few positions is kept, and the
router learns to guess it (`oval_core.training.learning` has the loss). A repair learns the same on a quantised
copy of the model, with the router as it is. The progress bar shows the hit rate on a held-out passage. An interrupted
run goes on where it stopped if the same command is given again. The last line printed is one JSON object: hit rates on
held-out passages, beside those of other routers at the same number of pages.

There is no language modelling loss: a selection is a choice of whole pages, through which no gradient flows, and pages
weighted softly would train the router for a model that no decoding step computes. Where the dense model looks is known
exactly, so that is what is learned.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from oval_core.training.passages import PassageSettings
from oval_core.training.quantised import INT8_DYNAMIC, KINDS
from oval_core.training.run import LearningSettings
from oval_core.training.state import make_accelerator, settings_from
from oval_core.training.tasks import ROUTERS, load_router, train_repair, train_router
from oval_core.training.texts import read_texts, tokens_of

HELP = {
    "passages": "to learn from",
    "context_tokens": "tokens of each passage",
    "every_tokens": "one stop after so many",
    "asked_tokens": "positions of a stop",
    "held_out": "share of each text to measure on",
    "held_out_passages": "from each text",
    "page_size": "tokens a page",
    "seed": "of all that is drawn",
    "steps": "of the optimizer",
    "batch": "positions a step",
    "rate": "highest learning rate",
    "focus": "exponent of the focal factor",
    "dim": "of the comparison of queries and pages",
    "coarse": "add to the training-free coarse score, instead of doing without it",
    "budget_pages": "pages that are read where hit rates are measured",
}


def main(arguments: list[str] | None = None) -> None:
    """Train; see `--help`."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        result = _train(options)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")
    print(json.dumps(result))


def _train(options: argparse.Namespace) -> dict[str, Any]:
    """What is printed last."""
    if options.router is not None and options.quantise is not None:
        raise ValueError(f"--quantise is for a --repair, got {options.quantise} and --router {options.router}")
    passages, learning = settings_from(PassageSettings, options), settings_from(LearningSettings, options)
    texts = read_texts(options.text)
    router = None if options.repair is None else load_router(options.repair)
    model, tokens = _load(options.model, texts)
    if router is None:
        found = train_router(options.out, model, tokens, options.router, passages, learning, options.lessons)
    else:
        found = train_repair(
            options.out, model, tokens, router, options.quantise or INT8_DYNAMIC, passages, learning, options.lessons
        )
    return {"budget_pages": learning.budget_pages, "hit_rates": found}


def _load(name: str, texts: dict[str, str]) -> tuple[Any, dict[str, Tensor]]:
    """The model, and the tokens `[t]` of each text."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(make_accelerator().device)
    return model, tokens_of(texts, AutoTokenizer.from_pretrained(name))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oval_core.training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", required=True, help="folder or name of the model")
    add("--text", type=Path, nargs="+", required=True, help="text files, UTF-8")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--router", choices=sorted(ROUTERS), help="to train")
    what.add_argument("--repair", type=Path, metavar="FILE", help="of a trained router, to train an input repair for")
    add("--quantise", choices=KINDS, help=f"how, for a repair (default: {INT8_DYNAMIC})")
    add("--out", type=Path, required=True, help="folder to write into")
    add("--lessons", type=Path, help="folder of what is learned from, for several trainings (default: in OUT)")
    for settings in (PassageSettings(), LearningSettings()):
        for field in dataclasses.fields(settings):
            _add_number(parser, field.name, getattr(settings, field.name))
    return parser


def _add_number(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    option, text = f"--{name.replace('_', '-')}", HELP[name]
    if isinstance(default, bool):
        parser.add_argument(option, action="store_true", help=text)
    else:
        parser.add_argument(option, type=type(default), default=default, help=f"{text} (default: %(default)s)")


if __name__ == "__main__":
    main()
