"""A small head over the newest hidden state: 64 numbers, a frozen map with a low-rank adapter, and a temperature.

    z = gelu(down[l] hidden)            u = (base[l, h] + alpha / rank * up[l, h] a[l, h]) z

A router sees a layer's own input, so the newest hidden state is the one that enters the layer at hand, not the one that
leaves the last layer. Training adds Gumbel noise before the softmax over the pages (Jang et al. 2017, arXiv
1611.01144); inference is without, and puts the four heaviest pages of each query head first.
"""

from __future__ import annotations

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

WIDTH, RANK, ALPHA = 64, 4, 8.0
TOP_PAGES = 4


class OutputHead(LearnedHead):
    """See the top of this file.

    Args:
        sizes, dim, coarse, seed: see `LearnedHead`; the frozen map is drawn from `seed`, and kept in files.
    """

    kind = "output head"
    base: Tensor

    def __init__(self, sizes: ModelSizes, dim: int = 32, coarse: bool = False, seed: int = 0) -> None:
        super().__init__(sizes, dim, coarse, seed)
        at, outputs = (sizes.layers, sizes.heads * sizes.group), dim + DISTANCE_FEATURES
        self.down = self.weights(sizes.layers, WIDTH, sizes.hidden_size)
        self.down_bias = nn.Parameter(torch.zeros(sizes.layers, WIDTH))
        self.register_buffer("base", self.weights(*at, outputs, WIDTH).detach())
        self.adapter_in = self.weights(*at, RANK, WIDTH)
        self.adapter_out = nn.Parameter(torch.zeros(*at, outputs, RANK))
        self.log_temperature = nn.Parameter(torch.zeros(at))

    def ask(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """See `LearnedHead.ask`; divided by the temperature of the query head."""
        z = nn.functional.gelu(hidden @ self.down[layer].mT + self.down_bias[layer])
        adapter = ALPHA / RANK * self.adapter_out[layer] @ self.adapter_in[layer]
        asked = torch.einsum("bqw,now->bnqo", z, self.base[layer] + adapter)
        asked = asked * (-self.log_temperature[layer])[:, None, None].exp()
        return asked.unflatten(1, (self.sizes.heads, self.sizes.group))

    def guesses(
        self, layer: int, asked: Tensor, scores: Tensor, places: Places, among: Tensor, noise: torch.Generator
    ) -> list[Tensor]:
        """See `LearnedHead.guesses`: the relaxed choice of one page."""
        tiny = torch.finfo(scores.dtype).tiny
        uniform = torch.rand(scores.shape, generator=noise).clamp_min(tiny).to(scores.device)
        gumbel = -(-uniform.log()).clamp_min(tiny).log()
        warmth = self.log_temperature[layer].exp().view(self.sizes.heads, self.sizes.group, 1, 1)
        return [log_shares(scores + gumbel / warmth, among)]


class OutputHeadRouter(LearnedRouter):
    """For `OvalConfig(router=OutputHeadRouter.load(file))`."""

    name = "output-head"
    head_class = OutputHead

    def wanted(self, scores: Tensor, asked: Tensor, pages: Pages) -> Tensor:
        """See `LearnedRouter.wanted`."""
        return heaviest(scores, free(pages), TOP_PAGES)
