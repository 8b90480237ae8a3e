"""What every kernel implementation offers. Shapes: `query` is float32 `[B, H, G, Q, D]` where nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from oval_core.basis import PageBasis

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer
    from oval_core.routers.base import Selection


class Partial(NamedTuple):
    """Attention over some of the tokens: float32 `out [..., D_v]` and its log-sum-exp `lse [...]`."""

    out: Tensor
    lse: Tensor


class Reads(NamedTuple):
    """Which stored tokens an exact read covers: runs of tokens, each KV head its own.

    Attributes:
        starts: first token of each run, int64 `[B, H, n]`; anywhere, also in the middle of a page.
        lengths: tokens of each run, int64 `[B, H, n]`, 0 to `page_size`; runs do not overlap.
        page_size: the most tokens that a run holds.
        last: the last position that each query may read, int64 `[B, Q]`.
        mask: bool `[B, 1, Q, T]`, True where a query may read (padding, trees); None: everywhere up to `last`.
    """

    starts: Tensor
    lengths: Tensor
    page_size: int
    last: Tensor
    mask: Tensor | None


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

    def attend_pages(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float, softcap: float | None
    ) -> Partial:
        """Exact attention straight from the token storage, see `reference.attend_pages`."""
        ...

    def unsupported_reads(
        self, query: Tensor, keys: Tensor, values: Tensor, reads: Reads, softcap: float | None
    ) -> str | None:
        """Optional: why `attend_pages` leaves such a call to another implementation, or None if it does not."""
        ...

    def unsupported(
        self, query: Tensor, layer: OvalLayer, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
    ) -> str | None:
        """Optional, with `cascade` and its `query`: why it cannot serve a call, or None."""
        ...

    def cascade(self, query: Tensor, layer: OvalLayer, mask: Tensor | None, scaling: float) -> tuple[Tensor, Selection]:
        """Optional: what `select` of a router, `attend_pages` and `merge` do together, in one call; see `cpu.cascade`.

        `query` is `[B, heads, Q, D]` in any dtype; the output is `[B, Q, heads, D_v]`, in float32 or that dtype.

        Routers of exactly the classes in the module's `FUSED_ROUTERS` go this way.
        """
        ...

    def warm_up(
        self, dtype: torch.dtype, device: torch.device, model_config: PreTrainedConfig, config: OvalConfig
    ) -> None:
        """Optional: compile what a step needs, or load what an earlier process compiled, before the first token.

        Args:
            dtype, device: of the model, and so of its cache.
            model_config: of the decoder; its heads matter.
        """
        ...

    def merge(self, parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
        """Log-sum-exp merge, see `reference.merge`."""
        ...
