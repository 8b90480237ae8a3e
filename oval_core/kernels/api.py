"""What every kernel implementation offers. Shapes: `query` is float32 `[B, H, G, Q, D]` where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from oval_core.basis import PageBasis

if TYPE_CHECKING:
    from oval_core.layer import OvalLayer
    from oval_core.routers.base import Selection


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

    def unsupported(
        self, query: Tensor, layer: OvalLayer, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
    ) -> str | None:
        """Optional, with `cascade` and its `query`: why it cannot serve a call, or None."""
        ...

    def cascade(self, query: Tensor, layer: OvalLayer, mask: Tensor | None, scaling: float) -> tuple[Tensor, Selection]:
        """Optional: what `select` of a router, `attend` and `merge` do together, in one call; see `cpu.cascade`.

        `query` is `[B, heads, Q, D]` in any dtype; the output is float32 `[B, Q, heads, D_v]`.

        Routers of exactly the classes in the module's `FUSED_ROUTERS` go this way.
        """
        ...

    def merge(self, parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
        """Log-sum-exp merge, see `reference.merge`."""
        ...
