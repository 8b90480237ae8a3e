"""Which pages are read together: a graph over the pages of a KV head, from selections that were observed.

Two pages are joined if they were read together in at least half of the steps that read either of them (Jaccard index).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

import torch
from torch import Tensor

JOINED = 0.5
MOST_PAGES = 256  # of a head that are looked at, evenly spaced: the work grows with their square


def graph_density(selections: Mapping[int, Sequence[Tensor]]) -> float | None:
    """Share of the pairs of pages that are joined, mean over layers, rows and KV heads; from 0 to 1.

    Args:
        selections: by layer, which pages each step read, bool `[B, H, P]`; P may grow on the way.

    Returns: None if no layer has two pages and two steps.
    """
    densities = [_density(stacked(steps)) for steps in selections.values() if len(steps) > 1]
    return mean(found) if (found := [density for density in densities if density is not None]) else None


def head_use(selections: Sequence[Tensor]) -> list[float]:
    """Share of the pages that each KV head read in any of these steps (as in `graph_density`), mean over the rows."""
    return [float(use) for use in stacked(selections).any(2).float().mean((0, 2))]


def stacked(selections: Sequence[Tensor]) -> Tensor:
    """Steps side by side, bool `[B, H, n, P]`, P of the newest step; steps of other batch sizes are left out."""
    newest = selections[-1]
    alike = [step for step in selections if step.shape[:2] == newest.shape[:2]]
    pages = newest.shape[2]
    padded = [torch.nn.functional.pad(step[..., :pages], (0, max(0, pages - step.shape[2]))) for step in alike]
    return torch.stack(padded, 2)


def _density(read: Tensor) -> float | None:
    """`read [B, H, n, P]`."""
    pages = read.shape[3]
    if pages < 2 or read.shape[2] < 2:
        return None
    kept = read[..., :: -(-pages // MOST_PAGES)].float()
    together = kept.mT @ kept  # [B, H, P, P]
    times = together.diagonal(dim1=-2, dim2=-1)
    either = times[..., :, None] + times[..., None, :] - together
    joined = (together >= JOINED * either) & (either > 0)
    count = kept.shape[3]
    pairs = joined.sum((2, 3)) - joined.diagonal(dim1=-2, dim2=-1).sum(-1)
    return float(pairs.float().mean() / (count * (count - 1)))
