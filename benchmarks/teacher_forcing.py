"""Re-read the last positions of a text one by one under a config, with errors propagating, and compare with dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.differences import differences
from oval_core import OvalConfig, attach

PREFILL_CHUNK_TOKENS = 1024
WARM_UP_TOKENS = 1  # the first step over a taken-over cache is dense: its pages are sealed at the second


@dataclass(frozen=True)
class Prefix:
    """A prefilled text.

    Attributes:
        tokens: int64 `[1, context]`.
        cache: keys and values of all but the last `positions` (and one warm-up) tokens.
        logits: the dense model's, float32 `[positions, vocabulary]`.
    """

    tokens: Tensor
    cache: DynamicCache
    logits: Tensor

    @property
    def positions(self) -> int:
        """Positions that are compared."""
        return self.logits.shape[0]


@dataclass(frozen=True)
class Comparison:
    """How far a run is from dense, means over the positions.

    Attributes:
        kl: KL(dense || run) in nats.
        top1: share of positions with the same most likely token.
        ppl_ratio: perplexity of the true next tokens over the dense model's.
        stats: what `handle.stats()` said.
        metadata_bytes: of one KV head and step, page features counted as bfloat16.
        logits: the run's, float32 `[positions, vocabulary]`.
    """

    kl: float
    top1: float
    ppl_ratio: float
    stats: dict[str, Any]
    metadata_bytes: int
    logits: Tensor


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokens: Tensor, positions: int, advance: Callable[[int], object]) -> Prefix:
    """Read a text densely. `advance` is told how many tokens were read."""
    split = tokens.shape[1] - positions - WARM_UP_TOKENS
    cache = DynamicCache(config=model.config)
    for chunk in tokens[:, :split].split(PREFILL_CHUNK_TOKENS, dim=1):
        model(chunk, cache=cache, logits_to_keep=1)
        advance(chunk.shape[1])
    logits = model(tokens[:, split:], cache=shared(model, cache)).logits[0, WARM_UP_TOKENS:]
    advance(tokens.shape[1] - split)
    return Prefix(tokens, cache, logits.float())


@torch.inference_mode()
def compare(model: PreTrainedModel, prefix: Prefix, config: OvalConfig, advance: Callable[[int], object]) -> Comparison:
    """Read the last positions of `prefix` under `config`, token by token."""
    cache = shared(model, prefix.cache)
    last = prefix.tokens[:, -prefix.positions - WARM_UP_TOKENS :]
    rows = []
    with attach(model, config) as handle:
        for token in last.split(1, dim=1):
            rows.append(model(token, cache=cache).logits[0, -1].float())
            advance(1)
        stats = handle.stats()
    logits = torch.stack(rows[WARM_UP_TOKENS:])
    truth = prefix.tokens[0, prefix.tokens.shape[1] - prefix.positions + 1 :]
    return Comparison(*differences(prefix.logits, logits, truth), stats, _metadata_bytes(cache), logits)


def shared(model: PreTrainedModel, cache: DynamicCache) -> DynamicCache:
    """A cache that starts with the same tokens; neither `update` nor taking over writes to the shared tensors."""
    copy = DynamicCache(config=model.config)
    layers: list[tuple[Any, Any]] = list(zip(copy.layers, cache.layers, strict=True))
    for own, other in layers:
        own.keys, own.values, own.is_initialized = other.keys, other.values, True
        own.device = other.keys.device
    return copy


def _metadata_bytes(cache: DynamicCache) -> int:
    """Bytes of metadata that one selection of the last layer reads."""
    layer: Any = cache.layers[-1]
    pages, features = layer.tables[0].num_pages, layer.pages.features
    shortlist = layer.config.shortlist_for(pages)
    features = None if features is None else features.bfloat16()
    count: int = layer.router.metadata_bytes(pages, shortlist, layer.pages.basis, features)
    return count
