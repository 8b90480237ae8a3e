"""What a router sees and what it answers. To write one, override `Router.score`; `box.py` is a short example."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels.api import Kernels, Partial
from oval_core.page_table import PageTable


@dataclass(frozen=True)
class Pages:
    """The sealed pages of one layer as a router sees them; B rows, H KV heads, P pages of the fullest row.

    Attributes:
        basis: bases of P pages.
        features: what the router's own `page_features` stored, `[B, H, P, F]`, or None.
        starts, lengths, tags: int64 `[B, P]`: first token, tokens, tag (`page_table.TEXT` or an image number).
        counts: int64 `[B]`, sealed pages of each row.
        seen: int64 `[B, Q, P]`, tokens of a page that the attention mask lets a query read; None: all readable ones.
        budget, shortlist: int64 `[B]`, sealed pages to read exactly and to evaluate.
        most: the largest entries of `budget` and `shortlist`.
        mean_value_norm: float32 `[B]`, mean norm of the values of each row's sealed pages.
        sinks, window: sealed pages at the start and the end that must be selected.
        keys: the layer's tokens, `[B, H, T, D]`.
        token_mask: bool `[B, T]`, False for padding; None if there is none.
        positions: int64 `[B, Q]`, absolute position of each query in its row, padding not counted.
        hidden_states: input of the attention module, `[B, Q, hidden]`, if the router asked for it.
        layer_idx, scaling, softcap, kernels: of the attention at hand.
        tables: the page table of each row, with the spans that were marked in it; what a router wants to remember of a
            row from step to step goes into `tables[row].memory`.
        derived: for what routers make of the pages of this layer, by router; dropped when those change.
    """

    basis: PageBasis
    features: Tensor | None
    starts: Tensor
    lengths: Tensor
    tags: Tensor
    counts: Tensor
    seen: Tensor | None
    budget: Tensor
    shortlist: Tensor
    most: tuple[int, int]
    mean_value_norm: Tensor
    sinks: int
    window: int
    keys: Tensor
    token_mask: Tensor | None
    positions: Tensor
    hidden_states: Tensor | None
    layer_idx: int
    scaling: float
    softcap: float | None
    kernels: Kernels
    tables: Sequence[PageTable]
    derived: dict[Hashable, Any]

    @property
    def index(self) -> Tensor:
        """Page numbers, `[P]`."""
        return torch.arange(self.starts.shape[1], device=self.starts.device)

    def present(self) -> Tensor:
        """bool `[B, 1, P]`: pages that the row has and that hold a readable token."""
        return (self.index < self.counts[:, None])[:, None] & (self.basis.tokens[:, :1] > 0)

    def forced(self) -> Tensor:
        """bool `[B, 1, P]`: sinks and window."""
        in_window = self.index >= (self.counts - self.window)[:, None]
        return ((self.index < self.sinks) | in_window)[:, None] & self.present()

    def weights(self, scores: Tensor) -> Tensor:
        """Share of each page, `[B, H, P]`: softmax of `scores [B, H, G, Q, P]` over the pages, mean over G and Q."""
        unseen = ~self.present()[:, :, None, None]
        if self.seen is not None:
            unseen = unseen | (self.seen == 0)[:, None, None]
        return scores.masked_fill(unseen, torch.finfo(scores.dtype).min).softmax(-1).mean((2, 3))

    def top(self, scores: Tensor, wanted: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """The forced pages, then those with the largest `scores [B, H, P]`: `wanted [B]` of each row, at most `most`.

        Returns: pages, int64 `[B, H, most]`, and which of them count, bool of that shape.
        """
        scores = scores.masked_fill(self.forced(), torch.inf).masked_fill(~self.present(), -torch.inf)
        values, indices = scores.sort(dim=-1, descending=True, stable=True)  # the earlier page wins a tie
        rank = torch.arange(most, device=scores.device)
        return indices[..., :most], (rank < wanted[:, None, None]) & (values[..., :most] > -torch.inf)


class Selection(NamedTuple):
    """Pages to read exactly, int64 `[B, H, K]`, which of them count, and what the other pages contribute.

    `tail.out` is `[B, H, G, Q, D_v]`, `tail.lse [B, H, G, Q]`; None: nothing. `then`: other pages, no page twice, that
    are read exactly after these, one part after the other. `counts`: named numbers that `stats()` adds up.
    """

    pages: Tensor
    valid: Tensor
    tail: Partial | None = None
    then: tuple[Selection, ...] = ()
    counts: Mapping[str, int] | None = None

    def mask(self, num_pages: int) -> Tensor:
        """Which of `num_pages` pages are read exactly, bool `[B, H, num_pages]`; without `then`."""
        shape = (*self.pages.shape[:2], num_pages + 1)  # the last column takes what does not count
        read = torch.zeros(shape, dtype=torch.bool, device=self.pages.device)
        return read.scatter_(-1, self.pages.masked_fill(~self.valid, num_pages), True)[..., :num_pages]

    def joined(self) -> Selection:
        """All pages that are read exactly, as one part."""
        parts = (self, *self.then)
        pages, valid = [part.pages for part in parts], [part.valid for part in parts]
        return Selection(torch.cat(pages, -1), torch.cat(valid, -1), counts=self.counts)


class Router:
    """Decides which pages are read exactly. One selection serves all queries of a KV head's group and of a chunk.

    Attributes:
        name: as in `OvalConfig(router=name)`.
        needs_hidden_states: ask for `Pages.hidden_states`.
        needs_bases: ask for whole bases; otherwise only the coarse part of each page is kept (rank 0).
    """

    name = "router"
    needs_hidden_states = False
    needs_bases = False

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """Value of reading each page exactly.

        Args:
            query: float32 `[B, H, G, Q, D]`.

        Returns: float32 `[B, H, G, Q, P]`, compared over the pages after a softmax.
        """
        raise NotImplementedError(f"{type(self).__name__} must override score or select")

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """Choose pages; the default takes the best scores and drops the rest. `query` as in `score`."""
        return self.choose(query, pages, self.score(query, pages))

    def choose(self, query: Tensor, pages: Pages, scores: Tensor, first: Tensor | None = None) -> Selection:
        """The pages with the best `scores`, which are checked; see `score`.

        Args:
            first: bool `[B, H, P]`, pages that come before those with better scores; None: no page does.
        """
        expected = (*query.shape[:4], len(pages.index))
        if not isinstance(scores, Tensor) or scores.shape != expected:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"{type(self).__name__}.score must return [B, H, G, Q, P] = {expected}, got {got}")
        _refuse_nan(scores, f"{type(self).__name__}.score returned NaN")
        weights = pages.weights(scores)
        if first is not None:
            weights = weights + first.float()  # no weight is more than 1
        chosen, valid = pages.top(weights, pages.budget, pages.most[0])
        return Selection(chosen, valid)

    def tail_of(self, query: Tensor, pages: Pages, selection: Selection) -> Partial | None:
        """What the pages contribute to `query` that a selection of an earlier step leaves out; None: nothing.

        To be overridden by a router whose own selections have a tail.
        """
        return None

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """Anything the router wants to remember of a page when it is sealed: `[B, H, P, F]`, or None.

        Args:
            keys: `[B, H, P, S, D]`.
            mask: bool `[B, 1, P, S]`, True for readable tokens; None: all are.
        """
        return None

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """Bytes of metadata that one selection reads for one KV head with that many pages."""
        return 0 if features is None else pages * features.shape[-1] * features.element_size()


def _refuse_nan(scores: Tensor, message: str) -> None:
    """Raise ValueError; on an accelerator, which nobody waits for, its next operations fail with `message` instead."""
    if scores.device.type == "cuda":
        torch._assert_async(~scores.isnan().any(), message)
    elif bool(scores.isnan().any()):
        raise ValueError(message)
