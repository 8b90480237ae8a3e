"""Random pages, anew at every step: the floor that a router has to beat."""

from __future__ import annotations

import torch
from torch import Tensor

from oval_core.routers.base import Pages, Router


class RandomRouter(Router):
    """Scores pages by noise.

    Args:
        seed: of the router's own generator.
    """

    name = "random"

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`; the queries of a group share their noise."""
        batch, heads, group, queries, _ = query.shape
        noise = torch.rand(batch, heads, 1, 1, len(pages.index), generator=self._generator)
        return noise.to(query.device).expand(-1, -1, group, queries, -1)
