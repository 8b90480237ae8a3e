"""Methods that evict (package kvpress), measured as `benchmarks.quality` and `oval_quality` measure OVAL.

Runs in an environment of its own, without OVAL: see README.md in this folder. Two kinds of text: the last positions of
a long text, re-read token by token and compared with dense; and questions that come after the passage was compressed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.differences import differences
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.rivals.late_questions import MAX_PROMPTS, LateQuestions, make_prompt, score_answers
from benchmarks.rivals.pressed import DENSE, PRESSES, Pressed, Setting, prefill, reread
from demos.checkpoint_cache import cache_root
from demos.texts import TEXTS, load_text

Row = dict[str, Any]
Advance = Callable[[int], object]
SMOLLM2 = cache_root() / "smollm2-135m-instruct"
LEAST_PREFILL = 80  # tokens; SnapKV judges by the last 64


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    encode = _encoder(options.model)
    settings = [(name, kept) for name in options.presses for kept in options.kept]
    texts = {
        (name, place): tokens
        for name in options.texts
        for place, tokens in enumerate(_stretches(encode, name, options))
    }
    prompts = [make_prompt(encode, index, options.context) for index in range(options.prompts)]
    work = sum(len(tokens) + (options.positions + 1) * len(settings) for tokens in texts.values())
    work += sum(len(prompt.prefix) + len(prompt.suffix) * (len(settings) + 1) + len(settings) for prompt in prompts)
    rows: list[Row] = []
    with tqdm(total=work, unit="token") as progress:
        for (name, place), tokens in texts.items():
            progress.set_description(name)
            for row in _text_rows(model, tokens, options.positions, settings, progress.update):
                rows.append({"kind": "text", "text": name, "place": place, **row})
        for index, prompt in enumerate(prompts):
            progress.set_description(f"late questions {index}")
            rows += _late_rows(model, index, prompt, settings, progress.update)
    _report(rows, options)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rivals.kvpress_quality", description=__doc__)
    parser.add_argument("--model", default=str(SMOLLM2), help="directory of a checkpoint (default: %(default)s)")
    parser.add_argument(
        "--texts", nargs="*", choices=TEXTS, default=list(TEXTS), help="texts to re-read (default: all)"
    )
    parser.add_argument("--prompts", type=int, default=4, help=f"late questions, 0 to {MAX_PROMPTS} (default: 4)")
    parser.add_argument("--context", type=int, default=6144, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--places", type=int, default=2, help="stretches of each text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=48, help="last positions of each (default: %(default)s)")
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=list(PRESSES), help="methods (default: all)")
    kept = [0.12, 0.16, 0.2, 0.28, 0.5]
    parser.add_argument("--kept", nargs="+", type=float, default=kept, help="shares of the entries that stay")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes (default: %(default)s)")
    options = parser.parse_args(arguments)
    if not all(0 < share <= 1 for share in options.kept):
        parser.error(f"--kept takes shares above 0 and up to 1, got {options.kept}")
    if options.context - options.positions < LEAST_PREFILL:
        parser.error(f"--context must exceed --positions by {LEAST_PREFILL} or more, got {options.context}")
    options.command = command_line("rivals.kvpress_quality", arguments)
    return options


def _encoder(model: str) -> Callable[[str], list[int]]:
    """Tokens of a string, no special ones added."""
    tokenizer = AutoTokenizer.from_pretrained(model)

    def encode(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    return encode


def _stretches(encode: Callable[[str], list[int]], name: str, options: argparse.Namespace) -> list[list[int]]:
    """The same stretches of a text as `benchmarks.quality` reads."""
    tokens, length = encode(load_text(name)), options.context
    if len(tokens) < options.places * length:
        raise SystemExit(f"{options.places} places of {length} tokens do not fit into {name} of {len(tokens)} tokens")
    return [tokens[place * length : (place + 1) * length] for place in range(options.places)]


def _text_rows(
    model: PreTrainedModel, tokens: list[int], positions: int, settings: list[Setting], advance: Advance
) -> Iterator[Row]:
    """Re-read the last positions of one stretch under every setting."""
    text = prefill(model, torch.tensor([tokens]), positions, settings, advance)
    truth = text.tokens[0, len(tokens) - positions + 1 :]
    for setting in settings:
        kl, top1, ppl_ratio = differences(text.logits, reread(model, text, setting, advance), truth)
        yield {"context": len(tokens), **_read(text, setting), "kl": kl, "top1": top1, "ppl_ratio": ppl_ratio}


def _late_rows(
    model: PreTrainedModel, index: int, prompt: LateQuestions, settings: list[Setting], advance: Advance
) -> Iterator[Row]:
    """Ask late under every setting; the first row is the dense model's."""
    text = prefill(model, torch.tensor([prompt.prefix + prompt.suffix]), len(prompt.suffix), settings, advance)
    for setting in (DENSE, *settings):
        dense = setting == DENSE
        logits = text.logits if dense else reread(model, text, setting, advance)
        read = {"press": "dense", "kept": 1.0, "bytes_ratio": 1.0} if dense else _read(text, setting)
        score = score_answers(logits, prompt)
        same = {"kind": "late", "prompt": index, "digest": prompt.digest, "context": len(prompt.prefix)}
        yield {**same, **read, "nll": score.nll, "greedy": score.greedy}


def _read(text: Pressed, setting: Setting) -> Row:
    name, kept = setting
    return {"press": name, "kept": kept, "entries": text.entries(setting), "bytes_ratio": text.bytes_ratio(setting)}


def _report(rows: list[Row], options: argparse.Namespace) -> None:
    """Print both tables, write the JSON and print it as the last line."""
    for row in rows:
        label = f"{row.get('text', 'late'):10} {row['press']:18} {row['kept']:5.0%} {row['bytes_ratio']:6.1%}"
        if row["kind"] == "text":
            print(f"{label}  KL {row['kl']:.4f}  top-1 {row['top1']:.3f}  perplexity {row['ppl_ratio']:.3f}")
        else:
            print(f"{label}  NLL {row['nll'][0]:.3f} {row['nll'][1]:.3f}  greedy {row['greedy'][0]} {row['greedy'][1]}")
    result = {
        "benchmark": "rivals_kvpress",
        "command": options.command,
        "model": "SmolLM2-135M-Instruct" if options.model == str(SMOLLM2) else options.model,
        "places": options.places,
        "positions": options.positions,
        "machine": {**describe_machine(), "kvpress": version("kvpress")},
        "rows": rows,
    }
    publish(result, options.out)


if __name__ == "__main__":
    main()
