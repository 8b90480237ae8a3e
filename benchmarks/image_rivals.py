"""What one could do in place of choosing pages at every step: evict image tokens once, or make the images smaller."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import DynamicCache

from benchmarks.image_questions import ImageBatch, Rows
from benchmarks.image_readers import Outcome, Reader, prefill, rows_of
from oval_mm.recipes.question_packing import IGNORED


class EvictingReader(Reader):
    """Keeps, as FastV does, the image tokens that get most attention from the last token of the first question.

    That token looks at everything, its attention is averaged over layers and heads. What is not kept is then gone: from
    all layers, for the first question, its answer and all later turns. Positions are kept.
    """

    def fill(self, batch: ImageBatch) -> Any:
        """See `Reader.fill`; also which tokens of the prefix are of images."""
        return super().fill(batch), batch.prefix[0] == self.model.config.image_token_id

    @torch.inference_mode()
    def read(self, filled: Any, rows: Rows, share: float) -> Outcome:
        """See `Reader.read`."""
        full, is_image = filled
        attention = self._attention(rows_of(full, rows.packs), rows)
        kept = kept_tokens(attention, is_image, share)
        cache = _with_tokens(rows_of(full, rows.packs), kept)
        past, steps = len(is_image), torch.arange(rows.tokens.shape[1])
        positions = (past + steps).expand(len(rows.tokens), -1)
        logits = self.model(input_ids=rows.tokens, position_ids=positions, cache=cache).logits
        read, dense = (len(kept) * float((tokens + steps + 1).sum()) for tokens in (kept.shape[1], past))
        return Outcome(logits[rows.is_answer].float(), read, dense)

    def _attention(self, cache: Any, rows: Rows) -> Tensor:
        """Mean attention of each row's first question's last token: `[R, P]`, P tokens before the question."""
        past = cache.get_seq_length()
        last = (rows.wanted != IGNORED).long().argmax(1)
        with _eager(self.model):
            tokens = rows.tokens[:, : int(last.max()) + 1]
            weights = self.model(input_ids=tokens, cache=cache, output_attentions=True).attentions
        of_last = [layer[torch.arange(len(last)), :, last, :past].mean(1) for layer in weights]
        return torch.stack(of_last).mean(0)


def kept_tokens(attention: Tensor, is_image: Tensor, share: float) -> Tensor:
    """All text tokens and the share of the image tokens with the most attention, in their order: int64 `[R, n]`.

    Args:
        attention: `[R, P]`.
        is_image: bool `[P]`.
        share: in (0, 1].
    """
    images = int(is_image.sum())
    wanted = len(is_image) - images + max(1, round(share * images))
    return attention.masked_fill(~is_image, torch.inf).topk(wanted, -1).indices.sort(-1).values


class DownsamplingReader(Reader):
    """Reads everything, but of images that were made small, down to the share of their pixels, and then large again.

    The vision tower takes images of one size; one that takes smaller ones would make so many fewer tokens of them.
    """

    def fill(self, batch: ImageBatch) -> Any:
        """See `Reader.fill`; a cache a share."""
        return {share: prefill(self.model, self.processor, _downsampled(batch, share)) for share in self.shares}

    def read(self, filled: Any, rows: Rows, share: float) -> Outcome:
        """See `Reader.read`."""
        return super().read(filled[share], rows, share)


def _downsampled(batch: ImageBatch, share: float) -> ImageBatch:
    return dataclasses.replace(batch, images=[downsampled(image, share) for image in batch.images])


def downsampled(image: Image.Image, share: float) -> Image.Image:
    """The image with the detail that `share` of its pixels can hold, in its old size."""
    small = [max(1, round(side * math.sqrt(share))) for side in image.size]
    return image.resize((small[0], small[1]), Image.Resampling.BICUBIC).resize(image.size, Image.Resampling.BICUBIC)


def _with_tokens(cache: Any, kept: Tensor) -> DynamicCache:
    """A cache of the tokens `kept [R, n]`."""
    own: Any = DynamicCache()
    for index, layer in enumerate(cache.layers):
        at = kept[:, None, :, None].expand(-1, layer.keys.shape[1], -1, -1)
        pair = (states.gather(2, at.expand(-1, -1, -1, states.shape[3])) for states in (layer.keys, layer.values))
        own.update(*pair, index)
    return own


@contextmanager
def _eager(model: Any) -> Iterator[None]:
    """Attention that tells its weights."""
    before = model.config.text_config._attn_implementation
    model.set_attn_implementation({"text_config": "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config": before})
