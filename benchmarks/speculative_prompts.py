"""Prompts for speculative decoding: chats, texts to go on with, texts to copy from, and noise, which defeats drafts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from benchmarks.prompts import chat_frame, encode, make_prompts
from demos.texts import TEXTS, load_text

MOST_CHARACTERS = 8  # of a token, on average
NOISE_TEMPERATURE = 1.5
COPY = "Repeat the passage above word for word."


@dataclass(frozen=True)
class SpeculativePrompt:
    """Tokens, int64 `[1, T]`, and the temperature at which the model goes on, from one seed; 0: greedily."""

    tokens: Tensor
    temperature: float = 0.0

    @property
    def generate(self) -> dict[str, Any]:
        """Arguments of `generate`, which draws the same in every call."""
        settings: dict[str, Any] = {"input_ids": self.tokens, "attention_mask": torch.ones_like(self.tokens)}
        if not self.temperature:
            return {**settings, "do_sample": False}
        torch.manual_seed(0)
        return {**settings, "do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


def make_group(tokenizer: PreTrainedTokenizerBase, group: str, count: int, context: int) -> list[SpeculativePrompt]:
    """`count` prompts of `context` tokens. Raises ValueError if there is no such group."""
    if group not in _MAKERS:
        raise ValueError(f"group must be one of {GROUPS}, got {group!r}")
    temperature = NOISE_TEMPERATURE if group == "noise" else 0.0
    return [SpeculativePrompt(tokens, temperature) for tokens in _MAKERS[group](tokenizer, count, context)]


def _chat(tokenizer: PreTrainedTokenizerBase, count: int, context: int) -> list[Tensor]:
    """A passage and what is to be done with it."""
    return [prompt.tokens for prompt in make_prompts(tokenizer, count, context)]


def _continuation(tokenizer: PreTrainedTokenizerBase, count: int, context: int) -> list[Tensor]:
    """The texts in turn, each from places that lie evenly between its ends."""
    places = -(-count // len(TEXTS))
    cuts = []
    for i in range(count):
        text = load_text(TEXTS[i % len(TEXTS)])
        start = len(text) * (i // len(TEXTS) + 1) // (places + 1)
        cuts.append(encode(tokenizer, text[start : start + MOST_CHARACTERS * context])[:, :context])
    return cuts


def _copy(tokenizer: PreTrainedTokenizerBase, count: int, context: int) -> list[Tensor]:
    """A passage to repeat."""
    before, after = chat_frame(tokenizer)
    head, tail = encode(tokenizer, before), encode(tokenizer, f"\n\n{COPY}{after}")
    room = context - head.shape[1] - tail.shape[1]
    return [torch.cat([head, text, tail], 1) for text in _continuation(tokenizer, count, room)]


def _noise(tokenizer: PreTrainedTokenizerBase, count: int, context: int) -> list[Tensor]:
    """Tokens drawn evenly from the vocabulary; what follows is drawn, too, for greedily the model soon loops."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(len(tokenizer), (1, context), generator=generator) for _ in range(count)]


_MAKERS: dict[str, Callable[[PreTrainedTokenizerBase, int, int], list[Tensor]]] = {
    "chat": _chat,
    "continuation": _continuation,
    "copy": _copy,
    "noise": _noise,
}
GROUPS = tuple(_MAKERS)
