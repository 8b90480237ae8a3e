"""What the router is shown of a layer, and which tokens its answer means."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from oval_core.binding import Binding
from oval_core.kernels import Reads
from oval_core.layer import OvalLayer
from oval_core.memory import on_device
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
    real_tokens = [[table.length - table.first] for table in layer.tables]
    on_counts, on_budget, on_shortlist = on_device([counts, budget, shortlist], device)
    starts, lengths = sealed.starts[:, :most], sealed.lengths[:, :most]
    return Pages(
        basis=sealed.basis.narrow(most),
        features=None if sealed.features is None else sealed.features[:, :, :most],
        starts=starts,
        lengths=lengths,
        tags=sealed.tags[:, :most],
        counts=on_counts,
        seen=None if mask is None else _seen_tokens(mask, starts, lengths),
        budget=on_budget,
        shortlist=on_shortlist,
        most=(max(budget), max(shortlist)),
        mean_value_norm=sealed.mean_value_norm,
        sinks=config.sink_pages,
        window=config.window_pages,
        keys=store.dense()[0],
        token_mask=None if store.visible is None else store.visible[:, : store.num_tokens],
        positions=on_device(real_tokens, device) - num_queries + torch.arange(num_queries, device=device),
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


def reads_of(
    layer: OvalLayer, selection: Selection, num_queries: int, mask: Tensor | None, with_open: bool = True
) -> Reads:
    """The tokens of the selected pages and, `with_open`, those of the open tail, page by page.

    Args:
        num_queries: Q, the newest tokens.
        mask: bool `[B, 1, Q, T]` or None.
    """
    device, store, size = selection.pages.device, layer.store, layer.config.page_size
    starts = _at(layer.pages.starts, selection.pages)
    lengths = _at(layer.pages.lengths, selection.pages) * selection.valid
    stored = on_device(store.lengths, device)[:, None]
    if with_open:
        open_starts, open_lengths = _open_runs(layer, device)
        starts, lengths = (
            torch.cat([pages, runs[:, None].expand(-1, pages.shape[1], -1)], -1)
            for pages, runs in ((starts, open_starts), (lengths, open_lengths))
        )
    if mask is None and store.visible is not None:
        mask = store.visible[:, None, None, : store.num_tokens].expand(-1, -1, num_queries, -1)
    return Reads(starts, lengths, size, stored - num_queries + torch.arange(num_queries, device=device), mask)


def _open_runs(layer: OvalLayer, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the runs of at most a page start that the open tail of each row consists of, and their lengths `[B, n]`."""
    size = layer.config.page_size
    ends = [(table.sealed_end, length) for table, length in zip(layer.tables, layer.store.lengths, strict=True)]
    first = range(0, max(length - end for end, length in ends), size)
    starts = [[end + offset for offset in first] for end, _ in ends]
    lengths = [
        [min(max(length - start, 0), size) for start in row] for row, (_, length) in zip(starts, ends, strict=True)
    ]
    both = on_device([starts, lengths], device)
    return both[0], both[1]


def _at(per_row: Tensor, index: Tensor) -> Tensor:
    """`per_row [B, n]` at `index [B, H, k]`."""
    return per_row[:, None].expand(-1, index.shape[1], -1).gather(-1, index)
