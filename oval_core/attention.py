"""The attention function behind the name `oval`: dense where it must be, paged everywhere else.

Paged attention reads, per row and KV head, the pages that the router selects and the open tail exactly, and merges them
by log-sum-exp with the router's estimate of the other pages.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from oval_core.binding import BINDING, Binding
from oval_core.dense import dense_attention
from oval_core.kernels import Partial, Reads
from oval_core.layer import OvalLayer
from oval_core.memory import on_device
from oval_core.page_view import reads_of, view_pages
from oval_core.routers import Pages, Selection


def oval_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    oval_layer: OvalLayer | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers' `AttentionInterface` calls it.

    Args:
        query: `[B, heads, Q, D]`.
        key, value: what the cache returned, `[B, H, T, D]` and `[B, H, T, D_v]`.
        attention_mask: bool `[B, 1, Q, T]`, True where a query may read; None: causal.
        oval_layer: the cache layer, if it is a paged one.
        kwargs: `softcap`, `s_aux`, `position_bias`, `is_causal` are understood; the rest goes to the dense function.

    Returns: `[B, Q, heads, D_v]` and None.
    """
    binding: Binding | None = getattr(module, BINDING, None)
    scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
    if oval_layer is None or binding is None:
        dense_impl = binding.dense_impl if binding else "sdpa"
        _drop_hidden_states(binding, module)
        return dense_attention(dense_impl, module, query, key, value, attention_mask, scaling, dropout, **kwargs), None

    bounded = _bounded_mask(oval_layer, query.shape[2], attention_mask)
    claimed, oval_layer.handed_out = key is oval_layer.handed_out, None
    reason = _unpageable(claimed, module, bounded, dropout, kwargs)
    binding.recorder.unpageable[oval_layer.layer_idx] = reason
    if reason is None:
        oval_layer.attended(None if attention_mask is None else _visible(bounded, oval_layer))
        reason = _reason_to_be_dense(oval_layer, query.shape[2]) or _mask_change(oval_layer, bounded)
    if reason is not None:
        binding.recorder.dense(oval_layer, query.shape[2], reason)
        _drop_hidden_states(binding, module)
        dense_impl = binding.dense_impl
        return dense_attention(dense_impl, module, query, key, value, bounded, scaling, dropout, **kwargs), None
    return paged_attention(binding, oval_layer, query, bounded, scaling, **kwargs), None


def _drop_hidden_states(binding: Binding | None, module: nn.Module) -> None:
    """Of a layer without a router to look at them: they may be those of a whole prompt."""
    if binding is not None:
        binding.hidden_states.pop(getattr(module, "layer_idx", -1), None)


def _unpageable(
    claimed: bool, module: nn.Module, mask: Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> str | None:
    """Why this call cannot be paged whatever the context is, or None."""
    if module.training or dropout:
        return "training"
    if kwargs.get("position_bias") is not None:
        return "position bias"
    if not claimed:
        return "keys are not the cached ones (latent attention)"
    if mask is not None and mask.dtype != torch.bool:
        return "additive attention mask"
    if mask is not None and mask.shape[1] != 1:
        return "an attention mask of its own for every head"
    return None


def _reason_to_be_dense(layer: OvalLayer, num_queries: int) -> str | None:
    """Why these queries read everything, or None if they are to be paged."""
    config, tokens = layer.config, layer.store.num_tokens
    if tokens == num_queries:
        return "empty cache"
    if num_queries > config.max_sparse_query_tokens:
        return "query chunk longer than max_sparse_query_tokens"
    if max(table.open_tokens for table in layer.tables) > max(config.page_size, config.seal_tokens) + num_queries:
        return "tokens not paged yet"
    if layer.pages.num_pages == 0:
        return "no sealed page yet"
    if config.always_paged:
        return None
    if tokens < config.min_context_tokens:
        return "context below min_context_tokens"
    if all(config.budget_for(table.num_pages) > table.num_pages for table in layer.tables):
        return "budget covers every page"
    return None


def _mask_change(layer: OvalLayer, mask: Tensor | None) -> str | None:
    """Tokens that an earlier mask hid are in no basis; a mask that shows them now needs them read."""
    hidden = layer.store.visible
    if hidden is None:
        return None
    shown = None if mask is None else mask[:, 0].any(1)
    if shown is not None and not bool((shown & ~hidden[:, : shown.shape[1]]).any()):
        return None
    return "attention mask shows tokens that it hid before"


def _bounded_mask(layer: OvalLayer, num_queries: int, mask: Tensor | None) -> Tensor | None:
    """The given mask; where rows differ in length or no mask says so, no query reads beyond its own position."""
    store = layer.store
    if mask is not None and mask.shape[0] != len(store.lengths):  # else all layers see one and the same tensor
        mask = mask.expand(len(store.lengths), -1, -1, -1)
    implied = store.is_ragged or (mask is None and 1 < num_queries < store.num_tokens)
    if not implied or (mask is not None and mask.dtype != torch.bool):
        return mask
    device = layer.pages.starts.device
    last = on_device(store.lengths, device)[:, None] - num_queries + torch.arange(num_queries, device=device)
    causal = (torch.arange(store.num_tokens, device=device) <= last[..., None])[:, None]  # [B, 1, Q, T]
    if mask is None and store.visible is not None:
        mask = store.visible[:, None, None, : store.num_tokens]
    return causal if mask is None else causal & mask


def _visible(mask: Tensor | None, layer: OvalLayer) -> Tensor | None:
    """Which of each row's newest tokens some query may read, bool `[B, unattended_tokens]`; None: all."""
    if mask is None:
        return None
    new = layer.unattended_tokens
    if not layer.store.is_ragged:
        return mask[:, 0, :, mask.shape[-1] - new :].any(1)
    end = on_device(layer.store.lengths, mask.device)[:, None]
    return mask[:, 0].any(1).gather(-1, end + torch.arange(-new, 0, device=mask.device))


def paged_attention(
    binding: Binding,
    layer: OvalLayer,
    query: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Attention that reads the selected pages and the open tail exactly.

    Args:
        query: `[B, heads, Q, D]`, Q small.
        mask: bool `[B, 1, Q, T]` or None.

    Returns: `[B, Q, heads, D_v]` in the dtype of `query`.
    """

    def look() -> tuple[Tensor, Pages]:
        """The queries by KV head, and the pages as a router sees them."""
        pages = view_pages(binding, layer, query.shape[2], mask, scaling, softcap)
        return _grouped(query, layer.store.storage[0].shape[1]).float(), pages

    if _is_fused(binding, query, layer, mask, softcap, s_aux):
        out, selection = binding.recorder.timed(binding.kernels.cascade, query, layer, mask, scaling)
    else:
        with torch.autocast(query.device.type, enabled=False):
            out, selection = _tier_by_tier(binding, layer, *look(), mask, s_aux)
    binding.recorder.paged(layer, selection, look)
    return out.to(query.dtype)


def _is_fused(
    binding: Binding,
    query: Tensor,
    layer: OvalLayer,
    mask: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> bool:
    """Whether the implementation does the router's whole cascade in one call, and can do this one."""
    if type(layer.router) not in getattr(binding.kernels, "FUSED_ROUTERS", ()):
        return False
    reason = binding.kernels.unsupported(query, layer, mask, softcap, sinks)
    if reason is not None:
        binding.recorder.fall_back(reason)
    return reason is None


def _tier_by_tier(
    binding: Binding, layer: OvalLayer, query: Tensor, pages: Pages, mask: Tensor | None, sinks: Tensor | None
) -> tuple[Tensor, Selection]:
    """Any router: select, read, merge. `query [B, H, G, Q, D]` -> `[B, Q, H * G, D_v]`."""
    kernels = binding.kernels
    selection = binding.recorder.timed(layer.router.select, query, pages)
    parts = [] if selection.tail is None else [selection.tail]
    for part in (selection, *selection.then):
        reads = reads_of(layer, part, query.shape[3], mask, with_open=part is selection)
        parts.append(_attend_pages(binding, layer, query, reads, pages.scaling, pages.softcap))
    out = kernels.merge(parts, _sink_logits(sinks, query.shape[1]))
    return out.flatten(1, 2).transpose(1, 2).contiguous(), selection.joined() if selection.then else selection


def _attend_pages(
    binding: Binding, layer: OvalLayer, query: Tensor, reads: Reads, scaling: float, softcap: float | None
) -> Partial:
    """Read exactly, and say so where the implementation has to leave that to another one."""
    kernels, stored = binding.kernels, layer.store.dense()
    if hasattr(kernels, "unsupported_reads"):
        reason = kernels.unsupported_reads(query, *stored, reads, softcap)
        if reason is not None:
            binding.recorder.fall_back(reason)
    return kernels.attend_pages(query, *stored, reads, scaling, softcap)


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """`[B, H * G, Q, D]` -> `[B, H, G, Q, D]`."""
    return query.unflatten(1, (kv_heads, -1))


def _sink_logits(sinks: Tensor | None, kv_heads: int) -> Tensor | None:
    """One sink logit a query head `[heads]` -> `[1, H, G, 1]`."""
    return None if sinks is None else sinks.float().view(1, kv_heads, -1, 1)
