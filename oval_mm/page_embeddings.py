"""What an image page shows, as a vector that a routing head can be asked about.

clip-text   the page's patches as weighted means of CLIP's texts of concepts, mean over the page
random      the same with random directions in place of the texts
mean-key    the page's mean key, in every layer and KV head another
text-only   where the page lies in its picture, nothing of what it shows: all that text alone can choose by

All but mean keys are made once a picture, when it is encoded, and go wherever the pages of that picture go: the tag of
its spans is a `PictureTag`, which page tables keep over turns, crops, blocks and rows that change places.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oval_core.memory import lasting
from oval_core.page_table import PageTable, Span
from oval_core.routers import Pages
from oval_mm.concepts import ConceptSpace
from oval_mm.image_spans import ImageSpan

CLIP_TEXT, RANDOM, MEAN_KEY, TEXT_ONLY = KINDS = ("clip-text", "random", "mean-key", "text-only")
PLACE_WAVES, NUMBER_WAVES = 8, 4


@dataclass(eq=False)
class Shown:
    """What a span of a row shows of a picture.

    Args:
        embedding: float32 `[T, E]`, of all T tokens of the picture; None: it was not encoded here.
        first: which of the picture's tokens the span begins with.
        start: which of the row's tokens that is.
    """

    embedding: Tensor | None
    first: int
    start: int
    _means: dict[Any, Tensor] = field(default_factory=dict)

    def means(self, table: PageTable, span: Span, pages: range) -> Tensor | None:
        """Mean embedding of `pages` of the table, which lie in `span`, `[len(pages), E]`; None: not known."""
        key = (span.start, span.stop, span.blocks, len(pages))
        if self.embedding is not None and pages and key not in self._means:
            index = [[token - self.start + self.first for token in table.positions(page)] for page in pages]
            self._means[key] = torch.stack([self.embedding[tokens].mean(0) for tokens in index])
        return self._means.get(key)


class PictureTag(int):
    """The number of a picture in its row, as the tag of pages, that knows which picture it is."""

    shown: Shown

    def __new__(cls, number: int, shown: Shown) -> PictureTag:
        """A tag that equals `number`."""
        tag = super().__new__(cls, number)
        tag.shown = shown
        return tag

    def __getnewargs__(self) -> tuple[int, Shown]:  # type: ignore[override]
        return int(self), self.shown

    def __deepcopy__(self, _: object) -> PictureTag:
        return self  # a copied cache shows the same pictures


def shown_pictures(
    spans: Sequence[Sequence[ImageSpan]], embeddings: Sequence[Tensor | None], start: int
) -> Mapping[tuple[int, int], Shown]:
    """What is shown where: by row and first token of each span, counted from `start` as the spans are.

    Args:
        spans: of each row, see `find_spans`.
        embeddings: `[T, E]` of every picture, row after row; those that miss at the end, and None: not known.
        start: tokens that all rows had before.
    """
    found, pictures_before = {}, 0
    for row, row_spans in enumerate(spans):
        tokens_before: dict[int, int] = {}
        for span in row_spans:
            number, first = pictures_before + span.image, tokens_before.get(span.image, 0)
            embedding = embeddings[number] if number < len(embeddings) else None
            found[row, span.start] = Shown(embedding, first, start + span.start)
            tokens_before[span.image] = first + span.stop - span.start
        pictures_before += len(tokens_before)
    return found


class PageEmbedding:
    """A kind of page embedding.

    Attributes:
        kind: one of KINDS.
        size: E, its dimensions.
        needs_pictures: whether a picture has one only if it was encoded under the router.
    """

    kind: str
    size: int
    needs_pictures = True

    def of_pictures(self, features: Sequence[Tensor], states: Any) -> list[Tensor | None]:
        """What to keep of each picture, `[T, E]`; None where nothing can be said.

        Args:
            features: of each picture, `[T, hidden]`, one a token.
            states: what leaves the vision tower's last layer, `[pictures, T or T + 1, W]`; anything else: unknown.
        """
        return [None] * len(features)

    def of_pages(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """Embeddings float32 `[B, 1 or H, P, E]`, and which pages have one, bool `[B, P]`."""
        where = pages.starts.device
        known = torch.zeros(pages.starts.shape, dtype=torch.bool, device=where)
        embeddings = torch.zeros(len(pages.tables), 1, known.shape[1], self.size, device=where)
        for row, table in enumerate(pages.tables):
            for span in table.spans:
                at = range(bisect_left(table.starts, span.start), bisect_left(table.starts, span.stop))
                means = span.tag.shown.means(table, span, at) if isinstance(span.tag, PictureTag) else None
                if means is not None:
                    embeddings[row, 0, at.start : at.stop] = self.finished(means, span.tag)
                    known[row, at.start : at.stop] = True
        return embeddings, known

    def finished(self, means: Tensor, number: int) -> Tensor:
        """The embeddings of pages of picture `number` of a row from the means of their tokens."""
        return means


class ConceptEmbedding(PageEmbedding):
    """Patches expressed over the concepts of a `ConceptSpace`, which may have random texts."""

    def __init__(self, space: ConceptSpace, kind: str = CLIP_TEXT) -> None:
        self.space, self.kind, self.size = space, kind, space.texts.shape[1]

    @lasting
    def of_pictures(self, features: Sequence[Tensor], states: Any) -> list[Tensor | None]:
        """See `PageEmbedding.of_pictures`; of a tower whose tokens are not one for one those of the prompt, nothing."""
        is_alike = isinstance(states, Tensor) and states.dim() == 3 and len(states) == len(features)
        if not is_alike or states.shape[-1] != self.space.projection.shape[0]:
            return super().of_pictures(features, states)
        dropped = [states.shape[1] - len(feature) for feature in features]  # 1: the class token
        described = self.space.describe(states)
        return [patches[skip:] if skip in (0, 1) else None for patches, skip in zip(described, dropped, strict=True)]


class PlaceEmbedding(PageEmbedding):
    """Waves along the tokens of the picture, and others along the pictures of the row."""

    kind = TEXT_ONLY
    size = 2 * (PLACE_WAVES + NUMBER_WAVES)

    def of_pictures(self, features: Sequence[Tensor], states: Any) -> list[Tensor | None]:
        """See `PageEmbedding.of_pictures`."""
        made: list[Tensor | None] = []
        for feature in features:
            place = (torch.arange(len(feature), device=feature.device) + 0.5) / len(feature)
            made.append(_waves(place, PLACE_WAVES))
        return made

    def finished(self, means: Tensor, number: int) -> Tensor:
        """See `PageEmbedding.finished`."""
        code = _waves(means.new_tensor([int(number) / 2**NUMBER_WAVES]), NUMBER_WAVES)
        return torch.cat([means, code.expand(len(means), -1)], dim=-1)


class MeanKeyEmbedding(PageEmbedding):
    """Mean keys of D dimensions, positions and all, from the bases of the pages."""

    kind = MEAN_KEY
    needs_pictures = False

    def __init__(self, head_dim: int) -> None:
        self.size = head_dim

    def of_pages(self, pages: Pages) -> tuple[Tensor, Tensor]:
        """See `PageEmbedding.of_pages`; every page of a picture has one."""
        is_there = pages.index < pages.counts[:, None]
        return pages.basis.centroid.float() * pages.basis.centroid_scale[..., None], is_there & (pages.tags >= 0)


def _waves(place: Tensor, count: int) -> Tensor:
    """`[n]` in [0, 1] -> `[n, 2 * count]`: sine and cosine of half a turn, a whole one, two, four, ..."""
    angles = math.pi * place[:, None] * 2.0 ** torch.arange(count, device=place.device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
