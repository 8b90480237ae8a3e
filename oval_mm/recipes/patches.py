"""The patches of an image: how many there are, what words say of them, and which are shown."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oval_mm.recipes.scenes import CELLS, COLUMNS, REGION, ROWS, Scene, SceneObject
from oval_mm.recipes.tiny_llava import NOTHING

SYMBOL_WORDS = 5  # of a patch, at most: what its object is, in three words, and where, in two


def image_tokens(processor: Any) -> int:
    """How many tokens a `LlavaProcessor` gives one image."""
    dropped: bool = processor.vision_feature_select_strategy == "default"
    extra: int = processor.num_additional_image_tokens
    return patches_a_side(processor) ** 2 + extra - dropped


def patches_a_side(processor: Any) -> int:
    """How many patches a `LlavaProcessor` has along one side of an image."""
    side: int = processor.image_processor.crop_size["height"] // processor.patch_size
    return side


def symbols_of(pictures: Sequence[Scene | Path], processor: Any) -> Tensor:
    """int64 `[images, image tokens, 5]`: what words say of every patch; padded with -1.

    An object's patch is its colour, shape and glyph, any other one is NOTHING; both are at a place. The class token, if
    there is one, is NOTHING without a place.

    Raises:
        ValueError: an image is no scene.
    """
    side = patches_a_side(processor)
    rows = []
    for picture in pictures:
        if not isinstance(picture, Scene):
            raise ValueError(f"symbols can only stand for scenes, got {picture}")
        words = [[NOTHING]] * (image_tokens(processor) - side**2) + list(_patch_words(picture, side))
        ids = [processor.tokenizer.convert_tokens_to_ids(some) for some in words]
        rows.append(torch.tensor([some + [-1] * (SYMBOL_WORDS - len(some)) for some in ids]))
    return torch.stack(rows)


def _patch_words(scene: Scene, side: int) -> Iterator[list[str]]:
    """The words of every patch, patches in rows."""
    for y, x in itertools.product(range(side), repeat=2):
        thing = _thing_at(scene, (x + 0.5) / side * scene.size_px, (y + 0.5) / side * scene.size_px)
        if thing:
            glyph = [thing.glyph.lower()] if thing.glyph else []
            yield [thing.colour, thing.shape, *glyph, *thing.place.split()]
        else:
            row, column = (min(int((at + 0.5) / side * CELLS / REGION), len(ROWS) - 1) for at in (y, x))
            yield [NOTHING, ROWS[row], COLUMNS[column]]


def _thing_at(scene: Scene, x: float, y: float) -> SceneObject | None:
    inside = (thing for thing in scene.objects if thing.box[0] <= x < thing.box[2] and thing.box[1] <= y < thing.box[3])
    return next(inside, None)


def show_some(
    pictures: Sequence[Scene | Path], processor: Any, objects: float, background: float, rng: random.Random
) -> Tensor:
    """bool `[images, image tokens]`: a random share of the patches of each object, at least one, and of all others.

    Of images that are no scenes everything is shown, and so is the class token if there is one.
    """
    side = patches_a_side(processor)
    rows = []
    for picture in pictures:
        flags = torch.ones(side, side, dtype=torch.bool)
        if isinstance(picture, Scene):
            flags = _chosen(picture, processor.patch_size, side, objects, background, rng)
        first = torch.ones(image_tokens(processor) - side**2, dtype=torch.bool)
        rows.append(torch.cat([first, flags.flatten()]))
    return torch.stack(rows)


def _chosen(scene: Scene, patch_px: int, side: int, objects: float, background: float, rng: random.Random) -> Tensor:
    """bool `[side, side]`: which patches of a scene are shown."""
    outside = torch.tensor([[rng.random() < background for _ in range(side)] for _ in range(side)])
    inside = torch.zeros_like(outside)
    for thing in scene.objects:
        x0, y0 = (edge // patch_px for edge in thing.box[:2])
        x1, y1 = (-(-edge // patch_px) for edge in thing.box[2:])
        outside[y0:y1, x0:x1] = False
        for y, x in itertools.product(range(y0, y1), range(x0, x1)):
            inside[y, x] |= rng.random() < objects
        inside[rng.randrange(y0, y1), rng.randrange(x0, x1)] = True
    return inside | outside
