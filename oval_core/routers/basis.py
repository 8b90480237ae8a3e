"""The default router: coarse scores over all pages, bases over a shortlist, exact reading where the output could move.

Tier 3 ranks the shortlist by how far the approximation of a page could be off, weighted by the page's share:

    mean over g of   p_g . (rho_v / mean||V|| + s ||q_g|| rho_k / sqrt(D))
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels.api import Partial
from oval_core.routers.base import Pages, Router, Selection


class BasisRouter(Router):
    """Selects by output impact and estimates what it does not select.

    Args:
        estimate_tail: whether shortlisted pages that are not read contribute through their basis.
    """

    name = "basis"
    needs_bases = True

    def __init__(self, estimate_tail: bool = True) -> None:
        self.estimate_tail = estimate_tail

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        return self.select_by(
            query, pages, pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        )

    def select_by(self, query: Tensor, pages: Pages, coarse: Tensor, shift: Tensor | None = None) -> Selection:
        """The same from coarse scores `[B, H, G, Q, P]`.

        Args:
            shift: of that shape, added to the log-masses that pages are ranked by; what is estimated of the pages that
                are not read stays as it is. None: nothing.
        """
        ranked = coarse if shift is None else coarse + shift
        shortlist, listed = pages.top(pages.weights(ranked), pages.shortlist, pages.most[1])
        page = pages.kernels.evaluate_bases(query, pages.basis, shortlist, pages.scaling, pages.softcap)
        lse = page.lse.masked_fill(~self._estimable(shortlist, listed, pages), -torch.inf)
        mass = lse if shift is None else lse + shift.gather(-1, shortlist[:, :, None, None].expand(lse.shape))

        impact = torch.full_like(pages.basis.key_error, -torch.inf)
        impact.scatter_(-1, shortlist, self._impact(query, mass, shortlist, pages).masked_fill(~listed, -torch.inf))
        chosen, valid = pages.top(impact, pages.budget, pages.most[0])
        if not self.estimate_tail:
            return Selection(chosen, valid)
        read = torch.zeros_like(impact, dtype=torch.bool).scatter_(-1, chosen, valid).gather(-1, shortlist)
        return Selection(chosen, valid, _merged(Partial(page.out, lse.masked_fill(read[:, :, None, None], -torch.inf))))

    def estimate(self, query: Tensor, pages: Pages, coarse: Tensor, read: Tensor) -> Partial:
        """What those shortlisted pages contribute that are not `read`, bool `[B, H, P]`; `coarse` as in `select_by`."""
        shortlist, listed = pages.top(pages.weights(coarse), pages.shortlist, pages.most[1])
        page = pages.kernels.evaluate_bases(query, pages.basis, shortlist, pages.scaling, pages.softcap)
        known = self._estimable(shortlist, listed & ~read.gather(-1, shortlist), pages)
        return _merged(Partial(page.out, page.lse.masked_fill(~known, -torch.inf)))

    def tail_of(self, query: Tensor, pages: Pages, selection: Selection) -> Partial | None:
        """See `Router.tail_of`; reads all that a selection of its own would."""
        if not self.estimate_tail:
            return None
        coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        return self.estimate(query, pages, coarse, selection.mask(len(pages.index)))

    def _estimable(self, shortlist: Tensor, listed: Tensor, pages: Pages) -> Tensor:
        """bool `[B, H, 1, 1 or Q, n]`: a basis speaks for a query only if the mask shows it all tokens of the page."""
        if pages.seen is None:
            return listed[:, :, None, None]
        whole = pages.seen[:, None] == pages.basis.tokens[:, :, None]  # [B, H, Q, P]
        index = shortlist[:, :, None].expand(-1, -1, whole.shape[2], -1)
        return (listed[:, :, None] & whole.gather(-1, index))[:, :, None]

    def _impact(self, query: Tensor, lse: Tensor, shortlist: Tensor, pages: Pages) -> Tensor:
        """How far a page's approximation could move the output, mean over the group: `[B, H, n]`."""
        share = (lse - lse.logsumexp(-1, keepdim=True).clamp_min(torch.finfo(lse.dtype).min)).exp()
        rho_k = pages.basis.key_error.gather(-1, shortlist)[:, :, None, None]
        rho_v = pages.basis.value_error.gather(-1, shortlist)[:, :, None, None]
        reach = pages.scaling * query.norm(dim=-1, keepdim=True) / math.sqrt(query.shape[-1])  # [B, H, G, Q, 1]
        return (share * (rho_v / pages.mean_value_norm[:, None, None, None, None] + reach * rho_k)).mean((2, 3))

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return pages * basis.coarse_bytes + shortlist * basis.basis_bytes


def _merged(page: Partial) -> Partial:
    """What pages contribute together: `out [..., n, D_v]`, `lse [..., n]` -> `out [..., D_v]`, `lse [...]`."""
    total = page.lse.logsumexp(-1)
    share = (page.lse - total.clamp_min(torch.finfo(total.dtype).min)[..., None]).exp()
    return Partial((share[..., None, :] @ page.out).squeeze(-2), total)
