"""Two tiny layers in front of a learned router that undo what quantising the model does to its hidden states.

    repaired = hidden + up[l] gelu(down[l] hidden)

`up` starts at 0: untrained, a router gets what it would get anyway.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oval_core.routers.base import Pages, Selection
from oval_core.routers.learned import LearnedRouter
from oval_core.routers.learned_file import LearnedModule, ModelSizes, load_learned
from oval_core.routers.wrapper import WrappingRouter


class InputRepair(LearnedModule):
    """See the top of this file; float32.

    Args:
        sizes: of the model.
        width: of the layer between.
        seed: of the first weights.
    """

    kind = "input repair"

    def __init__(self, sizes: ModelSizes, width: int = 16, seed: int = 0) -> None:
        super().__init__(sizes, width=width)
        generator, (layers, hidden) = torch.Generator().manual_seed(seed), (sizes.layers, sizes.hidden_size)
        self.down = nn.Parameter(torch.randn(layers, width, hidden, generator=generator) / hidden**0.5)
        self.up = nn.Parameter(torch.zeros(layers, hidden, width))

    def forward(self, layer: int, hidden: Tensor) -> Tensor:
        """Hidden states `[..., hidden]` of a quantised model, repaired: float32 of that shape."""
        hidden = hidden.float()
        return hidden + nn.functional.gelu(hidden @ self.down[layer].mT) @ self.up[layer].mT


class RepairedRouter(WrappingRouter):
    """A learned router behind an input repair.

    Args:
        inner: made for the model as it was.
        repair: trained with `python -m oval_core.training --repair`.

    Raises:
        TypeError: `inner` is no router.
        ValueError: they are for different models.
    """

    name = "repaired"

    def __init__(self, inner: LearnedRouter, repair: InputRepair) -> None:
        super().__init__(inner)
        if inner.head.sizes != repair.sizes:
            raise ValueError(f"the repair must be for the router's model {inner.head.sizes}, got {repair.sizes}")
        self.repair = repair.eval().requires_grad_(False)
        self.name = f"repaired {inner.name}"

    @staticmethod
    def load(inner: LearnedRouter, path: str | Path) -> RepairedRouter:
        """`inner` behind the repair in a file. Raises as `LearnedRouter.load` does."""
        return RepairedRouter(inner, load_learned(Path(path), InputRepair))

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return self.inner.score(query, self._repaired(pages))

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        return self.inner.select(query, self._repaired(pages))

    def _repaired(self, pages: Pages) -> Pages:
        """The pages with repaired hidden states; what is missing or for another model the inner router names."""
        hidden: Any = pages.hidden_states
        sizes = self.repair.sizes
        if hidden is None or hidden.shape[-1] != sizes.hidden_size or pages.layer_idx >= sizes.layers:
            return pages
        if self.repair.device != hidden.device:
            self.repair.to(hidden.device)
        return dataclasses.replace(pages, hidden_states=self.repair(pages.layer_idx, hidden))
