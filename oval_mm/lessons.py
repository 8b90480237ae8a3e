"""What a routing head learns from: where the dense model looks, beside what the training-free score knows of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oval_core import OvalConfig
from oval_core.routers import Pages, Selection
from oval_core.routers.oracle import exact_log_mass
from oval_mm.attach import attach
from oval_mm.hybrid_head import HybridHead
from oval_mm.hybrid_router import HybridRouter
from oval_mm.recipes.llava_batches import Pack, make_batch
from oval_mm.recipes.question_packing import IGNORED, packed_outputs

ALL, ANSWERS = TOKENS = ("all", "answers")


@dataclass(frozen=True)
class LayerLesson:
    """N tokens over the I image pages of one prompt, in one layer; float32.

    Args:
        hidden: `[N, hidden]`.
        coarse: `[H, G, N, I]`, training-free log-masses.
        share: `[H, N, I]`, the pages' shares of the attention mass on images, mean over the group.
        embeddings: `[1 or H, I, E]`.
    """

    hidden: Tensor
    coarse: Tensor
    share: Tensor
    embeddings: Tensor

    def guess(self, head: HybridHead | None, layer: int) -> Tensor:
        """The shares as they are without reading the pages, `[H, N, I]`; without a head: training-free."""
        scores = self.coarse
        if head is not None:
            keys = head.page_keys(layer, self.embeddings[None])
            scores = scores + head.scores(layer, self.hidden[None], keys)[0][:, None]
        return scores.softmax(-1).mean(1)


Lesson = list[LayerLesson]  # of all layers


class Teacher(HybridRouter):
    """Reads every page, so that the model stays dense, and notes what a head can learn from it.

    Attributes:
        tokens: int64 `[N]`, of the queries to note.
        noted: what came, by layer.
    """

    tokens: Tensor
    noted: dict[int, LayerLesson]

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`; one row."""
        self.noted[pages.layer_idx] = self._note(query[:, :, :, self.tokens], pages)
        everything = pages.index.expand(len(query), query.shape[1], -1)
        return Selection(everything, pages.present().expand_as(everything))

    def _note(self, query: Tensor, pages: Pages) -> LayerLesson:
        embeddings, known = self.embedding.of_pages(pages)
        if pages.hidden_states is None or not bool(known.any()):
            raise ValueError("expected pictures with page embeddings, got none: is this their CLIP, is this a LLaVA?")
        coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)[0][..., known[0]]
        share = exact_log_mass(query, pages)[0][..., known[0]].softmax(-1).mean(1)
        hidden = pages.hidden_states[0, self.tokens].float()
        return LayerLesson(hidden, coarse, share, embeddings[0][:, known[0]])


@torch.no_grad()
def lessons(
    model: Any,
    processor: Any,
    packs: Iterable[Pack],
    teacher: Teacher,
    page_size: int = 16,
    block: int | None = None,
    tokens: str = ALL,
) -> Iterator[Lesson]:
    """One lesson a pack.

    Args:
        model: a `LlavaForConditionalGeneration`, not attached.
        processor: its `LlavaProcessor`.
        teacher: a head of any weights, and the embeddings that are wanted.
        page_size, block: as the head will be used, see `OvalConfig` and `attach`.
        tokens: which are learned from: "all" of the questions and answers, or those that "answers" are predicted from.

    Raises:
        ValueError: no such tokens, or the pictures get no embeddings.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens must be one of {TOKENS}, got {tokens!r}")
    config = OvalConfig(
        page_size=page_size,
        router=teacher,
        budget_ratio=1.0,
        always_paged=True,
        seal_tokens=1,
        stats_every=0,
        max_sparse_query_tokens=1 << 30,
        impl="reference",
    )
    with attach(model, processor, config, block=block):
        for pack in packs:
            batch = make_batch([pack], processor).to(model.device)
            is_answer = torch.nn.functional.pad(batch.packed.labels[0, 1:] != IGNORED, (0, 1))
            teacher.tokens = (is_answer if tokens == ANSWERS else batch.packed.block[0] >= 0).nonzero().flatten()
            teacher.noted = {}
            packed_outputs(model, batch.packed, batch.pixels)
            yield [lesson for _, lesson in sorted(teacher.noted.items())]
