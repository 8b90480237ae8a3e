"""Routers that exist to be measured: rivals stored in int8, and ideas that have to earn their place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.box import BoxRouter
from oval_core.routers.locality import LocalityRouter
from oval_core.routers.quest import QuestRouter
from oval_core.routers.selection_cache import SelectionCacheRouter

SCALE_BYTES = 4
LOCALITY_WEIGHTS = (0.25, 0.5)  # nats
LEAST_COSINES = (0.9, 0.8, -1.0)
GRAPH_EVERY = 16  # steps: few positions are read, so that it cannot be the hundred of the default


REUSED_LONG = "basis reused 0.8, 16 kept for 64 steps"


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


class ReusingRouter(SelectionCacheRouter):
    """The box router that selects at every n-th step only, whatever the queries are, and when a page was sealed."""

    def __init__(self, every: int) -> None:
        super().__init__(BoxRouter(), steps=every, min_cosine=-1)
        self.name = f"box every {every}"

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`; the mean over the steps."""
        return super().metadata_bytes(pages, shortlist, basis, features) // self.steps


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
        **{f"basis + decay {weight}": _locality(decay_weight=weight) for weight in LOCALITY_WEIGHTS},
        **{
            f"basis + graph {weight}, every {GRAPH_EVERY}": _locality(graph_weight=weight, refresh_tokens=GRAPH_EVERY)
            for weight in LOCALITY_WEIGHTS
        },
        **{f"basis reused {cosine}": _reused(cosine) for cosine in LEAST_COSINES},
        REUSED_LONG: _reused(0.8, steps=64, entries=16),
        **{f"box to {target:.0%}": partial(CoverageRouter, target) for target in (0.8, 0.9, 0.95)},
    }
    return made[name]() if name in made else name


def _locality(**changes: Any) -> Callable[[], Router]:
    return partial(LocalityRouter, **{"decay_weight": 0.0, "graph_weight": 0.0, **changes})


def _reused(min_cosine: float, **changes: Any) -> Callable[[], Router]:
    return partial(SelectionCacheRouter, min_cosine=min_cosine, **changes)


def _rounded(x: Tensor, levels: int) -> Tensor:
    """Vectors `[..., n]` on a grid of `2 levels + 1` values."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / levels
    return (x / scale).round() * scale
