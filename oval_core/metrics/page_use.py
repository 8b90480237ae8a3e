"""Which pages are read together: a graph over the pages of a KV head, from selections that were observed.

Two pages are joined if they were read together in at least half of the steps that read either of them (Jaccard index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from torch import Tensor

from oval_core.stats import TraceEntry

JOINED = 0.5
MOST_PAGES = 256  # of a head that are looked at, evenly spaced: the work grows with their square


def graph_density(selections: Mapping[int, Sequence[TraceEntry]]) -> float | None:
    """Share of the pairs of pages that are joined, mean over layers, rows and KV heads; from 0 to 1.

    Args:
        selections: by layer, what each step read; pages may become more on the way.

    Returns: None if no row of a layer has two pages and two steps.
    """
    densities = [_density(read) for steps in selections.values() if len(steps) > 1 for read in by_row(steps)]
    return mean(found) if (found := [density for density in densities if density is not None]) else None


def head_use(selections: Sequence[TraceEntry]) -> list[float]:
    """Share of a row's pages that each KV head read in any of these steps of one layer, mean over the rows.

    Returns: nothing if no row has a page.
    """
    shares = [read.any(1).float().mean(1) for read in by_row(selections) if read.shape[2]]
    return torch.stack(shares).mean(0).tolist() if shares else []


def by_row(selections: Sequence[TraceEntry]) -> list[Tensor]:
    """Each row's steps side by side, bool `[H, n, P]`, P its pages at the newest step; steps of other batch sizes are
    left out.
    """
    newest = selections[-1]
    alike = [step.read for step in selections if step.read.shape[:2] == newest.read.shape[:2]]
    pages = newest.read.shape[2]
    padded = [torch.nn.functional.pad(step[..., :pages], (0, max(0, pages - step.shape[2]))) for step in alike]
    return [read[..., :count] for read, count in zip(torch.stack(padded, 2), newest.counts, strict=True)]


def _density(read: Tensor) -> float | None:
    """`read [H, n, P]`."""
    pages = read.shape[2]
    if pages < 2 or read.shape[1] < 2:
        return None
    kept = read[..., :: -(-pages // MOST_PAGES)].float()
    together = kept.mT @ kept  # [H, P, P]
    times = together.diagonal(dim1=-2, dim2=-1)
    either = times[..., :, None] + times[..., None, :] - together
    joined = (together >= JOINED * either) & (either > 0)
    count = kept.shape[2]
    pairs = joined.sum((1, 2)) - joined.diagonal(dim1=-2, dim2=-1).sum(-1)
    return float(pairs.float().mean() / (count * (count - 1)))
