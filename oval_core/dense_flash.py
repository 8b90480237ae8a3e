"""Dense attention by the FlashAttention that a model was set to, called as transformers would call it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface


def flash_attention(
    dense_impl: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    dropout: float,
    **kwargs: Any,
) -> Tensor | None:
    """Run transformers' function of the name `dense_impl`, which wants no mask or a padding mask bool `[B, T]`.

    Args:
        query: `[B, heads, Q, D]`.
        key, value: `[B, H, T, D]`, `[B, H, T, D_v]`.
        mask: `[B, 1, Q, T]`; None: causal where the module is.

    Returns: `[B, Q, heads, D_v]`; None where the mask is more than causal, sliding and padded, which FlashAttention
        cannot do.
    """
    padding = None
    if mask is not None:
        padding = _padding(module, query.shape[2], mask, kwargs)
        if padding is None:
            return None
        padding = None if bool(padding.all()) else padding
    seen = _View(module, config=_View(module.config, _attn_implementation=dense_impl))
    function = AttentionInterface()[dense_impl]
    out: Tensor = function(seen, query, key, value, padding, scaling=scaling, dropout=dropout, **kwargs)[0]
    return out


def _padding(module: nn.Module, num_queries: int, mask: Tensor, kwargs: dict[str, Any]) -> Tensor | None:
    """Tokens that some query may read, bool `[B, T]`, if these and their order say all that `mask` does; else None."""
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return None
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return None
    key = torch.arange(mask.shape[3], device=mask.device)
    position = key[mask.shape[3] - num_queries :, None]
    reachable = key <= position  # [Q, T]
    window = kwargs.get("sliding_window")
    if window is not None:
        reachable &= key > position - window
    shown = mask[:, 0]
    padding = shown.any(1)
    return padding if bool((shown == (reachable & padding[:, None])).all()) else None


class _View:
    """An object with other attributes: transformers reads the name of the implementation off the module's config."""

    def __init__(self, of: object, **instead: object) -> None:
        self._of = of
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
