"""Routers that spend their budget on image pages alone, and controls that show what the choice of those is worth.

Pages of text and open tokens are always read: `share` is a share of the image pages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.page_table import TEXT
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter
from oval_core.routers.oracle import OracleRouter
from oval_core.routers.random import RandomRouter
from oval_core.routers.window import WindowRouter


class ImagePages(Pages):
    """Pages of which those of text must be selected, in place of sinks and window."""

    def is_image(self) -> Tensor:
        """bool `[B, P]`: pages of images that the row has."""
        return (self.tags != TEXT) & (self.index < self.counts[:, None])

    def forced(self) -> Tensor:
        """bool `[B, 1, P]`: pages of text."""
        return self.present() & ~self.is_image()[:, None]


class ImageBudget(Router):
    """Reads all text pages, and of the image pages of a row the share that another router puts first.

    Copies of a cache keep asking this very object, so `share` can be set from run to run.

    Args:
        inner: any router; of its shortlist and its tail, text pages are a part.
        share: of the image pages, in [0, 1], rounded to whole pages, but at least one unless it is 0.
    """

    def __init__(self, inner: Router, share: float = 1.0) -> None:
        self.inner, self.share = inner, share
        self.name, self.needs_bases, self.needs_hidden_states = inner.name, inner.needs_bases, inner.needs_hidden_states
        self._shortlist_pages = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ImageBudget:
        return self

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        shown = with_budget(pages, self.share)
        self._shortlist_pages = shown.most[1]
        return self.inner.select(query, shown)

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """See `Router.page_features`."""
        return self.inner.page_features(keys, mask)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`; of the shortlist that was really looked at."""
        return self.inner.metadata_bytes(pages, self._shortlist_pages, basis, features)


def with_budget(pages: Pages, share: float) -> ImagePages:
    """The same pages with a budget of all text pages and `share` of the image pages."""
    shown = ImagePages(**{field.name: getattr(pages, field.name) for field in fields(pages)})
    images = shown.is_image().sum(-1)
    wanted = (share * images).round().long().clamp_min(int(share > 0)).minimum(images)
    budget = pages.counts - images + wanted
    shortlist = budget.maximum(pages.shortlist)
    most = (int(budget.max()), int(shortlist.max()))
    return replace(shown, budget=budget, shortlist=shortlist, most=most, sinks=0, window=0)


class FixedRandomRouter(Router):
    """One random order of the image pages of each row, the same for all layers, heads and steps.

    Args:
        seed: of the orders.
    """

    name = "random fixed"

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`; nothing but the numbers of row and image page counts."""
        number = (pages.tags != TEXT).long().cumsum(-1)
        generator = torch.Generator().manual_seed(self._seed)
        noise = torch.rand(len(number), int(number.max()) + 1, generator=generator).to(query.device)
        return noise.gather(1, number)[:, None, None, None].expand(*query.shape[:4], -1)


class LastPatchRouter(Router):
    """The last page of every image first."""

    name = "last patch"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        after = torch.nn.functional.pad(pages.tags[:, 1:], (0, 1), value=TEXT)
        return (after != pages.tags).float()[:, None, None, None].expand(*query.shape[:4], -1)


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "basis": BasisRouter,
    "basis, tail dropped": partial(BasisRouter, estimate_tail=False),
    "box": BoxRouter,
    "oracle": OracleRouter,
    "random": RandomRouter,
    "random fixed": FixedRandomRouter,
    "recent": WindowRouter,
    "last patch": LastPatchRouter,
    "no_image": WindowRouter,
}


def shares_of(router: str, shares: tuple[float, ...], pages_per_image: int) -> tuple[float, ...]:
    """The shares of the image pages that a router is asked for; two controls have one of their own."""
    own = {"no_image": (0.0,), "last patch": (1 / pages_per_image,)}
    return own.get(router, shares)
