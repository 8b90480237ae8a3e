"""The same answer twice, plain and with Medusa heads: same words, fewer passes.

Tokens that the heads guessed and the model accepted are coloured; a picture shows how often the guesses of each depth
hold, and how far draft and target agree on the pages to read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from demos.acceptance_plot import draw_acceptance
from demos.smollm2 import load_model
from demos.smollm2_heads import load_heads
from demos.texts import load_text
from demos.token_clock import TokenClock
from oval_core import OvalConfig
from oval_spec import MedusaDrafter, SpeculativeOutput, speculative_generate

PASSAGE = slice(100_000, 101_800)  # characters of the novel
QUESTION = "Explain what happens in this passage."
GUESSED = "bold green"
LOOK_EVERY = 4
FEW_PAGES = OvalConfig(page_size=8, seal_tokens=16, budget_ratio=0.25, stats_every=0)  # of a short text


def main(arguments: list[str] | None = None) -> None:
    """Run the demo; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    try:
        heads = load_heads(model, options.heads)
    except (OSError, ValueError) as error:
        sys.exit(f"medusa: {error}")
    if heads is None:
        sys.exit(f"the shipped heads are for SmolLM2-135M-Instruct, not {options.model}: give --heads")
    prompt = _chat(tokenizer, options.prompt or f"{load_text('novel')[PASSAGE]}\n\n{QUESTION}")
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": options.new_tokens}
    clocks = [TokenClock(options.new_tokens, title) for title in ("plain", "Medusa")]
    plain: Tensor = model.generate(**prompt, streamer=clocks[0], **settings)
    drafter = MedusaDrafter(heads)
    fast = speculative_generate(model, prompt, drafter, streamer=clocks[1], **settings)
    looked = speculative_generate(
        model, prompt, drafter, config=FEW_PAGES, look_every=LOOK_EVERY, adapt=False, **settings
    )
    _show(Console(), tokenizer, prompt["input_ids"], plain, fast, clocks)
    draw_acceptance(looked.stats, options.picture)
    print(f"Which guesses hold, and which pages were expected: {options.picture}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demos.medusa", description=__doc__)
    parser.add_argument("prompt", nargs="?", help="what to ask (default: what happens in a passage of a novel)")
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", type=Path, help="Medusa heads of the model (default: those of SmolLM2)")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens to write (default: %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("results/medusa.png"), help="PNG to write")
    options = parser.parse_args(arguments)
    if options.new_tokens < 1:
        parser.error(f"--new-tokens takes 1 or more, got {options.new_tokens}")
    return options


def _chat(tokenizer: PreTrainedTokenizerBase, prompt: str) -> dict[str, Tensor]:
    if tokenizer.chat_template is None:
        return {**tokenizer(prompt, return_tensors="pt")}
    chat = [{"role": "user", "content": prompt}]
    made: Any = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def _show(
    console: Console,
    tokenizer: PreTrainedTokenizerBase,
    prompt: Tensor,
    plain: Tensor,
    fast: SpeculativeOutput,
    clocks: list[TokenClock],
) -> None:
    start = prompt.shape[1]
    side_by_side = Table("plain", f"Medusa ([{GUESSED}]guessed[/] and accepted)", expand=True)
    left = Text(str(tokenizer.decode(plain[0, start:], skip_special_tokens=True)))
    side_by_side.add_row(left, _coloured(tokenizer, fast.sequences[0, start:], fast.stats.history))
    console.print(side_by_side)
    figures = Table("", "tokens/s", "passes", "tokens a pass")
    new = len(plain[0]) - start
    figures.add_row("plain", f"{clocks[0].tokens_per_s:.1f}", str(new - 1), "1.00")
    passes = fast.stats.steps
    figures.add_row("Medusa", f"{clocks[1].tokens_per_s:.1f}", str(passes), f"{(fast.stats.tokens - 1) / passes:.2f}")
    console.print(figures)
    console.print("The two texts are identical." if torch.equal(plain, fast.sequences) else "The two texts differ!")


def _coloured(tokenizer: PreTrainedTokenizerBase, tokens: Tensor, history: list[list[int | None]]) -> Text:
    """The text, its accepted guesses coloured: each step accepts some and adds one token of the target's own."""
    guessed = [False]
    for accepted in history:
        guessed += [True] * (accepted[0] or 0) + [False]
    text, shown = Text(), ""
    for at in range(len(tokens)):
        whole = str(tokenizer.decode(tokens[: at + 1], skip_special_tokens=True))
        text.append(whole[len(shown) :], style=GUESSED if guessed[at] else None)
        shown = whole
    return text


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
