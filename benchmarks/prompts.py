"""Long prompts in a model's chat template: passages of `demos.texts`, each followed by a short instruction."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from demos.texts import TEXTS, load_text

WORDS = "{the user's words}"  # stands for them while the template is taken apart
INSTRUCTIONS = {
    "novel": ("Continue this story for several pages.", "Describe every character of this passage at length."),
    "reference": ("Explain this passage in detail.", "Write a long tutorial on what this passage is about."),
    "code": ("Explain in detail what this code does.", "Write documentation for this code."),
}


@dataclass(frozen=True)
class Prompt:
    """A passage and an instruction.

    Attributes:
        text: name of the text that the passage is from.
        start: token of the text at which the passage begins.
        instruction: what stands after the passage.
        tokens: all of it, int64 `[1, T]`.
    """

    text: str
    start: int
    instruction: str
    tokens: Tensor


def make_prompts(tokenizer: PreTrainedTokenizerBase, count: int, context: int) -> list[Prompt]:
    """Return `count` prompts of `context` tokens (fewer if a text is shorter), the texts in turn, each cut in places
    that lie evenly between its ends."""
    used = TEXTS[:count]
    texts = {name: encode(tokenizer, load_text(name)) for name in used}
    places = -(-count // len(TEXTS))
    return [
        _prompt(tokenizer, used[i % len(used)], texts[used[i % len(used)]], (i // len(used), places), context)
        for i in range(count)
    ]


def _prompt(
    tokenizer: PreTrainedTokenizerBase, name: str, text: Tensor, place: tuple[int, int], context: int
) -> Prompt:
    """The prompt at place `(i, n)`, the i-th of n, of a tokenised text."""
    before, after = chat_frame(tokenizer)
    instruction = INSTRUCTIONS[name][place[0] % len(INSTRUCTIONS[name])]
    head, tail = encode(tokenizer, before), encode(tokenizer, f"\n\n{instruction}{after}")
    length = max(context - head.shape[1] - tail.shape[1], 0)
    start = max(text.shape[1] - length, 0) * (place[0] + 1) // (place[1] + 1)
    tokens = torch.cat([head, text[:, start : start + length], tail], dim=1)
    return Prompt(name, start, instruction, tokens)


def chat_frame(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return what the chat template puts before and after the only words of a user; without a template, what marks
    the beginning of a text and an empty line."""
    if tokenizer.chat_template is None:
        return tokenizer.bos_token or "", "\n\n"
    chat = [{"role": "user", "content": WORDS}]
    before, _, after = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).partition(
        WORDS
    )
    return before, after


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Return the tokens of `text`, int64 `[1, T]`; special ones only where the text names them."""
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return torch.tensor([tokens], dtype=torch.long)
