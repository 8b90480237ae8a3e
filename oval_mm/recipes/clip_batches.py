"""Batches that the tiny CLIP is trained on, each drawn when it is asked for and determined by its number."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import one_hot
from torch.utils.data import Dataset

from oval_mm.recipes.clip_captions import (
    BACKGROUND,
    Description,
    Look,
    describe,
    describe_part,
    easy_vqa_look,
    is_of_glyph,
    is_true,
    look_of,
)
from oval_mm.recipes.easy_vqa import load_easy_vqa
from oval_mm.recipes.scenes import SPLITS, Scene, SceneObject, caption, make_scene, paint
from oval_mm.recipes.shapes import Box
from oval_mm.recipes.tiny_clip import CONTEXT, ClipSizes, as_bytes, make_tokenizer

SINGLE_SHARE, EASY_VQA_SHARE = 4, 8  # one image in so many is of one object of a scene, or from easy-vqa
SHOWN_SHARE = 0.3  # of the patches: most of a scene is background, and steps are cheaper without most of that
PART_TOKENS = 10  # "a red circle with the digit 7" is 7 words, and there are a begin and an end
WHOLE: Look = (
    "scene",
    "scene",
    "scene",
    "scene",
)  # what the caption of a whole scene says: it is true of no other image


class ClipBatch(NamedTuple):
    """B images with a caption each, and R parts of them (an object's patches, or the background) with short ones.

    A part comes once for everything that is said of it: where that can be seen, or as one patch, which should know what
    it is a patch of. What is `also_true` of something without being its own caption is neither right nor wrong.
    """

    images: Tensor  # uint8 [B, 3, H, W]
    shown: Tensor  # int64 [B, K]: the patches of each image that the model gets to see, in rows
    captions: Tensor  # int64 [B, CONTEXT]
    caption_also_true: Tensor  # bool [B, B]: of image, caption
    part_images: Tensor  # int64 [R]: which image it is a part of
    part_patches: Tensor  # float32 [R, K]: how much of the part lies in which of them; sums to 1
    part_captions: Tensor  # int64 [R, PART_TOKENS]
    part_also_true: Tensor  # bool [R, R]: of part, caption


class _Part(NamedTuple):
    """What it shows, how many of its pixels lie in each patch `[P]`, and how many of its glyph's."""

    look: Look
    area: np.ndarray
    glyph_area: np.ndarray


@dataclass(frozen=True)
class _Drawn:
    """An image, what is said of it, the looks of all that is in it, and its parts: what they show and where."""

    image: Image.Image
    description: Description
    looks: tuple[Look, ...]
    parts: tuple[_Part, ...]


class ClipBatches(Dataset[ClipBatch]):
    """Batch number i of the training with this seed: whole scenes, single objects and easy-vqa images.

    Raises:
        ImportError: the package `easy-vqa` is not installed.
    """

    def __init__(self, sizes: ClipSizes, batch: int, seed: int) -> None:
        self.sizes, self.batch, self.seed = sizes, batch, seed
        self.tokenizer = make_tokenizer()
        looks = [(image.path, easy_vqa_look(image)) for image in load_easy_vqa("train")]
        self.easy_vqa = [(path, look) for path, look in looks if look]

    def __getitem__(self, step: int) -> ClipBatch:
        rng = random.Random(f"clip {self.seed} {step}")
        drawn = list(self._draw(rng))
        captions = [one.description for one in drawn]
        parts = [
            (index, part, said)
            for index, one in enumerate(drawn)
            for part in one.parts
            for said in describe_part(part.look, rng)
        ]
        part_images = torch.tensor([index for index, *_ in parts])
        part_captions = [said for *_, said in parts]
        shown = self._shown(drawn, rng)
        areas = [part.area for _, part, _ in parts]
        clear = [part.glyph_area if is_of_glyph(said) else part.area for _, part, said in parts]
        shares, clear_shares = (
            _shares(torch.from_numpy(np.stack(some)), shown[part_images]) for some in (areas, clear)
        )
        return ClipBatch(
            images=as_bytes([one.image for one in drawn]),
            shown=shown,
            captions=self._tokens(captions, CONTEXT),
            caption_also_true=_also_true(captions, [one.looks for one in drawn]),
            part_images=part_images,
            part_patches=torch.stack(
                [rng.choice(ways) for ways in zip(clear_shares, _one_patch_each(shares, rng), strict=True)]
            ),
            part_captions=self._tokens(part_captions, PART_TOKENS),
            part_also_true=_also_true(part_captions, [[part.look] for _, part, _ in parts]),
        )

    def _shown(self, drawn: Sequence[_Drawn], rng: random.Random) -> Tensor:
        """The patches of objects and, at random, of the background: as many of every image."""
        areas = [[part.area for part in one.parts if part.look != BACKGROUND] for one in drawn]
        nothing = np.zeros(self.sizes.image_tokens, np.float32)
        taken = np.stack([sum(some, start=nothing) > 0 for some in areas])
        count = max(int(taken.sum(1).max()), round(SHOWN_SHARE * self.sizes.image_tokens))
        order = taken + np.random.default_rng(rng.getrandbits(32)).random(taken.shape)
        return torch.from_numpy(np.sort(np.argsort(-order, axis=1)[:, :count]))

    def _draw(self, rng: random.Random) -> Iterator[_Drawn]:
        size_px = self.sizes.image_px
        easy, single = self.batch // EASY_VQA_SHARE, self.batch // SINGLE_SHARE
        for seed in rng.sample(SPLITS["train"], self.batch - easy - single):
            scene = make_scene(seed, size_px)
            yield _of_scene(scene, Description(caption(scene), WHOLE), [self._part(thing) for thing in scene.objects])
        for seed in rng.sample(SPLITS["train"], single):
            scene = single_object(seed, size_px)
            (thing,) = scene.objects
            part = self._part(thing)
            around = _Part(BACKGROUND, self.sizes.patch_px**2 - part.area, part.glyph_area)
            yield _of_scene(scene, describe(part.look, rng), [part, around])
        for path, look in rng.sample(self.easy_vqa, easy):
            yield _Drawn(open_rgb(path, size_px), describe(look, rng), (look,), ())

    def _part(self, thing: SceneObject) -> _Part:
        return _Part(look_of(thing), area_of(thing.box, self.sizes), area_of(thing.glyph_box, self.sizes))

    def _tokens(self, descriptions: Sequence[Description], length: int) -> Tensor:
        words = [description.words for description in descriptions]
        tokens: Tensor = self.tokenizer(words, padding="max_length", max_length=length, return_tensors="pt").input_ids
        return tokens


def single_object(seed: int, size_px: int) -> Scene:
    """One object of a scene, alone in its place on the same background."""
    scene = make_scene(seed, size_px)
    return dataclasses.replace(scene, objects=(random.Random(f"single {seed}").choice(scene.objects),))


def open_rgb(path: Path, size_px: int) -> Image.Image:
    """An image file as the model sees it, `size_px` wide and high."""
    with Image.open(path) as image:
        return image.convert("RGB").resize((size_px, size_px), Image.Resampling.BICUBIC)


def area_of(box: Box, sizes: ClipSizes) -> np.ndarray:
    """float32 `[P]`: how many pixels of a box lie in each patch, patches in rows."""
    starts = np.arange(sizes.side) * sizes.patch_px
    x0, y0, x1, y1 = box
    wide, high = (
        np.clip(np.minimum(starts + sizes.patch_px, stop) - np.maximum(starts, start), 0, None)
        for start, stop in ((x0, x1), (y0, y1))
    )
    return np.outer(high, wide).ravel().astype(np.float32)


def _one_patch_each(shares: Tensor, rng: random.Random) -> Tensor:
    """float32 `[R, K]`: one patch of every part, drawn by its share of it."""
    chosen = [rng.choices(range(shares.shape[1]), row)[0] for row in shares.tolist()]
    return one_hot(torch.tensor(chosen), shares.shape[1]).float()


def _shares(area: Tensor, shown: Tensor) -> Tensor:
    """float32 `[R, K]`: how much of a part of `area [R, P]` lies in each of the patches `shown [R, K]`."""
    seen = area.gather(1, shown)
    return seen / seen.sum(1, keepdim=True)


def _of_scene(scene: Scene, description: Description, parts: Sequence[_Part]) -> _Drawn:
    return _Drawn(paint(scene), description, tuple(look_of(thing) for thing in scene.objects), tuple(parts))


def _also_true(said: Sequence[Description], looks: Sequence[Sequence[Look]]) -> Tensor:
    """bool `[N, N]`: of which things, one of whose looks fits, a description is true that is not their own."""
    claims = [description.said for description in said]
    truth = torch.from_numpy(np.stack([is_true(claims, some).any(0) for some in looks]))
    return truth.fill_diagonal_(False)
