"""Routing by what metadata tells of a page's keys, and by what the page shows.

The training-free score of the device's default router (`box`: the coarse tier; `basis`: coarse tier, then bases) is
corrected for image pages by the gated scores of a `HybridHead`: it moves mass from one image page to another, not
between images and text. Pages of text, and of pictures that have no embedding, keep the training-free score.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.config import AUTO, ROUTER_OF_DEVICE
from oval_core.kernels.api import Partial
from oval_core.memory import lasting
from oval_core.model_shape import head_dim_of
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter
from oval_mm.head_file import load_head
from oval_mm.hybrid_head import HeadSizes, HybridHead, shift_within
from oval_mm.page_embeddings import ConceptEmbedding, MeanKeyEmbedding, PageEmbedding

BASES = (BoxRouter.name, BasisRouter.name)
KEY_DTYPE = torch.float16  # of what is kept of a page


class HybridRouter(Router):
    """For `OvalConfig(router=HybridRouter.load(file, model))` with `oval_mm.attach`, which hands it the pictures.

    Args:
        head: on the device of the model.
        embedding: what image pages are to it.
        base: the training-free router, "box" or "basis"; "auto": the default of the head's device.
        estimate_tail: with "basis", whether shortlisted pages that are not read contribute through their basis.

    Raises:
        ValueError: no such base, or head and embedding do not fit each other.
    """

    name = "hybrid"
    needs_hidden_states = True

    def __init__(
        self, head: HybridHead, embedding: PageEmbedding, base: str = AUTO, estimate_tail: bool = True
    ) -> None:
        device = head.gate.device
        base = ROUTER_OF_DEVICE.get(device.type, BasisRouter.name) if base == AUTO else base
        if base not in BASES:
            raise ValueError(f"base must be {AUTO!r} or one of {BASES}, got {base!r}")
        if head.sizes.embedding_size != embedding.size:
            expected = head.sizes.embedding_size
            raise ValueError(f"the head expects page embeddings of {expected} dimensions, got {embedding.size}")
        self.head, self.embedding = head, embedding
        self._base = BoxRouter() if base == BoxRouter.name else BasisRouter(estimate_tail)
        self.needs_bases = self._base.needs_bases

    @staticmethod
    def load(path: str | Path, model: Any, base: str = AUTO, estimate_tail: bool = True) -> HybridRouter:
        """From a file of `oval_mm.distillation`, on the device of a model.

        Raises:
            FileNotFoundError, ValueError: no such file, not what it must be, or made for another model.
        """
        head, embedding = load_head(Path(path))
        if isinstance(embedding, ConceptEmbedding):
            embedding = ConceptEmbedding(embedding.space.to(model.device), embedding.kind)
        router = HybridRouter(head.to(model.device), embedding, base, estimate_tail)
        router.check(model)
        return router

    def __deepcopy__(self, _: object) -> HybridRouter:
        return self  # nothing in it changes: copies of a cache share it

    def check(self, model: Any) -> None:
        """Raise ValueError, saying what was expected and what came, unless head and embeddings are for this model."""
        have, wanted = self.head.sizes, HeadSizes.of(model, self.embedding.size, self.head.sizes.dim)
        if have != wanted:
            raise ValueError(f"the routing head is for another model: expected {wanted}, got {have}")
        text, vision = model.config.get_text_config(decoder=True), getattr(model.config, "vision_config", None)
        if isinstance(self.embedding, MeanKeyEmbedding):
            _require_width("keys", head_dim_of(text), self.embedding.size)
        if isinstance(self.embedding, ConceptEmbedding):
            width = getattr(vision, "hidden_size", None) or getattr(vision, "embed_dim", None)
            _require_width("patches", width, len(self.embedding.space.projection))
        if self.head.gate.device != model.device:
            raise ValueError(f"the routing head must be on {model.device} like the model, got {self.head.gate.device}")

    def of_pictures(self, features: Sequence[Tensor], states: Any) -> list[Tensor | None]:
        """See `PageEmbedding.of_pictures`; called once, when pictures are encoded."""
        return self.embedding.of_pictures(features, states)

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        return coarse + self._shift(coarse, pages)

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        if not isinstance(self._base, BasisRouter):
            return super().select(query, pages)
        coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        return self._base.select_by(query, pages, coarse, self._shift(coarse, pages))

    def tail_of(self, query: Tensor, pages: Pages, selection: Selection) -> Partial | None:
        """See `Router.tail_of`."""
        return self._base.tail_of(query, pages, selection)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`; counted as if all pages showed a picture."""
        own = self.head.sizes.dim * KEY_DTYPE.itemsize
        return pages * own + self._base.metadata_bytes(pages, shortlist, basis, features)

    def _shift(self, coarse: Tensor, pages: Pages) -> Tensor:
        """What the head adds to the scores of the pages, `[B, H, G, Q, P]`."""
        if pages.hidden_states is None:
            raise ValueError("the hybrid router needs the hidden states of an attached model, got none")
        keys, known, is_any = self.looked_up(pages)
        if not is_any:
            return torch.zeros_like(coarse)
        among = known[:, None, None, None]
        if pages.seen is not None:
            among = among & (pages.seen > 0)[:, None, None]
        extra = self.head.scores(pages.layer_idx, pages.hidden_states, keys)
        return shift_within(coarse, extra[:, :, None], among)

    def looked_up(self, pages: Pages) -> tuple[Tensor, Tensor, bool]:
        """Keys of the pages `[B, H, P, dim]`, which pages have one, bool `[B, P]`, and whether any has."""
        if self.name not in pages.derived:
            pages.derived[self.name] = self._look_up(pages)
        found: tuple[Tensor, Tensor, bool] = pages.derived[self.name]
        return found

    @lasting
    def _look_up(self, pages: Pages) -> tuple[Tensor, Tensor, bool]:
        embeddings, known = self.embedding.of_pages(pages)
        return self.head.page_keys(pages.layer_idx, embeddings).to(KEY_DTYPE), known, bool(known.any())


def hybrid_of(router: Any) -> HybridRouter | None:
    """`router` itself, or the router that it wraps as `inner`, if that is a `HybridRouter`."""
    while not isinstance(router, HybridRouter) and router is not None:
        router = getattr(router, "inner", None)
    return router


def _require_width(what: str, expected: int | None, got: int) -> None:
    if expected != got:
        raise ValueError(f"page embeddings are for another model: expected {what} of {expected} dimensions, got {got}")
