"""Which pages are wanted together: a graph over the pages of a row and layer, and one graph convolution on it.

Two pages share an edge for every KV head and step that read both, and for every two steps in a row of which one read
the one and the next the other. Of each page the heaviest edges are kept, so that memory grows with the pages and not
with their square. The convolution is that of Kipf & Welling 2017 (arXiv 1609.02907) with one feature in and out:
`w D^-1/2 (A + I) D^-1/2 x`, `D` the degrees of `A + I`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, distributed, nn

SCRATCH_BYTES = 8 << 20  # of the dense edge counts that are held at a time


class PageGraph(NamedTuple):
    """A graph over P pages that keeps k edges a page: `D^-1/2 (A + I) D^-1/2` with `A = (N + Nᵀ) / 2`, N what is kept.

    Attributes:
        neighbours: int64 `[P, k]`.
        edges: float32 `[P, k]`, normalised, half of each edge: it is read in both directions.
        loops: float32 `[P]`, normalised.
    """

    neighbours: Tensor
    edges: Tensor
    loops: Tensor

    def spread(self, x: Tensor) -> Tensor:
        """The normalised adjacency times `x [H, n]`, n >= P; pages from P on have no edge."""
        pages = len(self.loops)
        known = x[:, :pages]
        reached = self.loops * known + (self.edges * known[:, self.neighbours]).sum(-1)
        given = (self.edges * known[..., None]).flatten(1)
        reached = reached.index_add(1, self.neighbours.flatten(), given)
        return torch.cat([reached, x[:, pages:]], -1)


def build_graph(
    steps: Sequence[Tensor], edges_per_page: int, group: distributed.ProcessGroup | None = None
) -> PageGraph | None:
    """The graph of what consecutive steps read.

    Args:
        steps: pages of each step, int `[H, n]`, -1 for none; n may differ.
        edges_per_page: edges that each page keeps at most.
        group: processes whose edge counts are summed: all must call this for the same steps. None: this one alone.

    Returns: None if no step read a page.
    """
    pages = max((int(step.max()) + 1 for step in steps if step.numel()), default=0)
    if steps and group is not None:
        size = torch.tensor(pages, device=steps[0].device)
        distributed.all_reduce(size, distributed.ReduceOp.MAX, group)
        pages = int(size)
    if not pages:
        return None
    read = _as_matrix(steps, pages)
    at_once = max(1, SCRATCH_BYTES // (4 * pages))
    heaviest = []
    for first in range(0, pages, at_once):
        counts = _edge_counts(read, first, min(first + at_once, pages))
        if group is not None:
            distributed.all_reduce(counts, group=group)
        heaviest.append(counts.topk(min(edges_per_page, pages), dim=-1))
    return _normalised(torch.cat([top.indices for top in heaviest]), torch.cat([top.values for top in heaviest]))


def _as_matrix(steps: Sequence[Tensor], pages: int) -> Tensor:
    """What was read, float32 `[steps, H, P]` of zeros and ones."""
    read = torch.zeros(len(steps), len(steps[0]), pages + 1, device=steps[0].device)  # the last column takes the -1
    for row, step in zip(read, steps, strict=True):
        row.scatter_(-1, step.long().masked_fill(step < 0, pages), 1.0)
    return read[..., :pages]


def _edge_counts(read: Tensor, first: int, stop: int) -> Tensor:
    """Edges between the pages [first, stop) and all pages, `[stop - first, P]`, without loops."""
    around = read.clone()  # what the same step, the one before and the one after read
    around[1:] += read[:-1]
    around[:-1] += read[1:]
    counts = read[..., first:stop].flatten(0, 1).T @ around.flatten(0, 1)
    counts[:, first:stop].fill_diagonal_(0.0)
    return counts


def _normalised(neighbours: Tensor, counts: Tensor) -> PageGraph:
    half = counts / 2
    degrees = (1 + half.sum(-1)).index_add(0, neighbours.flatten(), half.flatten())
    scale = degrees.rsqrt()
    return PageGraph(neighbours, half * scale[:, None] * scale[neighbours], 1 / degrees)


class GraphConvolution(nn.Module):
    """One graph convolution with one feature in and out.

    Args:
        weight: what the layer starts with; the parameter `weight`, float32 `[]`, may be trained or set.
    """

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))

    def forward(self, x: Tensor, graph: PageGraph | None) -> Tensor:
        """`x [H, n]` -> `[H, n]`; without a graph every page has its loop alone."""
        return self.weight.to(x.device) * (x if graph is None else graph.spread(x))
