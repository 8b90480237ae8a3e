"""A two-layer network over hidden state and absolute position: page weights and a window for every query head.

The window's radius follows from the entropy of the weights: a head that is sure needs little around what it looks for.

    radius = 4 + 28 * entropy / log(pages) tokens      centre = position - offset

The pages under the window and the three heaviest of each query head are read first, the others by their weight.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from oval_core.routers.base import Pages
from oval_core.routers.learned import (
    DISTANCE_FEATURES,
    LearnedHead,
    LearnedRouter,
    Places,
    free,
    heaviest,
    log_shares,
)
from oval_core.routers.learned_file import ModelSizes

LEAST_RADIUS_TOKENS, MOST_RADIUS_TOKENS = 4.0, 32.0
LEAST_WINDOW_TOKENS = 3
TOP_PAGES = 3
WAVES = 8  # of the position's encoding, each a sine and a cosine
LONGEST_WAVE_TOKENS = 1 << 17
FIRST_OFFSET_TOKENS = 64
MOST_LOG_OFFSET = 20.0  # of the logarithm of 1 + offset, far beyond any context


class PositionMlpHead(LearnedHead):
    """See the top of this file; two layers for each layer of the model.

    Args:
        width: of the layer between.
        sizes, dim, coarse, seed: see `LearnedHead`.
    """

    kind = "position MLP"

    def __init__(self, sizes: ModelSizes, dim: int = 32, coarse: bool = False, seed: int = 0, width: int = 128) -> None:
        super().__init__(sizes, dim, coarse, seed, width=width)
        layers, queries = sizes.layers, sizes.heads * sizes.group
        self.first = self.weights(layers, width, sizes.hidden_size + 2 * WAVES + 1)
        self.first_bias = nn.Parameter(torch.zeros(layers, width))
        self.second = self.weights(layers, queries, dim + DISTANCE_FEATURES + 1, width)
        bias = torch.zeros(layers, queries, dim + DISTANCE_FEATURES + 1)
        bias[..., -1] = math.log1p(FIRST_OFFSET_TOKENS)
        self.second_bias = nn.Parameter(bias)

    def ask(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """See `LearnedHead.ask`; one entry more at the end, see `offsets`."""
        inputs = torch.cat([hidden, encoded(positions)], -1)
        between = nn.functional.gelu(inputs @ self.first[layer].mT + self.first_bias[layer])
        asked = torch.einsum("bqw,now->bnqo", between, self.second[layer]) + self.second_bias[layer][:, None]
        return asked.unflatten(1, (self.sizes.heads, self.sizes.group))

    @staticmethod
    def offsets(asked: Tensor) -> Tensor:
        """How far before the position the window's centre is, in tokens: float32 `[B, H, G, Q]`, >= 0."""
        return nn.functional.softplus(asked[..., -1]).clamp_max(MOST_LOG_OFFSET).expm1()

    def guesses(
        self, layer: int, asked: Tensor, scores: Tensor, places: Places, among: Tensor, noise: torch.Generator
    ) -> list[Tensor]:
        """See `LearnedHead.guesses`: the weights, and a heavy-tailed bump where the window is, which draws it near."""
        weights = log_shares(scores, among)
        centre = places.positions[:, None, None] - self.offsets(asked)
        away = (places.centres[:, None, None, None] - centre[..., None]) / radii(weights.detach(), among)[..., None]
        return [weights, log_shares(-away.square().log1p(), among)]


class PositionMlpRouter(LearnedRouter):
    """For `OvalConfig(router=PositionMlpRouter.load(file))`."""

    name = "position-mlp"
    head_class = PositionMlpHead

    def wanted(self, scores: Tensor, asked: Tensor, pages: Pages) -> Tensor:
        """See `LearnedRouter.wanted`: the pages under the window, and the heaviest."""
        among, places = free(pages), Places.of(pages)
        radius = radii(log_shares(scores, among), among)
        offset = self.head.offsets(asked)
        position = pages.positions[:, None, None]
        begin, end = window(position, offset, radius)
        first = places.starts[:, None, None, None]
        under = (first < end[..., None]) & (first + places.lengths[:, None, None, None] > begin[..., None])
        return under | heaviest(scores, among, TOP_PAGES)


def encoded(positions: Tensor) -> Tensor:
    """Absolute positions `[B, Q]` as sines and cosines of many lengths, and their logarithm: `[B, Q, 2 WAVES + 1]`.

    Those of padding, below 0, count as 0.
    """
    positions = positions.clamp_min(0)
    steps = torch.arange(WAVES, device=positions.device) / (WAVES - 1)
    lengths = 2 * math.pi * (LONGEST_WAVE_TOKENS / (2 * math.pi)) ** steps
    angle = 2 * math.pi * positions[..., None].float() / lengths
    size = positions[..., None].float().log1p() / math.log(LONGEST_WAVE_TOKENS)
    return torch.cat([angle.sin(), angle.cos(), size], -1)


def radii(log_weights: Tensor, among: Tensor) -> Tensor:
    """Radius of the window in tokens, from the entropy of the weights over the pages `among`.

    Args:
        log_weights: `[B, H, G, Q, P]`.
        among: bool, broadcasts to that.

    Returns: float32 `[B, H, G, Q]`, 4 where one page has all the weight, 32 where all have the same.
    """
    entropy = -(log_weights.exp() * log_weights).masked_fill(~among, 0.0).sum(-1)
    most = among.expand_as(log_weights).sum(-1).clamp_min(2).float().log()
    return LEAST_RADIUS_TOKENS + (MOST_RADIUS_TOKENS - LEAST_RADIUS_TOKENS) * (entropy / most).clamp(0, 1)


def window(position: Tensor, offset: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [begin, end) within `radius` of `position - offset`, clipped to the context of `position + 1` tokens.

    At least `LEAST_WINDOW_TOKENS` of them, if there are so many. The shapes broadcast; int64.
    """
    context, centre = position + 1, position - offset
    least = context.clamp_max(LEAST_WINDOW_TOKENS)
    begin = torch.minimum((centre - radius).ceil().clamp_min(0).long(), context - least)
    end = torch.maximum((centre + radius).floor().long() + 1, begin + least)
    return begin, torch.minimum(end, context)
