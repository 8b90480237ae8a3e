"""Sinks and the most recent pages (like StreamingLLM, but nothing is evicted)."""

from __future__ import annotations

from torch import Tensor

from oval_core.routers.base import Pages, Router


class WindowRouter(Router):
    """Scores a page by its position; sinks are forced anyway."""

    name = "window"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return (pages.index + 1).log().expand(*query.shape[:4], -1)  # a logarithm: the softmax must not underflow
