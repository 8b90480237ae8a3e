"""Greedy decoding over a cache that already holds the text before it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

Advance = Callable[[int], object]  # is told how many tokens were read or written


@torch.inference_mode()
def continue_greedily(
    model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, limit: int, advance: Advance
) -> list[int]:
    """Read `tokens [1, n]`, then write until a stop token (which is returned too) or `limit` tokens. The last token
    written is not read, so `cache` ends before it."""
    stop, new = stop_tokens(model), list[int]()
    while len(new) < limit and not (new and new[-1] in stop):
        logits = model(tokens, cache=cache, logits_to_keep=1).logits
        new.append(int(logits[0, -1].argmax()))
        tokens = tokens.new_tensor([new[-1:]])
        advance(1)
    advance(limit - len(new))
    return new


@torch.inference_mode()
def predictions(model: PreTrainedModel, cache: DynamicCache, tokens: Tensor, advance: Advance) -> list[int]:
    """Read `tokens [1, n]` one by one; return the most likely token after each."""
    likely = []
    for token in tokens.split(1, dim=1):
        likely.append(int(model(token, cache=cache).logits[0, -1].argmax()))
        advance(1)
    return likely


def stop_tokens(model: PreTrainedModel) -> set[int]:
    """Return the tokens that end a text of `model`."""
    config = model.generation_config
    stop = config.eos_token_id if config is not None else None
    return set() if stop is None else {stop} if isinstance(stop, int) else set(stop)
