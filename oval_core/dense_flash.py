"""Dense attention by the FlashAttention that a model was set to, called as transformers would call it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

QUERIES_AT_ONCE = 256  # of a mask that is looked at: its copies stay small beside it


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
        if not _is_plain(module, mask, kwargs.get("is_causal")):
            return None
        found = _padding(mask, kwargs.get("sliding_window"))
        if found is None:
            return None
        padding = found.tokens
    seen = _View(module, config=_View(module.config, _attn_implementation=dense_impl))
    function = AttentionInterface()[dense_impl]
    out: Tensor = function(seen, query, key, value, padding, scaling=scaling, dropout=dropout, **kwargs)[0]
    return out


class _Padding(NamedTuple):
    """Tokens that some query may read, bool `[B, T]`; None: all."""

    tokens: Tensor | None


def _is_plain(module: nn.Module, mask: Tensor, is_causal: bool | None) -> bool:
    """Whether the attention is causal and the mask one of bools for all heads."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return bool(is_causal) and mask.dtype == torch.bool and mask.shape[1] == 1


def _padding(mask: Tensor, window: int | None) -> _Padding | None:
    """The padding, if it and the order of the tokens say all that `mask [B, 1, Q, T]` does; else None.

    It is kept with the mask, which all layers share: finding it out reads all of the mask and waits for the device.
    """
    kept: dict[int | None, _Padding | None] = mask.__dict__.setdefault("oval_padding", {})
    if window not in kept:
        kept[window] = _derived_padding(mask, window)
    return kept[window]


def _derived_padding(mask: Tensor, window: int | None) -> _Padding | None:
    shown, (num_queries, num_tokens) = mask[:, 0], mask.shape[2:]
    padding = torch.stack([part.any(1) for part in shown.split(QUERIES_AT_ONCE, 1)]).any(0)  # [B, T]
    key = torch.arange(num_tokens, device=mask.device)
    alike = []
    for part, position in zip(
        shown.split(QUERIES_AT_ONCE, 1), key[num_tokens - num_queries :].split(QUERIES_AT_ONCE), strict=True
    ):
        reachable = key <= position[:, None]
        if window is not None:
            reachable &= key > position[:, None] - window
        alike.append((part == (reachable & padding[:, None])).all())
    all_alike, all_shown = torch.stack([torch.stack(alike).all(), padding.all()]).tolist()
    if not all_alike:
        return None
    return _Padding(None if all_shown else padding)


class _View:
    """An object with other attributes: transformers reads the name of the implementation off the module's config."""

    def __init__(self, of: object, **instead: object) -> None:
        self._of = of
        self.__dict__.update(instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
