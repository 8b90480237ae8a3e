"""The mean key of a page, nothing else."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.routers.base import Pages, Router


class MeanRouter(Router):
    """Scores a page by `s q.mu + log(tokens)`."""

    name = "mean"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        point = dataclasses.replace(pages.basis, radius=pages.basis.radius.new_zeros(()).expand_as(pages.basis.radius))
        return pages.kernels.coarse_scores(query, point, pages.scaling, pages.softcap)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return pages * (basis.coarse_bytes - basis.radius.shape[-1] - basis.radius_scale.element_size())
