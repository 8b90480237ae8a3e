"""The coarse tier alone (like ArkVale's box mean): mean key and mean deviation per dimension, no tail."""

from __future__ import annotations

from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.routers.base import Pages, Router


class BoxRouter(Router):
    """Scores a page by `s (q.mu + |q|.radius) + log(tokens)`."""

    name = "box"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return pages * basis.coarse_bytes
