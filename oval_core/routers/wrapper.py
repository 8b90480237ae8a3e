"""A router around another one: what it does not override, the inner one answers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels.api import Partial
from oval_core.routers.base import Pages, Router, Selection


class WrappingRouter(Router):
    """Asks `inner`. What it remembers lies in the page tables, so that copies of a cache may share the router itself.

    Args:
        inner: any router.

    Raises:
        TypeError: `inner` is none.
    """

    def __init__(self, inner: Router) -> None:
        if not isinstance(inner, Router):
            raise TypeError(f"inner must be a Router, got {inner!r} ({type(inner).__name__})")
        self.inner = inner
        self.needs_bases, self.needs_hidden_states = inner.needs_bases, inner.needs_hidden_states

    def __deepcopy__(self, _: dict[int, Any]) -> WrappingRouter:
        return self

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return self.inner.score(query, pages)

    def tail_of(self, query: Tensor, pages: Pages, selection: Selection) -> Partial | None:
        """See `Router.tail_of`."""
        return self.inner.tail_of(query, pages, selection)

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """See `Router.page_features`."""
        return self.inner.page_features(keys, mask)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return self.inner.metadata_bytes(pages, shortlist, basis, features)
