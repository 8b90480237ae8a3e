"""Which tokens of each forward pass show which picture, from what the model is given.

`generate` encodes all pictures first and gives `forward` the features; it may repeat rows (beams, several answers; the
features with them) and cut the prompt into chunks. A plain `forward` gets the pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from oval_mm.image_spans import ImageSpan, Picture, find_spans
from oval_mm.models import Family

logger = logging.get_logger(__name__)

PICTURE, EMBEDDING = "oval_picture", "oval_embedding"  # attributes of features: which picture they are, what it shows
Embeddings = Sequence[Tensor | None]


@dataclass(frozen=True)
class Found:
    """Pictures that a forward pass has begun or gone on to read.

    Args:
        spans: of each row, from the start of the prompt that the pass belongs to.
        start: tokens that the cache held before that prompt.
        fresh: tokens that the cache held before the pass; spans that begin earlier are known.
        embeddings: of all pictures, row after row, see `PromptReader`; those that miss at the end are not known.
    """

    spans: Sequence[Sequence[ImageSpan]]
    start: int
    fresh: int
    embeddings: Embeddings = ()


@dataclass
class _Begun:
    """A prompt whose pictures are encoded, into so many features, and what has been read of it."""

    pictures: list[Picture]
    features: int
    embeddings: Embeddings = ()
    start: int = 0
    ids: list[Tensor] = field(default_factory=list)
    masks: list[Tensor] = field(default_factory=list)

    def goes_on_with(self, past: int, ids: Tensor) -> bool:
        """Whether tokens `[B, T]` that follow `past` others can be of this prompt."""
        read = sum(chunk.shape[1] for chunk in self.ids)
        return not self.ids or (past == self.start + read and len(ids) == len(self.ids[0]))

    def add(self, past: int, ids: Tensor, mask: Tensor | None) -> None:
        """Tokens `[B, T]` follow `past` others."""
        if not self.ids:
            self.start = past
        self.ids.append(ids)
        self.masks.append(torch.ones_like(ids) if mask is None else mask.to(ids))

    def read(self) -> tuple[Tensor, Tensor, bool]:
        """All tokens `[B, T]` so far, their mask, and whether the rows are alike."""
        ids, mask = torch.cat(self.ids, 1), torch.cat(self.masks, 1)
        return ids, mask, bool((ids == ids[:1]).all() and (mask == mask[:1]).all())

    def is_over(self, image_token_id: int) -> bool:
        """Whether every feature has had its token."""
        ids, _, is_alike = self.read()
        return int((ids[:1] if is_alike else ids).eq(image_token_id).sum()) >= self.features


class PromptReader:
    """Finds the pictures of each forward pass of one model.

    Args:
        family: of the model.
        embed: makes the embeddings that pictures get from their features and from the states of the vision tower, see
            `PageEmbedding.of_pictures`; None: they get none.
    """

    def __init__(
        self, family: Family, embed: Callable[[Sequence[Tensor], Any], list[Tensor | None]] | None = None
    ) -> None:
        self.family, self._embed = family, embed
        self._begun: _Begun | None = None

    def encoded(self, arguments: Mapping[str, Any], output: Any) -> None:
        """Note what `get_image_features(**arguments)` has made: which features are which picture."""
        features = getattr(output, "pooler_output", None)
        if features is None or not self._are_given(arguments):
            return
        pictures = self.family.encoded(arguments)
        embeddings = self._embed(features, output.get("last_hidden_state")) if self._embed else [None] * len(features)
        for feature, picture in zip(features, pictures, strict=False):
            setattr(feature, PICTURE, picture)
        for feature, embedding in zip(features, embeddings, strict=True):
            setattr(feature, EMBEDDING, embedding)
        self._begun = _Begun(pictures, sum(len(feature) for feature in features), embeddings)

    def read(self, arguments: Mapping[str, Any], past_tokens: int) -> Found | None:
        """The pictures in the tokens of a forward pass, None if there are none.

        Args:
            arguments: of `forward`.
            past_tokens: that the cache holds.

        Raises:
            ValueError: the image tokens are not those of the pictures, or it cannot be told whose they are.
        """
        ids, image = arguments.get("input_ids"), _encoded_images(arguments)
        if ids is None:
            _check_embeds(arguments, image)
            return None
        mask = _recent(arguments.get("attention_mask"), ids.shape[1])
        # a chunk's features are cut out of those of the whole prompt, and come alone
        is_cut = image is not None and getattr(image, "last_hidden_state", image) is None
        has_images = image is not None or arguments.get("pixel_values") is not None
        begun, self._begun = self._begun, None
        if begun is not None and (is_cut or not has_images) and begun.goes_on_with(past_tokens, ids):
            begun.add(past_tokens, ids, mask)
            self._begun = begun if has_images or not begun.is_over(self.family.image_token_id) else None
            return self._read_chunk(begun, past_tokens) if has_images else None
        if image is None and not (has_images and self._are_given(arguments)):
            return None
        pictures = self.family.encoded(arguments) if image is None else self._pictures(image)
        features = getattr(image, "pooler_output", image)
        embeddings = [] if image is None else [getattr(feature, EMBEDDING, None) for feature in features]
        return Found(self._spans(ids, mask, pictures), past_tokens, past_tokens, embeddings)

    def passed(self, found: Found | None) -> Found | None:
        """A forward pass has ended; if it encoded pictures itself, it has read them as well: `found`, completed."""
        begun = self._begun
        if begun is None or begun.ids:
            return found
        self._begun = None
        return found if found is None or found.embeddings else replace(found, embeddings=begun.embeddings)

    def _are_given(self, arguments: Mapping[str, Any]) -> bool:
        """Whether what decides about the image tokens is there; if not, the model itself will complain."""
        return all(arguments.get(name) is not None for name in self.family.needs)

    def _pictures(self, image: Any) -> list[Picture]:
        """Which pictures these features are."""
        features = getattr(image, "pooler_output", image)
        return [getattr(feature, PICTURE, None) or self.family.counted(len(feature)) for feature in features]

    def _spans(
        self, ids: Tensor, mask: Tensor | None, pictures: Picture | Sequence[Picture], goes_on: bool = False
    ) -> list[list[ImageSpan]]:
        family = self.family
        if not isinstance(pictures, Picture):
            pictures = family.in_prompt(ids, pictures)
        return find_spans(ids, family.image_token_id, pictures, mask, family.settings, goes_on)

    def _read_chunk(self, begun: _Begun, past_tokens: int) -> Found:
        """The pictures of a prompt that comes in chunks, as far as it has been read."""
        (ids, mask, is_alike), pictures = begun.read(), begun.pictures
        if is_alike:
            spans = self._spans(ids[:1], mask[:1], pictures, goes_on=True) * len(ids)
        elif len(set(pictures)) <= 1:  # every picture is like the next, or the prompt tells
            spans = self._spans(ids, mask, pictures[0] if pictures else pictures, goes_on=True)
        else:
            raise ValueError(
                "prefill_chunk_size: while a prompt is not read to its end, it cannot be told which of its pictures, "
                "which differ in size, are whose row's; generate row by row or without prefill_chunk_size"
            )
        embeddings = begun.embeddings if len(ids) == 1 else []  # of several rows it is not known yet which has which
        return Found(spans, begun.start, past_tokens, embeddings)


def _encoded_images(arguments: Mapping[str, Any]) -> Any:
    """What `get_image_features` made, if it was called before `forward`."""
    outputs = arguments.get("mm_encoder_outputs")
    return outputs.get("image") if isinstance(outputs, dict) else outputs


def _check_embeds(arguments: Mapping[str, Any], image: Any) -> None:
    """A pass with `inputs_embeds`: no picture can be seen in it."""
    if image is not None or arguments.get("pixel_values") is not None:
        raise ValueError("images came with inputs_embeds, which do not tell where they are: give input_ids instead")
    logger.warning_once("inputs_embeds were given without input_ids: images in them share pages with text")


def _recent(mask: Any, tokens: int) -> Tensor | None:
    """The part of a mask `[B, past + T]` that is about the newest T tokens; None for other masks."""
    return mask[:, -tokens:] if isinstance(mask, Tensor) and mask.dim() == 2 else None
