"""Re-read the last positions of a text one by one under a config, with errors propagating, and compare with dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.differences import differences
from benchmarks.settings import BYTES_PER_ELEMENT
from demos.texts import load_text
from oval_core import OvalConfig, attach
from oval_core.model_shape import head_dim_of
from oval_core.training.texts import tokens_of

PREFILL_CHUNK_TOKENS = 1024
WARM_UP_TOKENS = 1  # the first step over a taken-over cache is dense: its pages are sealed at the second


@dataclass(frozen=True)
class Prefix:
    """Prefilled texts, one a row.

    Attributes:
        tokens: int64 `[rows, context]`.
        cache: keys and values of all but the last `positions` (and one warm-up) tokens.
        logits: the dense model's, float32 `[rows, positions, vocabulary]`.
    """

    tokens: Tensor
    cache: DynamicCache
    logits: Tensor

    @property
    def positions(self) -> int:
        """Positions that are compared."""
        return self.logits.shape[1]


@dataclass(frozen=True)
class Comparison:
    """How far a run is from dense.

    Attributes:
        kl, top1, ppl_ratio: of each row, see `differences`.
        bytes_ratio: bytes read over those of a dense read, all rows and steps together; keys, values and page features
            counted as bfloat16, bases as stored, metadata as at the last step.
        stats: what `handle.stats()` said.
        logits: the run's, float32 `[rows, positions, vocabulary]`.
    """

    kl: list[float]
    top1: list[float]
    ppl_ratio: list[float]
    bytes_ratio: float
    stats: dict[str, Any]
    logits: Tensor


def text_tokens(tokenizer: Any, name: str) -> Tensor:
    """The token ids of one of `demos.texts`, int64 `[t]`."""
    return tokens_of({name: load_text(name)}, tokenizer)[name]


def positions_fit(positions: int, context: int) -> bool:
    """Whether so many last positions of `context` tokens can be re-read."""
    return 2 <= positions < context - WARM_UP_TOKENS


@torch.inference_mode()
def prefill(model: PreTrainedModel, tokens: Tensor, positions: int, advance: Callable[[int], object]) -> Prefix:
    """Read texts `[rows, context]` densely. `advance` is told how many tokens were read."""
    split = tokens.shape[1] - positions - WARM_UP_TOKENS
    cache = DynamicCache(config=model.config)
    for chunk in tokens[:, :split].split(PREFILL_CHUNK_TOKENS, dim=1):
        model(chunk, cache=cache, logits_to_keep=1)
        advance(chunk.numel())
    logits = model(tokens[:, split:], cache=shared(model, cache)).logits[:, WARM_UP_TOKENS:]
    advance(tokens[:, split:].numel())
    return Prefix(tokens, cache, logits.float())


@torch.inference_mode()
def compare(model: PreTrainedModel, prefix: Prefix, config: OvalConfig, advance: Callable[[int], object]) -> Comparison:
    """Read the last positions of `prefix` under `config`, token by token."""
    cache = shared(model, prefix.cache)
    last = prefix.tokens[:, -prefix.positions - WARM_UP_TOKENS :]
    steps = []
    with attach(model, config) as handle:
        for position, tokens in enumerate(last.split(1, dim=1)):
            if position == WARM_UP_TOKENS:
                before = handle.stats()
            steps.append(model(tokens, cache=cache).logits[:, -1].float())
            advance(len(tokens))
        stats = handle.stats()
    logits = torch.stack(steps[WARM_UP_TOKENS:], 1)
    truth = prefix.tokens[:, prefix.tokens.shape[1] - prefix.positions + 1 :]
    kl, top1, ppl_ratio = zip(*map(differences, prefix.logits, logits, truth), strict=True)
    return Comparison([*kl], [*top1], [*ppl_ratio], _bytes_ratio(model, cache, before, stats), stats, logits)


def shared(model: PreTrainedModel, cache: DynamicCache) -> DynamicCache:
    """A cache that starts with the same tokens; neither `update` nor taking over writes to the shared tensors."""
    copy = DynamicCache(config=model.config)
    layers: list[tuple[Any, Any]] = list(zip(copy.layers, cache.layers, strict=True))
    for own, other in layers:
        own.keys, own.values, own.is_initialized = other.keys, other.values, True
        own.device = other.keys.device
    return copy


def _bytes_ratio(model: PreTrainedModel, cache: DynamicCache, before: dict[str, Any], after: dict[str, Any]) -> float:
    """Share of the tokens that the steps between two reports read exactly, and on top what metadata they read."""
    read, metadata, dense = (after[key] - before[key] for key in ("bytes_read", "metadata_bytes", "bytes_dense"))
    exact = (read - metadata) / dense
    if metadata == 0:
        return float(exact)
    token_bytes = 2 * head_dim_of(model.config) * BYTES_PER_ELEMENT
    return float(exact + _metadata_bytes(cache) / (cache.get_seq_length() * token_bytes))


def _metadata_bytes(cache: DynamicCache) -> int:
    """Bytes of metadata that one KV head reads at one step, page features counted as bfloat16."""
    layer: Any = cache.layers[-1]
    pages, features = layer.tables[0].num_pages, layer.pages.features
    shortlist = layer.config.shortlist_for(pages)
    features = None if features is None else features.bfloat16()
    count: int = layer.router.metadata_bytes(pages, shortlist, layer.pages.basis, features)
    return count
