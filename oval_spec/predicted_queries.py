"""What the target's attention layers would ask if its last hidden state were already the next one's.

A head that predicts tokens has no attention of its own. Its predicted state lives where the model's last norm puts the
residual stream; taken through a layer's own norm, query projection and rotary embedding it becomes a query of it. The
further below the top a layer is, the less that is the query it is really going to ask.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


class PredictedQueries:
    """Queries of the layers of a Llama-like model (Llama, Mistral, Qwen2, Qwen3, ...) from states of its top.

    Args:
        model: the target.

    Raises:
        ValueError: its layers have no norm, query projection and rotary embedding of their own where Llama has them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        self._layers: list[Any] = list(getattr(decoder, "layers", ()))
        self._norm: Any = getattr(decoder, "norm", None)
        self._rotary: Any = getattr(decoder, "rotary_emb", None)
        attention = getattr(self._layers[0], "self_attn", None) if self._layers else None
        self._rotate: Any = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
        parts = (self._norm, self._rotary, self._rotate, getattr(attention, "q_proj", None))
        if any(part is None for part in parts):
            raise ValueError(f"{type(model).__name__} is not built like Llama: its queries cannot be predicted")

    def of_layer(self, layer_idx: int, states: Tensor, positions: Tensor) -> Tensor:
        """Queries `[B, heads, N, D]`.

        Args:
            states: what the language model's head would get, `[B, N, hidden]`.
            positions: int64 `[B, N]`.
        """
        layer, attention = self._layers[layer_idx], self._layers[layer_idx].self_attn
        hidden = layer.input_layernorm(states / self._norm.weight)
        queries = attention.q_proj(hidden).unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "q_norm"):
            queries = attention.q_norm(queries)
        queries = queries.transpose(1, 2)
        cos, sin = self._rotary(states, positions)
        rotated: Tensor = self._rotate(queries, torch.zeros_like(queries[:, :1]), cos, sin)[0]
        return rotated
