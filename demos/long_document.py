"""Read thousands of tokens of a novel and continue it, dense and with OVAL, side by side.

Shows both texts, how far they agree, speed, what was read and held, and draws which pages each token read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase
from transformers.cache_utils import Cache

from demos.page_map import draw_page_map
from demos.smollm2 import load_model
from demos.texts import TEXTS, load_text
from demos.timed_generation import Generation, generate
from oval_core import OvalConfig, attach
from oval_core.layer import OvalLayer

MIB = 1024**2


def main(arguments: list[str] | None = None) -> None:
    """Run the demo; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    prompt = _prompt(tokenizer, options)
    dense = generate(model, prompt, options.new_tokens, "dense")
    with attach(model, options.config) as handle, handle.trace() as trace:
        oval = generate(model, prompt, options.new_tokens, "OVAL")
        stats = handle.stats()
    _show(Console(), tokenizer, prompt, dense, oval, stats)
    if not trace:
        print(f"No page was skipped, so there is no picture: {stats['dense_steps']}")
        return
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    title = f"{prompt.shape[1]:,} tokens, {handle.config.budget_pages} pages of {handle.config.page_size} read exactly"
    draw_page_map(trace, options.picture, title)
    print(f"Which pages each token read: {options.picture}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demos.long_document", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", choices=TEXTS, default="novel", help="what to read (default: %(default)s)")
    parser.add_argument("--question", help="ask this about the text instead of continuing it")
    parser.add_argument("--context", type=_positive, default=6000, help="tokens to read (default: %(default)s)")
    parser.add_argument("--new-tokens", type=_positive, default=64, help="tokens to write (default: %(default)s)")
    parser.add_argument(
        "--budget-pages", type=_positive, help="pages of 16 tokens to read exactly (default: OVAL's own)"
    )
    parser.add_argument("--picture", type=Path, default=Path("results/long_document.png"), help="PNG to write")
    options = parser.parse_args(arguments)
    try:
        options.config = OvalConfig(budget_pages=options.budget_pages)
    except ValueError as error:
        parser.error(str(error))
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _prompt(tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> torch.Tensor:
    """The text, `[1, context]`, or a chat turn about it."""
    ids = tokenizer(load_text(options.text), return_tensors="pt", verbose=False).input_ids[:, : options.context]
    if options.question is None:
        return ids
    content = f"{tokenizer.decode(ids[0])}\n\nQuestion about this text: {options.question}"
    chat = [{"role": "user", "content": content}]
    encoded: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    return torch.as_tensor(encoded["input_ids"])


def _show(
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    dense: Generation,
    oval: Generation,
    stats: dict[str, Any],
) -> None:
    """Print both runs side by side."""
    ratio = stats["read_ratio"] if stats["read_ratio"] is not None else 1.0
    kv, bases = (size / MIB for size in _resident_bytes(oval.cache))
    rows = {
        "text": [str(tokenizer.decode(run.tokens, skip_special_tokens=True)) for run in (dense, oval)],
        "tokens/s (decoding)": [f"{run.tokens_per_s:.1f}" for run in (dense, oval)],
        "prompt (seconds)": [f"{run.prefill_s:.1f}" for run in (dense, oval)],
        "cache read per token": ["100 %", f"{ratio:.1%}, metadata included"],
        "cache held": [f"{kv:.0f} MiB", f"{kv + bases:.0f} MiB (nothing is evicted)"],
    }
    table = Table("", "dense", "OVAL", title=f"{prompt.shape[1]:,} tokens read, then greedy", show_lines=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console.print(table)
    console.print(f"Agreement: {_agreement(dense, oval)}")


def _agreement(dense: Generation, oval: Generation) -> str:
    """Identical tokens before the first difference."""
    length = min(len(dense.tokens), len(oval.tokens))
    differs = (dense.tokens[:length] != oval.tokens[:length]).nonzero()
    same = int(differs[0]) if len(differs) else length
    if same == len(dense.tokens) == len(oval.tokens):
        return f"all {same} tokens are identical"
    return f"the first {same} of {len(dense.tokens)} tokens are identical"


def _resident_bytes(cache: Cache) -> tuple[int, int]:
    """Bytes of keys and values in use, and of the bases on top."""
    layers: list[Any] = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    tokens = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    return tokens, sum(layer.pages.basis.resident_bytes for layer in layers if isinstance(layer, OvalLayer))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("\ninterrupted")
