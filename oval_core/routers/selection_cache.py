"""A few selections that serve several steps, as long as the queries are alike.

The open tokens are read at every step anyway. No selection outlives the sealing of pages, so that the window is always
read; a change of the budget; or a crop of the row to before the step that made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from oval_core.checks import check_count
from oval_core.kernels.api import Partial
from oval_core.memory import lasting
from oval_core.page_table import PageTable
from oval_core.routers.base import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.wrapper import WrappingRouter

HITS, MISSES = (
    "selection_cache_hits",
    "selection_cache_misses",
)  # in `stats()["router_counts"]`, layers and rows summed up


class _Kept(NamedTuple):
    """A row's selection, `pages` and `valid` `[H, K]`, and its origin: queries `[H, G, D]`, terms and a token."""

    pages: Tensor
    valid: Tensor
    query: Tensor
    terms: tuple[int, ...]
    token: int


class SelectionCacheRouter(WrappingRouter):
    """Asks another router at few steps, and lets the selections used last serve the steps between.

    Every row of a batch has its own; the other router is asked if one row needs it. The pages that are not read are
    estimated for the current query (`Router.tail_of`); with a `BasisRouter` this reads as much metadata as a selection.
    Bytes are counted as if every selection were made anew.

    Args:
        inner: the router that is asked; None: `BasisRouter()`.
        steps: decoding steps that a selection serves at most, the one that made it included; a chunk of queries counts
            as many as it has. 1: no selection is used again.
        min_cosine: a selection serves only queries whose cosine with those that it was made for is this or more, for
            every KV head (queries of a group side by side, mean over a chunk), in [-1, 1]. -1: any.

    Raises:
        TypeError, ValueError: naming the argument, what is accepted and what came.
    """

    name = "selection_cache"

    def __init__(self, inner: Router | None = None, steps: int = 4, min_cosine: float = 0.9, entries: int = 4) -> None:
        super().__init__(BasisRouter() if inner is None else inner)
        check_count("steps", steps)
        check_count("entries", entries)
        if not isinstance(min_cosine, int | float) or not -1 <= min_cosine <= 1:
            raise ValueError(f"min_cosine must be a number in [-1, 1], got {min_cosine!r}")
        self.steps, self.min_cosine, self.entries = steps, min_cosine, entries

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        signature = query.mean(3)  # [B, H, G, D]
        terms = _terms(pages)  # waits for the device
        recent = [*map(self._recent, pages.tables, terms)]
        kept = [*map(self._alike, recent, signature)]
        hits = sum(row is not None for row in kept)
        counts = {HITS: hits, MISSES: len(kept) - hits}
        if hits == len(kept):
            selection = _stacked([(row.pages, row.valid) for row in kept if row])
            self._note(pages.tables, terms, recent, kept, signature, selection)
            return selection._replace(tail=self.tail_of(query, pages, selection), counts=counts)
        made = self.inner.select(query, pages)
        joined = made.joined() if made.then else made
        self._note(pages.tables, terms, recent, kept, signature, joined)
        if not hits:
            return made._replace(counts={**(made.counts or {}), **counts})
        rows = zip(kept, joined.pages, joined.valid, strict=True)
        selection = _stacked([(row.pages, row.valid) if row else (chosen, valid) for row, chosen, valid in rows])
        tail = _by_row(kept, self.tail_of(query, pages, selection), made.tail)
        return selection._replace(tail=tail, counts={**(made.counts or {}), **counts})

    def _recent(self, table: PageTable, terms: tuple[int, ...]) -> list[_Kept]:
        """The row's selections that are not out of date, the one used last at the end."""
        _, kept = table.memory.last(self) or (0, ())
        now = table.length - 1
        return [entry for entry in kept if entry.terms == terms and 0 < now - entry.token < self.steps]

    def _alike(self, recent: list[_Kept], signature: Tensor) -> _Kept | None:
        """The selection of a row that serves queries `signature [H, G, D]`."""
        for entry in reversed(recent):
            cosine = torch.cosine_similarity(entry.query.flatten(1), signature.flatten(1), dim=-1)
            if bool((cosine >= self.min_cosine).all()):
                return entry
        return None

    @lasting
    def _note(
        self,
        tables: Sequence[PageTable],
        terms: list[tuple[int, ...]],
        recent: list[list[_Kept]],
        kept: list[_Kept | None],
        signature: Tensor,
        selection: Selection,
    ) -> None:
        """Remember what serves each row now, an old selection or that of `selection`; a crop brings back what was."""
        for row, table in enumerate(tables):
            used, now = kept[row], table.length - 1
            if used is not None and used is recent[row][-1]:
                continue
            if used is None:
                chosen, valid = selection.pages[row].clone(), selection.valid[row].clone()
                used = _Kept(chosen, valid, signature[row].clone(), terms[row], now)
            others = [entry for entry in recent[row] if entry is not used]
            table.memory.add(self, now, [*others, used][-self.entries :], most=self.entries)


def _terms(pages: Pages) -> list[tuple[int, ...]]:
    """Of each row: sealed pages, budget, and how many of the first and last pages must be read."""
    rows = zip(pages.counts.tolist(), pages.budget.tolist(), strict=True)
    return [(sealed, budget, pages.sinks, pages.window) for sealed, budget in rows]


def _stacked(rows: list[tuple[Tensor, Tensor]]) -> Selection:
    """One selection of rows `[H, K]`, filled up where K differs."""
    most = max(chosen.shape[-1] for chosen, _ in rows)
    pages, valid = (
        torch.stack([nn.functional.pad(part, (0, most - part.shape[-1])) for part in parts])
        for parts in zip(*rows, strict=True)
    )
    return Selection(pages, valid)


def _by_row(kept: list[_Kept | None], old: Partial | None, new: Partial | None) -> Partial | None:
    """Estimates of the rows that kept their selection, and of those whose selection is new."""
    if old is None or new is None:
        return None
    is_kept = torch.tensor([row is not None for row in kept], device=old.lse.device)[:, None, None, None]
    return Partial(torch.where(is_kept[..., None], old.out, new.out), torch.where(is_kept, old.lse, new.lse))
