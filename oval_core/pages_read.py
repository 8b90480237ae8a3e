"""Which pages of one layer were read exactly, over many steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oval_core.memory import lasting

if TYPE_CHECKING:
    from oval_core.layer import OvalLayer
    from oval_core.routers import Selection

SELECTIONS_AT_ONCE = 64

_lasting_zeros = lasting(torch.zeros)


class PagesRead:
    """Counts selections many at a time: a step neither works nor waits for it."""

    def __init__(self) -> None:
        self._pages: Tensor | int = 0
        self._tokens: Tensor | int = 0
        self._ever: Tensor | None = None  # bool [B, H, capacity + 1]; the last column takes what does not count
        self._sealed: list[int] = []
        self._pending: list[Selection] = []
        self._capacity_pages = 0
        self._page_tokens: Tensor | int = 0

    def add(self, layer: OvalLayer, selection: Selection) -> None:
        """The pages of `layer` that one step read."""
        short = layer.pages.has_short_pages
        if self._pending and (short or self._pending[0].pages.shape != selection.pages.shape):
            self._count()
        self._pending.append(selection if selection.tail is None else selection._replace(tail=None))
        self._sealed, self._capacity_pages = layer.pages.counts, layer.pages.basis.capacity_pages
        self._page_tokens = layer.pages.lengths if short else layer.config.page_size
        if short or len(self._pending) == SELECTIONS_AT_ONCE:  # lengths may change when a page is sealed again
            self._count()

    @property
    def num_pages(self) -> int:
        """Pages read, summed over steps, rows and KV heads."""
        self._count()
        return int(self._pages)

    @property
    def num_tokens(self) -> int:
        """Tokens in those pages."""
        self._count()
        return int(self._tokens)

    @property
    def share(self) -> float:
        """Share of the sealed pages that were ever read; a page that was cropped since does not count."""
        self._count()
        if self._ever is None:
            return 0.0
        read = sum(int(row[:, :count].sum()) for row, count in zip(self._ever, self._sealed, strict=True))
        return read / (self._ever.shape[1] * sum(self._sealed))

    def _count(self) -> None:
        if not self._pending:
            return
        pages = torch.stack([selection.pages for selection in self._pending], 2).flatten(2)  # [B, H, n K]
        valid = torch.stack([selection.valid for selection in self._pending], 2).flatten(2)
        self._pending = []
        self._pages = self._pages + valid.sum()
        if isinstance(self._page_tokens, Tensor):
            lengths = self._page_tokens[:, None].expand(*pages.shape[:2], -1)
            self._tokens = self._tokens + (valid * lengths.gather(-1, pages)).sum()
        else:
            self._tokens = self._tokens + valid.sum() * self._page_tokens
        self._mark(pages, valid)

    def _mark(self, pages: Tensor, valid: Tensor) -> None:
        ever = self._ever
        if ever is None or ever.shape[:2] != pages.shape[:2] or ever.shape[2] <= self._capacity_pages:
            shape = (*pages.shape[:2], self._capacity_pages + 1)
            grown = _lasting_zeros(shape, dtype=torch.bool, device=pages.device)
            if ever is not None and ever.shape[:2] == shape[:2]:
                grown[..., : ever.shape[2] - 1] = ever[..., :-1]
            self._ever = ever = grown
        ever.scatter_(-1, pages.masked_fill(~valid, ever.shape[2] - 1), True)
