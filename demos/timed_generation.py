"""Greedy generation with a progress bar and a clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import Cache, PreTrainedModel

PREFILL_CHUNK_TOKENS = 512  # so that the progress bar moves while the prompt is read


@dataclass(frozen=True)
class Generation:
    """What one run gave.

    Attributes:
        tokens: the new ones, int64 `[n]`.
        prefill_s, decode_s: seconds for the prompt (and the first token), and for all later tokens.
        cache: as the model left it.
    """

    tokens: Tensor
    prefill_s: float
    decode_s: float
    cache: Cache

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s else float("nan")


@torch.inference_mode()
def generate(model: PreTrainedModel, prompt: Tensor, new_tokens: int, title: str) -> Generation:
    """Continue `prompt [1, T]` greedily by at most `new_tokens`, as `model.generate` does."""
    run: Any = model.generate
    begin = time.perf_counter()
    with _clock(model, prompt.shape[1] + new_tokens - 1, title) as passes:
        output = run(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=new_tokens,
            prefill_chunk_size=PREFILL_CHUNK_TOKENS,
            return_dict_in_generate=True,
        )
    tokens = output.sequences[0, prompt.shape[1] :]
    first = passes[-len(tokens)]  # the end of the pass that gave the first new token
    return Generation(tokens, first - begin, passes[-1] - first, output.cache)


@contextmanager
def _clock(model: PreTrainedModel, total_tokens: int, title: str) -> Iterator[list[float]]:
    """Show progress and collect the times at which forward passes end."""
    passes: list[float] = []
    with tqdm(total=total_tokens, desc=title, unit="token") as progress:

        def count(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
            passes.append(time.perf_counter())
            progress.update(kwargs["input_ids"].shape[1])

        hook = model.register_forward_hook(count, with_kwargs=True)
        try:
            yield passes
        finally:
            hook.remove()
