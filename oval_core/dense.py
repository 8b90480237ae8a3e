"""Dense attention: what transformers would compute without OVAL."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from oval_core.dense_flash import flash_attention

SHORT_CHUNK_TOKENS = 64  # queries


def dense_attention(
    dense_impl: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Run FlashAttention or SDPA as transformers would; where it has only an eager function, compute the same here.

    Args:
        dense_impl: the attention implementation that the model had before.
        query: `[B, heads, Q, D]`.
        key, value: `[B, H, T, D]`, `[B, H, T, D_v]`.
        mask: bool or additive, `[B, 1, Q, T]`; None: causal where the module is.

    Returns: `[B, Q, heads, D_v]`.
    """
    if "flash" in dense_impl:
        by_flash = flash_attention(dense_impl, module, query, key, value, mask, scaling, dropout, **kwargs)
        if by_flash is not None:
            return by_flash
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if softcap is not None or sinks is not None:
        if mask is None:
            mask = _causal_mask(module, query, key, kwargs.get("is_causal"))
        return _eager(query, key, value, mask, scaling, dropout, softcap, sinks)
    if _is_short_chunk(query, key, mask, kwargs):
        assert mask is not None
        return _by_kv_head(query, key, value, mask, scaling, dropout)
    function = AttentionInterface()["sdpa"]  # the mask was made for it
    out: Tensor = function(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)[0]
    return out


def _is_short_chunk(query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether a few queries read a cache under a mask: transformers would copy the keys for every query head."""
    few = 1 < query.shape[2] <= SHORT_CHUNK_TOKENS and query.shape[1] > key.shape[1]
    shared = mask is not None and mask.shape[1] == 1
    return few and shared and kwargs.get("position_bias") is None


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, dropout: float) -> Tensor:
    """SDPA in which the queries of a KV head's group are rows of one product."""
    group = query.shape[1] // key.shape[1]
    rows = query.unflatten(1, (-1, group)).flatten(2, 3)  # [B, H, G * Q, D]
    rows_mask = mask.expand(-1, -1, query.shape[2], -1).repeat(1, 1, group, 1)
    out = nn.functional.scaled_dot_product_attention(rows, key, value, rows_mask, dropout, scale=scaling)
    return out.unflatten(2, (group, -1)).flatten(1, 2).transpose(1, 2).contiguous()


def _causal_mask(module: nn.Module, query: Tensor, key: Tensor, is_causal: bool | None) -> Tensor | None:
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if num_queries == 1 or not is_causal:
        return None
    position = torch.arange(num_queries, device=query.device)[:, None] + num_keys - num_queries
    return (torch.arange(num_keys, device=query.device) <= position)[None, None]


def _eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with everything spelt out; `sinks [heads]` is one more logit a head whose value is zero."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = scaling * (query @ key.mT).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    if sinks is not None:
        logits = torch.cat([logits, sinks.float().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]].nan_to_num().to(value.dtype)
    return (nn.functional.dropout(weights, dropout) @ value).transpose(1, 2).contiguous()
