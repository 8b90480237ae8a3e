"""`OvalLayer`: one paged attention layer behind the cache contract of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin
from transformers.utils import logging

from oval_core.config import AUTO, OvalConfig
from oval_core.memory import lasting
from oval_core.page_store import PageStore
from oval_core.page_table import PageTable
from oval_core.routers import Router, make_router
from oval_core.sealed_pages import SealedPages

logger = logging.get_logger(__name__)


class OvalLayer(CacheLayerMixin):
    """KV cache of one attention layer: token storage and the pages over it.

    `update` hands the layer to the attention function as `kwargs["oval_layer"]`. Pages are sealed at the next
    `update`, from tokens whose mask the attention has seen: neither padding nor a rejected draft token enters a basis.

    Args:
        config: how to page.
        router: the router whose page features are stored beside the bases; None: the one that `config` asks for.
        layer_idx: position in the cache.

    Attributes:
        handed_out: the keys of an `update` that no attention function has claimed yet.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, config: OvalConfig, router: Router | None, layer_idx: int) -> None:
        if router is None and config.router != AUTO:
            router = make_router(config)
        self.config, self._router, self.layer_idx = config, router, layer_idx
        self.reset()

    def reset(self) -> None:
        """Forget everything, shapes included."""
        self.is_initialized = False
        self._store: PageStore | None = None
        self._pages: SealedPages | None = None
        self._attended: list[int] = []  # tokens of each row whose attention mask has been seen
        self.handed_out: Tensor | None = None

    @lasting
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for `[B, H, n, D]` keys and `[B, H, n, D_v]` values. Raises ValueError if rank exceeds D."""
        self.config = self.config.for_device(key_states.device)
        self._router = self._router or make_router(self.config)
        self._pages = SealedPages(self.config, self.router, key_states, value_states)
        self._store = PageStore(key_states, value_states)
        self._attended = [0] * key_states.shape[0]
        self.is_initialized = True

    @property
    def router(self) -> Router:
        """The router. Raises RuntimeError before the first `update` if the device decides which."""
        if self._router is None:
            raise RuntimeError("the cache layer is empty: which router 'auto' is depends on the device of the tokens")
        return self._router

    @router.setter
    def router(self, router: Router) -> None:
        """Another one that makes do with the page features and bases of the old one."""
        self._router = router

    @property
    def needs_hidden_states(self) -> bool:
        """Whether the router, if there is one by now, wants to see what goes into the attention module."""
        return self._router is not None and self._router.needs_hidden_states

    @property
    def store(self) -> PageStore:
        """The token storage. Raises RuntimeError before the first `update`."""
        if self._store is None:
            raise RuntimeError("the cache layer is empty: nothing has been written to it yet")
        return self._store

    @property
    def pages(self) -> SealedPages:
        """The sealed pages. Raises RuntimeError before the first `update`."""
        if self._pages is None:
            raise RuntimeError("the cache layer is empty: nothing has been written to it yet")
        return self._pages

    @property
    def tables(self) -> list[PageTable]:
        """The page tables of the rows; empty before the first `update`."""
        return self._pages.tables if self._pages else []

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """All keys `[B, H, T, D]` in the order of the storage, without a copy; None while empty."""
        return self._store.dense()[0] if self._store else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """All values `[B, H, T, D_v]` in the order of the storage, without a copy; None while empty."""
        return self._store.dense()[1] if self._store else None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, kwargs: dict[str, Any] | None = None, **unused: Any
    ) -> tuple[Tensor, Tensor]:
        """Seal what can be sealed, append new tokens, return all keys and values.

        The cache holds detached copies: gradients flow through a pass over an empty cache, not through the cache.

        Args:
            key_states, value_states: `[B, H, n, D]` and `[B, H, n, D_v]`.
            kwargs: keyword arguments of the attention call; the layer puts itself there as `oval_layer`.

        Raises:
            ValueError: shape, dtype or device differ from what the layer holds.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.handed_out is not None:
            _warn_unattached()
        is_first = self.store.num_tokens == 0
        self.store.append(key_states.detach(), value_states.detach())
        self.pages.seal(self.store, self._attended)
        for table in self.tables:
            table.extend(key_states.shape[2])
        keys, values = (key_states, value_states) if is_first else self.store.dense()
        if kwargs is not None:
            kwargs["oval_layer"] = self
            self.handed_out = keys
        return keys, values

    def attended(self, visible: Tensor | None) -> None:
        """The attention has seen the newest tokens; `visible` bool `[B, n]` tells which are real (None: all)."""
        if visible is not None and not (self.store.visible is None and bool(visible.all())):
            self._skip_padding(visible)
            self.store.hide(visible)
        self._attended = self.store.lengths.copy()

    @property
    def unattended_tokens(self) -> int:
        """The most tokens of a row whose attention mask has not been seen yet."""
        return max(have - seen for have, seen in zip(self.store.lengths, self._attended, strict=True))

    def _skip_padding(self, visible: Tensor) -> None:
        """Rows that are all padding so far start after the hidden tokens that `visible` begins with."""
        new = visible.shape[1]
        starting = [row for row, table in enumerate(self.tables) if table.first == table.length - new]
        if starting:
            hidden = (visible.cumsum(-1) == 0).sum(-1).tolist()
            for row in starting:
                self.tables[row].skip(self.tables[row].first + hidden[row])

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return self._store.num_tokens if self._store else 0

    def get_max_length(self) -> int:
        """-1: the layer grows."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that the next `update` of `query_length` tokens will return."""
        return self.get_seq_length() + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens of every row (0 or negative, as in transformers)."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove as a value <= 0, got {tokens_to_remove}")
        if self._store is not None:
            self.crop_rows([max(length + tokens_to_remove, 0) for length in self._store.lengths])

    def crop_rows(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` tokens of each row; pages that lose a token are open again."""
        self.store.check_crop(lengths)
        for row, length in enumerate(lengths):
            self._put_in_order(row, length)
        self.store.crop(lengths)
        for table, length in zip(self.tables, lengths, strict=True):
            table.crop(length)
        self._forget_attention()

    def keep(self, indices: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        """Of the tokens from `start[row]` on keep only positions `indices[row]`, see `PageStore.keep`."""
        self.store.check_keep(indices, start)
        untouched = [
            first + next((i for i, token in enumerate(kept) if token != first + i), len(kept))
            for first, kept in zip(start, indices, strict=True)
        ]
        for row, token in enumerate(untouched):
            self._put_in_order(row, token)
        self.store.keep(indices, start)
        for table, token, length in zip(self.tables, untouched, self.store.lengths, strict=True):
            table.crop(token)
            table.extend(length - token)
        self._forget_attention()

    def _forget_attention(self) -> None:
        """What was removed has not been attended any more."""
        self._attended = [min(seen, have) for seen, have in zip(self._attended, self.store.lengths, strict=True)]

    def mark(self, row: int, start: int, stop: int, tag: int, blocks: Sequence[Sequence[int]] = ()) -> None:
        """Give tokens [start, stop) of a row pages of their own, see `PageTable.mark`.

        With `blocks` the tokens change their places in the storage when they are sealed: all at once, after all of them
        have been attended, and not if a mask hid one of them. Their keys hold their positions, so that attention stays
        the same as long as a later mask shows a query all of them or none; else call `unblock` before.
        """
        self.pages.tables[row].mark(start, stop, tag, blocks)

    def unblock(self, row: int, token: int) -> None:
        """Store the marked span that holds `token` of a row in order again, sealed or not; its pages become runs."""
        self._put_in_order(row, token)
        self.pages.tables[row].unblock(token)

    def _put_in_order(self, row: int, token: int) -> None:
        """Store in order what is sealed in blocks and ends after `token`; its pages are open again."""
        for span in self.tables[row].reopen(token):
            self.store.reorder(row, span.start, sorted(range(len(span.order)), key=span.order.__getitem__))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row i what row `beam_idx[i]` was."""
        if self._store is not None:
            self.store.select_rows(beam_idx)
            self.pages.select_rows(beam_idx)
            self._attended = [self._attended[row] for row in beam_idx.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        self.reorder_cache(torch.arange(len(self.tables)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` (positions, or a bool mask)."""
        self.reorder_cache(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Not supported: pages live where the model lives."""
        raise NotImplementedError("OVAL's cache cannot be offloaded; use cache_implementation='offloaded' without OVAL")

    prefetch = offload


def _warn_unattached() -> None:
    logger.warning_once(
        "an OvalCache is used by a model that is not attached: it works as a plain dense cache. "
        "Call oval_core.attach(model) to read only the pages that matter."
    )
