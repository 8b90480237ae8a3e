"""The routing head: what a step's hidden state looks for, compared with what image pages show.

    score of page p for KV head h of layer l   gate[l, h] . (query[l, h] hidden) . (key[l, h] e_p) / sqrt(dim)

The gate starts at 0: an untrained head says nothing.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

DIM = 32  # of the comparison


@dataclass(frozen=True)
class HeadSizes:
    """Layers L, KV heads H and hidden size of the language model; dimensions of page embeddings and of the comparison.

    Raises:
        ValueError: one is less than 1.
    """

    layers: int
    kv_heads: int
    hidden_size: int
    embedding_size: int
    dim: int = DIM

    def __post_init__(self) -> None:
        wrong = {name: size for name, size in asdict(self).items() if size < 1}
        if wrong:
            raise ValueError(f"sizes of a head must be at least 1, got {wrong}")

    @staticmethod
    def of(model: Any, embedding_size: int, dim: int = DIM) -> HeadSizes:
        """For the language model inside of a transformers model."""
        config = model.config.get_text_config(decoder=True)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return HeadSizes(config.num_hidden_layers, heads, config.hidden_size, embedding_size, dim)


class HybridHead(nn.Module):
    """One small cross-attention for each layer and KV head, float32.

    Args:
        sizes: of it.
        seed: of its first weights.
    """

    query: Tensor  # [L, H, dim, hidden]
    key: Tensor  # [L, H, dim, E]
    gate: Tensor  # [L, H]

    def __init__(self, sizes: HeadSizes, seed: int = 0) -> None:
        super().__init__()
        self.sizes = sizes
        generator = torch.Generator().manual_seed(seed)
        for name, width in (("query", sizes.hidden_size), ("key", sizes.embedding_size)):
            weights = torch.randn(sizes.layers, sizes.kv_heads, sizes.dim, width, generator=generator)
            setattr(self, name, nn.Parameter(weights / math.sqrt(width)))
        self.gate = nn.Parameter(torch.zeros(sizes.layers, sizes.kv_heads))

    def page_keys(self, layer: int, embeddings: Tensor) -> Tensor:
        """Page embeddings `[B, 1 or H, P, E]` -> `[B, H, P, dim]`."""
        return embeddings @ self.key[layer].mT

    def scores(self, layer: int, hidden: Tensor, page_keys: Tensor) -> Tensor:
        """Hidden states `[B, Q, hidden]` over `page_keys [B, H, P, dim]`, gated: float32 `[B, H, Q, P]`."""
        query = torch.einsum("bqx,hdx->bhqd", hidden.float(), self.query[layer]) / math.sqrt(self.sizes.dim)
        return self.gate[layer][:, None, None] * (query @ page_keys.float().mT)


def shift_within(scores: Tensor, extra: Tensor, among: Tensor) -> Tensor:
    """What to add to `scores` so that the pages `among` are compared with each other by `scores + extra`.

    Their common share of a softmax over all pages stays what it was, and so do all other pages.

    Args:
        scores: log-masses `[B, H, G, Q, P]`.
        extra: broadcasts to that.
        among: bool, broadcasts to that.

    Returns: the shape of `scores`, exactly 0 where `extra` is.
    """
    lowest = torch.finfo(scores.dtype).min
    before = scores.masked_fill(~among, -torch.inf).logsumexp(-1, keepdim=True).clamp_min(lowest)
    after = (scores + extra).masked_fill(~among, -torch.inf).logsumexp(-1, keepdim=True).clamp_min(lowest)
    return torch.where(among, extra + (before - after), 0.0)
