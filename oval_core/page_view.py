"""What the router is shown of a layer, and which tokens its answer means."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oval_core.binding import Binding
from oval_core.layer import OvalLayer
from oval_core.routers import Pages, Selection


def view_pages(
    binding: Binding, layer: OvalLayer, num_queries: int, mask: Tensor | None, scaling: float, softcap: float | None
) -> Pages:
    """The sealed pages of `layer` as the router sees them.

    Args:
        num_queries: Q, the newest tokens.
        mask: bool `[B, 1, Q, T]` or None.
    """
    config, sealed, store = layer.config, layer.pages, layer.store
    most, device = sealed.num_pages, sealed.starts.device
    counts = [table.num_pages for table in layer.tables]
    budget = [config.budget_for(count) - 1 for count in counts]  # the open tokens are read anyway
    shortlist = [config.shortlist_for(count) for count in counts]
    real_tokens = torch.tensor([[table.length - table.first] for table in layer.tables])
    starts, lengths = sealed.starts[:, :most], sealed.lengths[:, :most]
    return Pages(
        basis=sealed.basis.narrow(most),
        features=None if sealed.features is None else sealed.features[:, :, :most],
        starts=starts,
        lengths=lengths,
        tags=sealed.tags[:, :most],
        counts=torch.tensor(counts, device=device),
        seen=None if mask is None else _seen_tokens(mask, starts, lengths),
        budget=torch.tensor(budget, device=device),
        shortlist=torch.tensor(shortlist, device=device),
        most=(max(budget), max(shortlist)),
        mean_value_norm=sealed.mean_value_norm,
        sinks=config.sink_pages,
        window=config.window_pages,
        keys=store.dense()[0],
        token_mask=None if store.visible is None else store.visible[:, : store.num_tokens],
        positions=(real_tokens - num_queries + torch.arange(num_queries)).to(device),
        hidden_states=binding.hidden_states.get(layer.layer_idx),
        layer_idx=layer.layer_idx,
        scaling=scaling,
        softcap=softcap,
        kernels=binding.kernels,
        tables=layer.tables,
        derived=sealed.derived,
    )


def _seen_tokens(mask: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """Tokens of each page that the mask `[B, 1, Q, T]` shows to a query: int64 `[B, Q, P]`."""
    before = nn.functional.pad(mask[:, 0].long().cumsum(-1), (1, 0))  # [B, Q, T + 1]
    most = before.shape[-1] - 1  # what lies beyond belongs to pages that the row had before it was cropped
    begin = starts.clamp_max(most)[:, None].expand(-1, before.shape[1], -1)
    end = (starts + lengths).clamp_max(most)[:, None].expand_as(begin)
    return before.gather(-1, end) - before.gather(-1, begin)


def tokens_to_read(
    layer: OvalLayer, selection: Selection, num_queries: int, mask: Tensor | None, with_open: bool = True
) -> tuple[Tensor, Tensor]:
    """Positions of the tokens of the selected pages and, `with_open`, of the open tail.

    Returns: int64 `[B, H, n]`, and which of them each query may read, bool `[B, H, Q, n]`.
    """
    device, store, heads = selection.pages.device, layer.store, selection.pages.shape[1]
    ends = [table.sealed_end for table in layer.tables]
    tail = max(length - end for length, end in zip(store.lengths, ends, strict=True)) if with_open else 0
    length, sealed_end = torch.tensor(store.lengths, device=device), torch.tensor(ends, device=device)

    offset = torch.arange(layer.config.page_size, device=device)
    starts, lengths = _at(layer.pages.starts, selection.pages), _at(layer.pages.lengths, selection.pages)
    in_pages = (starts[..., None] + offset).flatten(2)
    belongs = ((offset < lengths[..., None]) & selection.valid[..., None]).flatten(2)
    in_tail = (sealed_end[:, None] + torch.arange(tail, device=device))[:, None].expand(-1, heads, -1)
    tokens = torch.cat([in_pages, in_tail], -1).clamp_max(store.num_tokens - 1)

    position = length[:, None] - num_queries + torch.arange(num_queries, device=device)  # [B, Q]
    causal = in_tail[:, :, None] <= position[:, None, :, None]
    readable = torch.cat([belongs[:, :, None].expand(-1, -1, num_queries, -1), causal], -1)
    if mask is not None:
        index = tokens[:, :, None].expand(-1, -1, num_queries, -1)
        readable = readable & mask.expand(-1, heads, num_queries, -1).gather(-1, index)
    elif store.visible is not None:
        readable = readable & _at(store.visible, tokens)[:, :, None]
    return tokens, readable


def _at(per_row: Tensor, index: Tensor) -> Tensor:
    """`per_row [B, n]` at `index [B, H, k]`."""
    return per_row[:, None].expand(-1, index.shape[1], -1).gather(-1, index)
