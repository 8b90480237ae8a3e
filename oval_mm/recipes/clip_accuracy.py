"""How well a CLIP matches images, and parts of images, that it was not trained on to words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from oval_mm.recipes.clip_batches import area_of, single_object
from oval_mm.recipes.clip_captions import GLYPHS, NAMES, PLACES, Description, is_true, look_of
from oval_mm.recipes.scenes import SPLITS, SceneObject, caption, make_scene, paint
from oval_mm.recipes.tiny_clip import ClipSizes, as_bytes, as_pixels, image_embeddings, make_tokenizer, word_embeddings

IMAGES_AT_ONCE = 64


@dataclass(frozen=True)
class ClipAccuracy:
    """Shares of right answers, 0 to 1.

    `retrieval`: which of as many captions as images belongs to a scene, and the reverse. `zero_shot`: which of 56
    coloured shapes is alone in an image. `name`, `glyph`, `place`: which of 56 coloured shapes an object of a scene is,
    which of 23 glyphs it carries and at which of 9 places it is, judged by nothing but the embedding of one of its
    patches; the mean over its patches.
    """

    retrieval: float
    zero_shot: float
    name: float
    glyph: float
    place: float

    def __str__(self) -> str:
        return (
            f"retrieval {self.retrieval:.1%}, zero-shot {self.zero_shot:.1%}, "
            f"patches: name {self.name:.1%}, glyph {self.glyph:.1%}, place {self.place:.1%}"
        )


class HeldOut:
    """So many whole scenes, and as many with one object, from the validation split; drawn once."""

    def __init__(self, sizes: ClipSizes, count: int) -> None:
        seeds = SPLITS["validation"][: 2 * count]
        scenes = [make_scene(seed, sizes.image_px) for seed in seeds[:count]]
        singles = [single_object(seed, sizes.image_px) for seed in seeds[count:]]
        self.scenes, self.singles = (as_bytes([paint(scene) for scene in some]) for some in (scenes, singles))
        self.captions = [caption(scene) for scene in scenes]
        self.alone = [thing for scene in singles for thing in scene.objects]
        self.parts = [
            (index, thing, torch.from_numpy(area_of(thing.box, sizes) > 0))
            for index, scene in enumerate(scenes)
            for thing in scene.objects
        ]
        self.tokenizer = make_tokenizer()

    @torch.no_grad()
    def measure(self, model: Any) -> ClipAccuracy:
        """The accuracy of a model, on its device."""
        (whole, patches), (alone, _) = (_embedded(model, images) for images in (self.scenes, self.singles))
        of_names = self._words(model, [one.words for one in NAMES])
        seen = torch.cat([patches[index, mine] for index, _, mine in self.parts])
        things = [thing for _, thing, mine in self.parts for _ in range(int(mine.sum()))]
        name, glyph, place = (
            _share_right(seen, self._words(model, [one.words for one in some]), _labels(things, some))
            for some in (NAMES, GLYPHS, PLACES)
        )
        return ClipAccuracy(
            retrieval=_retrieval(whole, self._words(model, self.captions)),
            zero_shot=_share_right(alone, of_names, _labels(self.alone, NAMES)),
            name=name,
            glyph=glyph,
            place=place,
        )

    def _words(self, model: Any, words: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(list(words), padding=True, return_tensors="pt").input_ids
        return word_embeddings(model, tokens.to(model.logit_scale.device)).float().cpu()


def _embedded(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """float32 `[B, J]` and `[B, P, J]` on the CPU: images and their patches."""
    device = model.logit_scale.device
    pieces = [image_embeddings(model, as_pixels(piece.to(device))) for piece in images.split(IMAGES_AT_ONCE)]
    whole, patches = (torch.cat(some).float().cpu() for some in zip(*pieces, strict=True))
    return whole, patches


def _labels(things: Sequence[SceneObject], classes: Sequence[Description]) -> Tensor:
    """int64 `[L]`: which of the classes each object is of, -1 where it is of none."""
    truth = torch.from_numpy(is_true([one.said for one in classes], [look_of(thing) for thing in things]))
    return torch.where(truth.any(1), truth.int().argmax(1), -1)


def _share_right(seen: Tensor, classes: Tensor, labels: Tensor) -> float:
    chosen = (seen @ normalize(classes, dim=-1).T).argmax(1)
    return (chosen == labels)[labels >= 0].float().mean().item()


def _retrieval(seen: Tensor, said: Tensor) -> float:
    similarity = normalize(seen, dim=-1) @ normalize(said, dim=-1).T
    own = torch.arange(len(similarity))
    return torch.cat([similarity.argmax(dim) == own for dim in (0, 1)]).float().mean().item()
