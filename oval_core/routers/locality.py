"""Locality: recent pages, and pages that are wanted together with those of the step before, are wanted sooner.

Both signals are added to the log-masses or scores of another router, in nats:

    decay_weight * exp(-distance / reach_pages)     distance: pages from the end of the row, the open tokens being one
    convolution(x)                                  x: shares of the pages that the last step read, the largest 1

`x` is spread over a graph of the pages that earlier steps read together or one after the other (`page_graph`). Distance
is counted in pages because the nearest tokens are open or in the window, and read anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, distributed

from oval_core.checks import check_count, check_positive
from oval_core.memory import lasting
from oval_core.page_table import PageTable
from oval_core.routers.base import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.page_graph import GraphConvolution, PageGraph, build_graph
from oval_core.routers.wrapper import WrappingRouter

GRAPHS_BUILT = "page_graphs_built"  # in `stats()["router_counts"]`, layers and rows summed up


class _Step(NamedTuple):
    """Pages that a step chose to read, int32 `[H, n]` (-1: none), and their shares, float32 `[H, n]`."""

    pages: Tensor
    shares: Tensor


class LocalityRouter(WrappingRouter):
    """Adds locality to the scores of another router.

    What it remembers of a row ends when the row is cropped, goes with it from beam to beam, and is bounded: the pages
    of `window_tokens + refresh_tokens` steps and two graphs of `edges_per_page` edges a page.

    Args:
        inner: the router whose scores are shifted; None: `BasisRouter()`. A `BasisRouter` estimates what is not read as
            it does alone; of any other router the `score` is used, and nothing is estimated.
        decay_weight: nats that the decay adds at distance 0.
        reach_pages: distance at which the decay has fallen to 1/e.
        graph_weight: nats that a page gets which the last step read with the largest share, were it alone in the graph;
            the start value of `convolution.weight`.
        window_tokens: decoding steps (one a token) that the graph is made of.
        refresh_tokens: the graph is made anew whenever the row has grown by so many tokens.
        edges_per_page: heaviest edges that every page keeps.
        group: processes whose edge counts are summed, such as those that hold other heads of the layer: all must take
            the same steps over the same pages. None: this process alone.

    Attributes:
        convolution: the `GraphConvolution`.

    Raises:
        TypeError, ValueError: naming the argument, what is accepted and what came.
    """

    name = "locality"

    def __init__(
        self,
        inner: Router | None = None,
        decay_weight: float = 0.5,
        reach_pages: float = 32.0,
        graph_weight: float = 0.5,
        window_tokens: int = 100,
        refresh_tokens: int = 100,
        edges_per_page: int = 8,
        group: distributed.ProcessGroup | None = None,
    ) -> None:
        super().__init__(BasisRouter() if inner is None else inner)
        counts = {"window_tokens": window_tokens, "refresh_tokens": refresh_tokens, "edges_per_page": edges_per_page}
        for name, count in counts.items():
            check_count(name, count)
        check_positive("reach_pages", reach_pages)
        self.decay_weight, self.reach_pages = decay_weight, reach_pages
        self.convolution = GraphConvolution(graph_weight)
        self.window_tokens, self.refresh_tokens = window_tokens, refresh_tokens
        self.edges_per_page, self.group = edges_per_page, group
        self._graphs = (self, "graphs")  # the owner of their notes

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`: what the inner router says, and the locality of each page."""
        scores = self._inner_scores(query, pages)
        return scores + self._shift(pages, query.shape[1]).expand_as(scores)

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        built = self._refresh(pages)
        scores = self._inner_scores(query, pages)
        shift = self._shift(pages, query.shape[1]).expand(*query.shape[:4], -1)
        if isinstance(self.inner, BasisRouter):
            selection = self.inner.select_by(query, pages, scores, shift)
        else:
            selection = self.choose(query, pages, scores + shift)
        self._remember(pages, selection, pages.weights(scores))
        return selection._replace(counts={GRAPHS_BUILT: built})

    def _inner_scores(self, query: Tensor, pages: Pages) -> Tensor:
        if isinstance(self.inner, BasisRouter):
            return pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        return self.inner.score(query, pages)

    def _shift(self, pages: Pages, heads: int) -> Tensor:
        """What locality adds to the scores, `[B, H, 1, 1, P]`."""
        distance = (pages.counts[:, None] - pages.index).clamp_min(0)
        decay = self.decay_weight * (-distance / self.reach_pages).exp()
        spread = [self._spread(table, decay.new_zeros(heads, len(pages.index))) for table in pages.tables]
        return (decay[:, None] + torch.stack(spread))[:, :, None, None]

    def _spread(self, table: PageTable, x: Tensor) -> Tensor:
        """Of one row: the convolution of what the last step read, written to `x [H, P]`, which holds zeros."""
        noted = table.memory.last(self)
        if noted is None:
            return x
        step: _Step = noted[1]
        x.scatter_reduce_(-1, step.pages.long().clamp_min(0), step.shares, "amax")
        graph = table.memory.last(self._graphs)
        return self.convolution(x, None if graph is None else graph[1])

    @lasting
    def _remember(self, pages: Pages, selection: Selection, shares: Tensor) -> None:
        """Note what was read beyond the forced pages, each with its share."""
        index = selection.pages
        chosen = selection.valid & ~pages.forced().expand_as(shares).gather(-1, index)
        shares = (shares.gather(-1, index) * chosen).float()
        shares = shares / shares.amax(-1, keepdim=True).clamp_min(torch.finfo(shares.dtype).tiny)
        noted = index.masked_fill(~chosen, -1).int()
        for row, table in enumerate(pages.tables):
            step = _Step(noted[row], shares[row])
            table.memory.add(self, table.length - 1, step, most=self.window_tokens + self.refresh_tokens)

    @lasting
    def _refresh(self, pages: Pages) -> int:
        """Build the graphs that are due; how many."""
        built = 0
        for table in pages.tables:
            grown = table.length - 1 - table.first
            due = table.first + grown - grown % self.refresh_tokens  # the same whatever was cropped in between
            noted = table.memory.last(self._graphs)
            if noted is None or noted[0] < due:
                table.memory.add(self._graphs, due, self._graph(table, due), most=2)
                built += 1
        return built

    def _graph(self, table: PageTable, end: int) -> PageGraph | None:
        """Of the steps before token `end`."""
        steps = [step.pages for token, step in table.memory.notes(self) if end - self.window_tokens <= token < end]
        return build_graph(steps, self.edges_per_page, self.group)
