"""Greedy texts with OVAL against those of the dense model, after the same prefill.

The first new token comes out of the prefill, which is dense either way: it is written but not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from benchmarks.greedy import Advance, continue_greedily, predictions
from benchmarks.prompts import Prompt
from benchmarks.teacher_forcing import prefill, shared
from oval_core import OvalConfig, attach


@dataclass(frozen=True)
class Continuation:
    """How far OVAL's text is the dense model's.

    Attributes:
        text, start, instruction: the prompt.
        context: its tokens.
        tokens: new tokens of the dense text that count; fewer than asked for if it ends earlier.
        same_tokens, same_share: those before the first difference, and their share.
        forced_share: share of positions at which OVAL, reading the dense text, predicts its next token.
        distinct_4grams: share of different ones among the dense text's runs of four tokens; low if it repeats itself.
        pages, pages_read: means of a KV head while OVAL wrote its text; None if every step was dense.
        read_ratio: bytes read over those of dense attention, in the model's dtype.
    """

    text: str
    start: int
    instruction: str
    context: int
    tokens: int
    same_tokens: int
    same_share: float
    forced_share: float
    distinct_4grams: float
    pages: int | None
    pages_read: float | None
    read_ratio: float | None


def continuation(
    model: PreTrainedModel, prompt: Prompt, config: OvalConfig, new_tokens: int, advance: Advance
) -> Continuation:
    """Continue a prompt by up to `new_tokens` that count, dense and with OVAL, then let OVAL read the dense text."""
    prefix = prefill(model, prompt.tokens, 0, advance)
    last = prompt.tokens[:, -1:]
    dense = continue_greedily(model, shared(model, prefix.cache), last, new_tokens + 1, advance)
    with attach(model, config) as handle:
        own = continue_greedily(model, shared(model, prefix.cache), last, new_tokens + 1, advance)
        stats = handle.stats()
        read = last.new_tensor([[int(last), *dense[:-1]]])
        forced = predictions(model, shared(model, prefix.cache), read, advance)
    advance(new_tokens + 1 - len(dense))
    return _compared(prompt, dense[1:], own[1:], forced[1:], stats)


def _compared(
    prompt: Prompt, dense: list[int], own: list[int], forced: list[int], stats: dict[str, Any]
) -> Continuation:
    same = same_tokens(dense, own)
    agreeing = sum(a == b for a, b in zip(dense, forced, strict=True))
    return Continuation(
        text=prompt.text,
        start=prompt.start,
        instruction=prompt.instruction,
        context=prompt.tokens.shape[1],
        tokens=len(dense),
        same_tokens=same,
        same_share=share(same, len(dense)),
        forced_share=share(agreeing, len(dense)),
        distinct_4grams=distinct_share(dense),
        pages=stats["pages"],
        pages_read=stats["pages_read_mean"],
        read_ratio=stats["read_ratio"],
    )


def same_tokens(one: list[int], other: list[int]) -> int:
    """Return how many tokens are identical before the first difference; a text that ends early differs there."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def distinct_share(tokens: list[int], length: int = 4) -> float:
    """Return the share of different ones among all runs of `length` tokens; 1 if there is no run."""
    runs = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return share(len(set(runs)), len(runs))


def share(part: int, whole: int) -> float:
    """Return `part / whole`; 1 of nothing."""
    return part / whole if whole else 1.0
