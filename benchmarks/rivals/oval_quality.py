"""OVAL on questions that come late, with budgets that read about as much as `kvpress_quality` keeps.

The last positions of long texts are measured by `benchmarks.quality`. Bytes are counted as there: keys, values and page
features as bfloat16, bases as they are stored, all metadata included.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.rivals.late_questions import MAX_PROMPTS, LateQuestions, make_prompt, score_answers
from benchmarks.settings import Setting, paid_for
from benchmarks.teacher_forcing import compare, prefill
from demos.smollm2 import load_model
from oval_core.model_shape import head_dim_of

Row = dict[str, Any]
Advance = Callable[[int], object]
ROUTERS = ("box", "basis")


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    prompts = [make_prompt(encode, index, options.context) for index in range(options.prompts)]
    runs = len(options.routers) * len(options.kept)
    work = sum(len(prompt.prefix) + len(prompt.suffix) * (runs + 1) + runs for prompt in prompts)
    rows: list[Row] = []
    with tqdm(total=work, unit="token") as progress:
        for index, prompt in enumerate(prompts):
            progress.set_description(f"late questions {index}")
            rows += _rows(model, index, prompt, options, progress.update)
    _report(rows, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals.oval_quality", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--prompts", type=int, default=4, help=f"late questions, 1 to {MAX_PROMPTS} (default: 4)")
    parser.add_argument("--context", type=int, default=6144, help="tokens of a passage (default: %(default)s)")
    parser.add_argument("--routers", nargs="+", choices=ROUTERS, default=list(ROUTERS), help="routers (default: all)")
    kept = [0.12, 0.16, 0.2, 0.28, 0.5]
    parser.add_argument("--kept", nargs="+", type=float, default=kept, help="shares of the bytes to read, about")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.command = command_line("rivals.oval_quality", arguments)
    return options


def _rows(
    model: PreTrainedModel, index: int, prompt: LateQuestions, options: argparse.Namespace, advance: Advance
) -> Iterator[Row]:
    """Ask late with every router and share; the first row is the dense model's."""
    tokens = torch.tensor([prompt.prefix + prompt.suffix])
    prefix = prefill(model, tokens, len(prompt.suffix), advance)
    same = {"kind": "late", "prompt": index, "digest": prompt.digest, "context": len(prompt.prefix)}
    dense = score_answers(prefix.logits[0], prompt)
    yield {**same, "router": "dense", "kept": 1.0, "bytes_ratio": 1.0, "nll": dense.nll, "greedy": dense.greedy}
    for router in options.routers:
        for kept in options.kept:
            setting = paid_for(Setting(router, 16, 3), kept, tokens.shape[1], head_dim_of(model.config))
            run = compare(model, prefix, setting.config(), advance)
            score = score_answers(run.logits[0], prompt)
            read = {"budget_pages": setting.budget_pages, "bytes_ratio": run.bytes_ratio}
            yield {**same, "router": router, "kept": kept, **read, "nll": score.nll, "greedy": score.greedy}


def _report(rows: list[Row], options: argparse.Namespace) -> None:
    """Print the table, write the JSON and print it as the last line."""
    for row in rows:
        label = f"{row['prompt']:2} {row['router']:6} {row['kept']:5.0%} {row['bytes_ratio']:6.1%}"
        print(f"{label}  NLL {row['nll'][0]:.3f} {row['nll'][1]:.3f}  greedy {row['greedy'][0]} {row['greedy'][1]}")
    result = {
        "benchmark": "rivals_oval",
        "command": options.command,
        "model": options.model or "SmolLM2-135M-Instruct",
        "machine": describe_machine(),
        "rows": rows,
    }
    publish(result, options.out)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
