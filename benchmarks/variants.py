"""Routers that exist to be measured: rivals stored in int8, and ideas that have to earn their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.box import BoxRouter
from oval_core.routers.quest import QuestRouter

SCALE_BYTES = 4


class Int8QuestRouter(QuestRouter):
    """Quest whose minima and maxima are rounded to int8, one scale a vector."""

    name = "quest int8"

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor:
        """See `Router.page_features`; what the int8 numbers stand for."""
        rounded = [_rounded(half, 127) for half in super().page_features(keys, mask).float().chunk(2, dim=-1)]
        return torch.cat(rounded, dim=-1)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return pages * 2 * (basis.centroid.shape[-1] + SCALE_BYTES)


class ReusingRouter(BoxRouter):
    """The box router that selects at every n-th step only, and when a page was sealed."""

    def __init__(self, every: int) -> None:
        self.name, self._every = f"box every {every}", every
        self._kept: dict[int, tuple[int, int, Selection]] = {}

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        position, sealed = int(pages.positions.max()), int(pages.counts.max())
        kept = self._kept.get(pages.layer_idx)
        if kept is None or not (0 < position - kept[0] < self._every and kept[1] == sealed):
            kept = (position, sealed, super().select(query, pages))
            self._kept[pages.layer_idx] = kept
        return kept[2]

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`; the mean over the steps."""
        return super().metadata_bytes(pages, shortlist, basis, features) // self._every


class CoverageRouter(BoxRouter):
    """Reads, per KV head, pages until their estimated share of the attention mass reaches a target."""

    def __init__(self, target: float) -> None:
        self.name, self._target = f"box to {target:.0%}", target

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`; the budget does not count."""
        share = pages.weights(self.score(query, pages))
        order = share.masked_fill(pages.forced(), torch.inf).masked_fill(~pages.present(), -torch.inf)
        value, chosen = order.sort(dim=-1, descending=True, stable=True)
        covered = share.gather(-1, chosen)
        enough = covered.cumsum(-1) - covered >= self._target
        valid = (value > -torch.inf) & ((value == torch.inf) | ~enough)
        most = int(valid.sum(-1).max())
        return Selection(chosen[..., :most], valid[..., :most])


def make_variant(name: str) -> str | Router:
    """The router to put into a config: a variant made here, or the name of a router of OVAL."""
    made: dict[str, Callable[[], Router]] = {
        Int8QuestRouter.name: Int8QuestRouter,
        **{f"box every {every}": partial(ReusingRouter, every) for every in (2, 4)},
        **{f"box to {target:.0%}": partial(CoverageRouter, target) for target in (0.8, 0.9, 0.95)},
    }
    return made[name]() if name in made else name


def _rounded(x: Tensor, levels: int) -> Tensor:
    """Vectors `[..., n]` on a grid of `2 levels + 1` values."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / levels
    return (x / scale).round() * scale
