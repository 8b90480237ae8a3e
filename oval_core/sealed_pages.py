"""The sealed pages of one layer: the page tables of its rows, mirrored in tensors, and what is kept of each page.

Tensors have room for more pages than there are, so that their shapes stay the same over many steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from oval_core.basis import PageBasis, build_basis
from oval_core.config import OvalConfig
from oval_core.memory import lasting, on_device
from oval_core.page_policy import page_ends
from oval_core.page_store import PageStore
from oval_core.page_table import PageTable
from oval_core.routers import Router

# Of the float32 keys summarised in one go: on a CPU what its cache holds, elsewhere what makes launches few; either way
# sealing a long prompt needs little memory at a time.
CPU_SCRATCH_BYTES, SCRATCH_BYTES = 8 << 20, 256 << 20
SPARE_PAGES = 16
GROWTH = 1.5


class SealedPages:
    """Page tables, bases and router features of one layer.

    Args:
        config: how to page.
        router: whose `page_features` are stored beside the bases.
        keys, values: templates `[B, H, n, D]`, `[B, H, n, D_v]`.

    Attributes:
        tables: one `PageTable` a row.
        starts, lengths, tags: int64 `[B, capacity]`, the tables on the device.
        basis: bases `[B, H, capacity, ...]`.
        features: `[B, H, capacity, F]`, or None.
        has_short_pages: whether any page may hold fewer than `page_size` tokens.
    """

    def __init__(self, config: OvalConfig, router: Router, keys: Tensor, values: Tensor) -> None:
        batch, heads, _, key_dim = keys.shape
        if config.rank > key_dim:
            raise ValueError(f"rank must be at most the head dimension {key_dim}, got {config.rank}")
        self._page_size, self._seal_tokens, self._router = config.page_size, config.seal_tokens, router
        self._policy = config.page_policy
        self._prefilled_tokens = max(config.seal_tokens, config.page_size) + config.max_sparse_query_tokens
        self._rank = config.rank if router.needs_bases else 0
        self.tables = [PageTable(config.page_size) for _ in range(batch)]
        dims = (key_dim, values.shape[-1])
        self.basis = PageBasis.empty(batch, heads, config.page_size, self._rank, dims, keys.device)
        self.starts = torch.zeros(batch, 0, dtype=torch.long, device=keys.device)
        self.lengths, self.tags = self.starts.clone(), self.starts.clone()
        self.features: Tensor | None = None
        self.has_short_pages = False
        self._derived: tuple[list[int], dict[Hashable, Any]] = ([], {})

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without what was derived from tensors that are not its own."""
        return {**self.__dict__, "_derived": ([], {})}

    @property
    def counts(self) -> list[int]:
        """Sealed pages of each row."""
        return [table.num_pages for table in self.tables]

    @property
    def derived(self) -> dict[Hashable, Any]:
        """What this class, routers and kernels make of the pages; dropped when those change."""
        counts = self.counts
        if self._derived[0] != counts:
            self._derived = (counts, {})
        return self._derived[1]

    @property
    def mean_value_norm(self) -> Tensor:
        """Mean norm of the values of each row, over its sealed pages and heads: float32 `[B]`."""
        derived = self.derived
        if "value_norm" not in derived:
            derived["value_norm"] = self._mean_value_norm()
        norm: Tensor = derived["value_norm"]
        return norm

    @lasting
    def _mean_value_norm(self) -> Tensor:
        page = torch.arange(self.basis.capacity_pages, device=self.starts.device)
        there = (page < on_device(self.counts, page.device)[:, None])[:, None]
        tokens = (self.basis.tokens * there).sum((1, 2))
        mean = (self.basis.value_norm * there).sum((1, 2)) / tokens.clamp_min(1)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny)

    @property
    def num_pages(self) -> int:
        """Sealed pages of the fullest row."""
        return max(self.counts, default=0)

    def seal(self, store: PageStore, limits: Sequence[int]) -> None:
        """Summarise every page that is full within the first `limits[row]` tokens of its row, once these are enough."""
        rows = zip(self.tables, limits, strict=True)
        enough = [limit if limit - table.sealed_end >= self._seal_tokens else 0 for table, limit in rows]
        if not any(enough):
            return
        for row, limit in enumerate(enough):
            self._store_blocks(store, row, limit)
        ends = [self._ends(store, row, limit) for row, limit in enumerate(enough)]
        new = [table.seal(limit, own) for table, limit, own in zip(self.tables, enough, ends, strict=True)]
        if any(new):
            self._summarise_new(store, new)

    @torch.no_grad()
    def _ends(self, store: PageStore, row: int, limit: int) -> list[int]:
        """Where the policy wants pages to end; it is asked about more tokens than decoding ever leaves open."""
        table = self.tables[row]
        if self._policy is None or limit - table.sealed_end < self._prefilled_tokens:
            return []
        keys = store.dense()[0][row]
        with torch.autocast(keys.device.type, enabled=False):
            return page_ends(self._policy, table, keys, limit)

    def _store_blocks(self, store: PageStore, row: int, limit: int) -> None:
        """Move the tokens that are about to be sealed in blocks; not if one is hidden, for masks go by position."""
        for span in self.tables[row].due(limit):
            if store.shows_all(row, span.start, span.stop):
                store.reorder(row, span.start, span.order)
            else:
                self.tables[row].unblock(span.start)

    @lasting
    def _summarise_new(self, store: PageStore, new: list[range]) -> None:
        with torch.autocast(self.starts.device.type, enabled=False):  # bases are built in float32
            self._summarise_rows(store, new)

    def _summarise_rows(self, store: PageStore, new: list[range]) -> None:
        self._derived = ([], {})
        self._reserve()
        if self._rows_are_alike(new):
            self._write(store, slice(None), self.tables[0], new[0])
            return
        for row, pages in enumerate(new):
            if pages:
                self._write(store, slice(row, row + 1), self.tables[row], pages)

    @lasting
    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was."""
        self._derived = ([], {})
        rows = rows.to(self.starts.device)
        self.basis = self.basis.select_rows(rows)
        self.starts, self.lengths, self.tags = self.starts[rows], self.lengths[rows], self.tags[rows]
        if self.features is not None:
            self.features = self.features[rows]
        self.tables = [self.tables[row].copy() for row in rows.tolist()]

    def _rows_are_alike(self, new: list[range]) -> bool:
        first = self.tables[0]
        return all(
            pages == new[0] and (table.starts, table.lengths, table.tags) == (first.starts, first.lengths, first.tags)
            for table, pages in zip(self.tables, new, strict=True)
        )

    def _write(self, store: PageStore, rows: slice, table: PageTable, pages: range) -> None:
        """Mirror and summarise `pages`, which all `rows` have alike."""
        for name in ("starts", "lengths", "tags"):
            values = on_device(getattr(table, name)[pages.start : pages.stop], self.starts.device)
            getattr(self, name)[rows, pages.start : pages.stop] = values
        batch, heads, _, dim = store.storage[0][rows].shape
        scratch = CPU_SCRATCH_BYTES if self.starts.device.type == "cpu" else SCRATCH_BYTES
        at_once = max(1, scratch // (4 * batch * heads * self._page_size * dim))
        for first in range(pages.start, pages.stop, at_once):
            self._summarise(store, rows, table, range(first, min(first + at_once, pages.stop)))

    def _summarise(self, store: PageStore, rows: slice, table: PageTable, pages: range) -> None:
        keys, values, mask = self._tokens(store, rows, table, pages)
        self.basis.write(rows, pages.start, build_basis(keys, values, mask, self._rank))
        features = self._router.page_features(keys, mask)
        if features is None:
            return
        if self.features is None:
            self.features = features.new_zeros(*self.basis.tokens.shape, features.shape[-1])
        self.features[rows, :, pages.start : pages.stop] = features

    def _tokens(
        self, store: PageStore, rows: slice, table: PageTable, pages: range
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values `[b, H, P, S, ...]` and mask `[b, 1, P, S]` or None of pages that lie one after the other."""
        size, sizes = self._page_size, table.lengths[pages.start : pages.stop]
        begin, stop = table.starts[pages.start], table.starts[pages.stop - 1] + sizes[-1]
        keys, values = (tokens[rows, :, begin:stop] for tokens in store.dense())
        visible = None if store.visible is None else store.visible[rows, begin:stop]
        self.has_short_pages |= min(sizes) < size
        if min(sizes) == size:  # the usual case: a view is enough
            paged = (len(pages), size)
            mask = None if visible is None else visible.unflatten(1, paged)[:, None]
            return keys.unflatten(2, paged), values.unflatten(2, paged), mask
        lengths = on_device(sizes, self.starts.device)
        token = torch.arange(size, device=self.starts.device)
        mask = (token < lengths[:, None])[None, None]
        index = (lengths.cumsum(0) - lengths)[:, None] + torch.minimum(token, lengths[:, None] - 1)
        mask = mask if visible is None else mask & visible[:, index][:, None]
        return keys[:, :, index], values[:, :, index], mask

    def _reserve(self) -> None:
        """Grow the tensors by a constant factor."""
        have = self.starts.shape[1]
        if self.num_pages <= have:
            return
        more = max(self.num_pages + SPARE_PAGES, int(have * GROWTH)) - have
        self.basis = self.basis.grown(have + more)
        for name in ("starts", "lengths", "tags"):
            old = getattr(self, name)
            setattr(self, name, torch.cat([old, old.new_zeros(old.shape[0], more)], dim=1))
        if self.features is not None:
            spare = self.features.new_zeros(*self.features.shape[:2], more, self.features.shape[3])
            self.features = torch.cat([self.features, spare], dim=2)
