"""Generation with OVAL against the dense model: greedy texts token by token, and answers about planted facts.

Each prompt and each document is prefilled once, densely, and all runs start from that cache, which is how `generate`
works on an attached model too.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.continuations import Continuation, continuation
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.markdown import bytes_share
from benchmarks.needles import DEPTHS, FACTS, Needle, needles, work_tokens
from benchmarks.prompts import make_prompts
from benchmarks.readme import MEASUREMENTS
from demos.smollm2 import load_model
from oval_core import OvalConfig

QUICK = {"prompts": 3, "prompt_tokens": 2000, "new_tokens": 32, "contexts": [2000], "documents": 1}
CONTEXTS_HELP = "tokens of the documents that facts are planted in (default: %(default)s)"
DOCUMENTS_HELP = "documents of each size; in five of them every fact is at every depth once (default: %(default)s)"


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    rows = _continuations(model, tokenizer, options)
    answers = _needles(model, tokenizer, options)
    _report(rows, answers, options, model)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=int, default=8, help="texts to continue (default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=6000, help="tokens of each prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens to compare (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs="*", default=[2000, 4500, 7000], help=CONTEXTS_HELP)
    parser.add_argument("--documents", type=int, default=len(FACTS), help=DOCUMENTS_HELP)
    parser.add_argument("--router", help="default: OVAL's default on this device")
    parser.add_argument("--budget-pages", type=int, help="default: OVAL's default with this router")
    parser.add_argument("--quick", action="store_true", help=f"small: {QUICK}")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    parser.set_defaults(**(QUICK if parser.parse_known_args(arguments)[0].quick else {}))
    options = parser.parse_args(arguments)
    try:
        options.config = _config(options)
    except ValueError as error:
        parser.error(str(error))
    options.command = command_line("generation", arguments)
    return options


def _config(options: argparse.Namespace) -> OvalConfig:
    """OVAL's defaults but for what was chosen."""
    chosen = {"router": options.router, "budget_pages": options.budget_pages}
    return OvalConfig(**{name: value for name, value in chosen.items() if value is not None})


def _continuations(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace
) -> list[Continuation]:
    """One row a prompt."""
    prompts = make_prompts(tokenizer, options.prompts, options.prompt_tokens)
    work = sum(prompt.tokens.shape[1] for prompt in prompts) + 3 * (options.new_tokens + 1) * len(prompts)
    rows = []
    with tqdm(total=work, unit="token", desc="texts") as progress:
        for prompt in prompts:
            progress.set_description(f"text: {prompt.text}")
            rows.append(continuation(model, prompt, options.config, options.new_tokens, progress.update))
    return rows


def _needles(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> list[Needle]:
    """One row a question."""
    rows = []
    work = sum(map(work_tokens, options.contexts)) * options.documents
    with tqdm(total=work, unit="token", desc="facts") as progress:
        for context in options.contexts:
            for i in range(options.documents):
                progress.set_description(f"facts: {context:,} tokens")
                place = (i, options.documents)
                rows += needles(model, tokenizer, context, place, options.config, progress.update)
    return rows


def _report(
    rows: list[Continuation], answers: list[Needle], options: argparse.Namespace, model: PreTrainedModel
) -> None:
    """Print the tables, write the JSON, print the JSON line."""
    _print_continuations(rows)
    _print_needles(answers)
    config = options.config.for_device(model.device)
    result: dict[str, Any] = {
        "benchmark": "generation",
        "command": options.command,
        "model": options.model or "SmolLM2-135M-Instruct (Q4_1 weights, float32 arithmetic)",
        "router": str(config.router),
        "page_size": config.page_size,
        "budget_pages": config.budget_pages,
        "new_tokens": options.new_tokens,
        "machine": describe_machine(),
        "summary": summary(rows, answers),
        "rows": [asdict(row) for row in rows],
        "needles": [asdict(answer) for answer in answers],
    }
    publish(result, options.out)


def summary(rows: list[Continuation], answers: list[Needle]) -> dict[str, Any]:
    """Return the means over the texts, and how many questions were asked, answered by each and answered by both."""
    shares = ("same_share", "forced_share", "distinct_4grams")
    counted = [row for row in rows if row.tokens]
    return {
        **{name: mean(getattr(row, name) for row in counted) if counted else None for name in shares},
        "asked": len(answers),
        "dense_answers": sum(answer.dense for answer in answers),
        "oval_answers": sum(answer.oval for answer in answers),
        "both_answer": sum(answer.dense and answer.oval for answer in answers),
    }


def _print_continuations(rows: list[Continuation]) -> None:
    print(
        f"{'text':10} {'start':>8} {'context':>8} {'tokens':>7} {'identical':>10} {'share':>6} {'forced':>7} "
        f"{'distinct':>9} {'pages read':>11} {'bytes':>6}"
    )
    for row in rows:
        pages = "all" if row.pages_read is None else f"{row.pages_read:.0f}/{row.pages}"
        print(
            f"{row.text:10} {row.start:8,} {row.context:8,} {row.tokens:7} {row.same_tokens:10} {row.same_share:6.1%} "
            f"{row.forced_share:7.1%} {row.distinct_4grams:9.1%} {pages:>11} {bytes_share(row.read_ratio):>6}"
        )


def _print_needles(answers: list[Needle]) -> None:
    print(f"{'context':>8} {'depth':>6} {'asked':>6} {'dense':>6} {'OVAL':>5} {'both':>5}")
    for context in dict.fromkeys(answer.context for answer in answers):
        for depth in DEPTHS:
            cell = [answer for answer in answers if (answer.context, answer.depth) == (context, depth)]
            dense, oval = sum(answer.dense for answer in cell), sum(answer.oval for answer in cell)
            both = sum(answer.dense and answer.oval for answer in cell)
            print(f"{context:8,} {depth:6.0%} {len(cell):6} {dense:6} {oval:5} {both:5}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
