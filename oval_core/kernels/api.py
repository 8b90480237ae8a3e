"""What every kernel implementation offers. Shapes: `query` is float32 `[B, H, G, Q, D]`."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from oval_core.basis import PageBasis


class Partial(NamedTuple):
    """Attention over some of the tokens: float32 `out [..., D_v]` and its log-sum-exp `lse [...]`."""

    out: Tensor
    lse: Tensor


class Kernels(Protocol):
    """The functions of a kernel module."""

    def coarse_scores(self, query: Tensor, basis: PageBasis, scaling: float, softcap: float | None) -> Tensor:
        """Tier 1, see `reference.coarse_scores`."""
        ...

    def evaluate_bases(
        self, query: Tensor, basis: PageBasis, pages: Tensor, scaling: float, softcap: float | None
    ) -> Partial:
        """Tier 2, see `reference.evaluate_bases`."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        scaling: float,
        softcap: float | None,
    ) -> Partial:
        """Exact attention, see `reference.attend`."""
        ...

    def merge(self, parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
        """Log-sum-exp merge, see `reference.merge`."""
        ...
