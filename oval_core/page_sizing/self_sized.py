"""Pages that size themselves: short where keys differ, long where they are alike, at an equal number of pages.

Every token has a weight: one of its scores, sharpened, or what a trained head makes of them. A chunk of n tokens gets
n / mean_tokens pages, and every page the same share of the weight. Tokens are assigned to pages softly, by the plan
T `[n, P]` of least

    sum_ij T_ij cost_ij - temperature * entropy(T)
    cost_ij = ||k_i - m_j||^2 / mean_i ||k_i - mean(k)||^2  +  nearness * (place_i - j)^2

with m_j the mean key of page j, and place_i the weight of the tokens before i and of half of token i, in units of
pages, minus one half: the middle of page j is at j. A token belongs to a page that is like it and near it. Left alone,
tokens would crowd into some pages and leave others empty. Sinkhorn's iterations (Cuturi, 2013: scale first the columns,
then the rows of exp(-cost / temperature) to given sums, and again) balance that: each token hands out its whole weight,
and each page holds its capacity, 1/P of all weight. A few iterations leave the pages a little unequal where the cost
asks for it. Pages end where a token's mean page number moves on.

Long texts are cut chunk by chunk; neighbouring chunks overlap, and each says where pages end in its half of the
overlap, so that memory for the plans does not grow with the text and no cut is made without tokens on either side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from oval_core.checks import check_count
from oval_core.page_sizing.token_scores import NAMES, token_scores

CHUNK_TOKENS, OVERLAP_TOKENS = 512, 64
ITERATIONS = 5
TEMPERATURE = 0.25  # of a page's squared width
NEARNESS = 0.5  # more would keep pages in place whatever the keys are
LEAST_WEIGHT = 1e-6
SHARPNESS = 0.5
ALIKE = 0.04  # standard deviation of a score's logarithms below which its tokens are taken to be alike
MOST_LOG = 20.0  # of a weight
LEAST_MEAN, LEAST_SHARE = 1e-3, 0.05  # of scores; of a score in their mean: below is rounding

Weigh = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ByScore:
    """Weights without training: a score of the tokens, sharpened.

    Scores are means over windows, so that they hardly vary (the spread of rotated keys by 4 %): left as they are, they
    make pages of one size.

    Args:
        score: one of `token_scores.NAMES`; of the entropy, what it lacks to the largest there can be.
        sharpness: standard deviation that the logarithms of the weights in a chunk have at least; 0: that of the score.
            It is less where the score itself varies less than `ALIKE`.

    Raises:
        ValueError: there is no such score, or the sharpness is negative or no number.
    """

    score: str
    sharpness: float = SHARPNESS

    def __post_init__(self) -> None:
        if self.score not in NAMES:
            raise ValueError(f"score must be one of {', '.join(NAMES)}, got {self.score!r}")
        if not isinstance(self.sharpness, int | float) or not 0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be a finite number >= 0, got {self.sharpness!r}")

    def __call__(self, scores: Tensor) -> Tensor:
        """Weights `[n]` > 0 of `scores [n, 4]`, see `token_scores`."""
        values = scores[:, NAMES.index(self.score)]
        values = 1 - values if self.score == "entropy" else values
        logs = (values / values.mean().clamp_min(LEAST_MEAN)).clamp_min(LEAST_SHARE).log()
        away = logs - logs.mean()
        varies = away.square().mean().sqrt().clamp_min(ALIKE)
        weights = (away * (self.sharpness / varies).clamp_min(1)).clamp(-MOST_LOG, MOST_LOG).exp()
        return weights.nan_to_num(nan=1.0)  # of keys that are no numbers


spread, entropy = ByScore("spread"), ByScore("entropy")


class Chunk(NamedTuple):
    """Tokens [start, stop) that are assigned together; where pages end in [first, last) is theirs to say."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class SelfSizedPages:
    """A `PagePolicy` whose pages are short where the tokens' weights are large.

    Args:
        weigh: gives weights `[n]` >= 0 to scores `[n, 4]` (`token_scores`): `spread`, `entropy`, another `ByScore`, or
            a trained `oval_core.page_sizing.head.SizingHead`.
        mean_tokens: tokens a page has on average, before pages beyond `page_size` are split; 1 or more.

    Raises:
        TypeError, ValueError: an argument is none of those.
    """

    weigh: Weigh = spread
    mean_tokens: int = 16

    def __post_init__(self) -> None:
        check_count("mean_tokens", self.mean_tokens)
        if not callable(self.weigh):
            raise TypeError(f"weigh must be a function of scores, got {self.weigh!r} ({type(self.weigh).__name__})")

    def check(self, page_size: int) -> None:
        """See `PagePolicy`."""
        if self.mean_tokens > page_size:
            raise ValueError(f"mean_tokens must be at most page_size = {page_size}, got {self.mean_tokens}")

    def lengths(self, keys: Tensor, page_size: int) -> list[int]:
        """See `PagePolicy.lengths`; `keys [H, n, D]`."""
        self.check(page_size)
        ends: list[int] = []
        for chunk in chunks(keys.shape[1]):
            part = keys[:, chunk.start : chunk.stop].float()
            weights = self.weigh(token_scores(part))
            if weights.shape != part.shape[1:2]:
                raise ValueError(f"weigh must return weights {list(part.shape[1:2])}, got {list(weights.shape)}")
            found = (chunk.start + page_ends(assign(part, weights.float(), self.mean_tokens))).tolist()
            ends += [end for end in found if chunk.first <= end < chunk.last]
        return _bounded([0, *ends, keys.shape[1]], page_size)


def chunks(tokens: int) -> Iterator[Chunk]:
    """Chunks of `CHUNK_TOKENS` or fewer that overlap by `OVERLAP_TOKENS`, over `tokens` tokens."""
    step, half = CHUNK_TOKENS - OVERLAP_TOKENS, OVERLAP_TOKENS // 2
    for start in range(0, max(tokens - OVERLAP_TOKENS, 1), step):
        stop = min(start + CHUNK_TOKENS, tokens)
        yield Chunk(start, stop, start + half if start else 1, tokens if stop == tokens else stop - half)


def assign(keys: Tensor, weights: Tensor, mean_tokens: int) -> Tensor:
    """Shares of each token that go to each page, `[n, P]`, rows add up to 1, differentiable in `weights`.

    Args:
        keys: float32 `[H, n, D]`.
        weights: `[n]`, not negative.
    """
    count = keys.shape[1]
    pages = max(1, round(count / mean_tokens))
    weights = weights.clamp_min(LEAST_WEIGHT)
    weights = weights / weights.sum()
    place = (weights.cumsum(0) - weights / 2) * pages - 0.5  # the middle of page j is at j
    away = place[:, None] - torch.arange(pages, device=keys.device)
    likeness = _distances(keys.transpose(0, 1).flatten(1), torch.softmax(-away.square() / TEMPERATURE, -1))
    return sinkhorn(likeness + NEARNESS * away.square(), weights) / weights[:, None]


def _distances(states: Tensor, shares: Tensor) -> Tensor:
    """Squared distances of `states [n, d]` from the mean of each page, in units of their variance: `[n, P]`."""
    states = states - states.mean(0)
    means = (shares.T @ states) / shares.sum(0)[:, None].clamp_min(LEAST_WEIGHT)
    squares = states.square().sum(-1)
    distances = squares[:, None] - 2 * states @ means.T + means.square().sum(-1)
    return distances / squares.mean().clamp_min(torch.finfo(states.dtype).tiny)


def page_error(states: Tensor, shares: Tensor) -> Tensor:
    """What the means of the pages do not tell of `states [n, d]`, a share of their variance; `shares [n, P]`; `[]`."""
    return (shares * _distances(states, shares)).sum(-1).mean()


def sinkhorn(cost: Tensor, weights: Tensor) -> Tensor:
    """The balanced plan of `cost [n, P]`: rows add up to `weights [n]`, columns nearly to 1 / P; `[n, P]`."""
    plan = -cost / TEMPERATURE
    log_weights, log_capacity = weights.log()[:, None], -math.log(cost.shape[1])
    for _ in range(ITERATIONS):
        plan = plan - plan.logsumexp(0, keepdim=True) + log_capacity
        plan = plan - plan.logsumexp(1, keepdim=True) + log_weights
    return plan.exp()


def page_ends(shares: Tensor) -> Tensor:
    """Tokens of a chunk before which a page ends, int64, ascending. `shares [n, P]` as `assign` gives them."""
    number = shares @ torch.arange(shares.shape[1], dtype=shares.dtype, device=shares.device)
    page = number.round().cummax(0).values
    return (page[1:] > page[:-1]).nonzero().flatten() + 1


def _bounded(ends: list[int], page_size: int) -> list[int]:
    """Lengths of the pages between `ends`; those that are too long are split into equal parts, or nearly so."""
    lengths = []
    for start, stop in pairwise(ends):
        parts = -(-(stop - start) // page_size)
        cuts = [start + (stop - start) * part // parts for part in range(parts + 1)]
        lengths += [after - before for before, after in pairwise(cuts)]
    return lengths
