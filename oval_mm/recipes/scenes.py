"""Synthetic scenes: a few coloured shapes, some with a digit or letter, in the regions of an image, a little shifted.

A glyph fills one cell of a grid and looks the same in every cell, so a small model whose patches are these cells can
learn to read it. What can be asked about a scene lies in one place, so that it matters which parts of the image a model
reads.

`python -m oval_mm.recipes.scenes --out DIR --count N` writes some to look at.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from oval_mm.recipes.shapes import COLOURS, DIGITS, LETTERS, SHAPES, Box, paint_glyph, paint_shape

SPLITS: dict[str, range] = {
    "train": range(8_000_000),
    "validation": range(8_000_000, 9_000_000),
    "test": range(9_000_000, 10_000_000),
}
CELLS = 16  # a scene is laid out on a grid of 16 x 16 cells, whatever its size in pixels
REGION = 5  # cells along a side of a region, in which there is one object or none
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
SIDE = 3  # cells along a side of an object; a glyph is in the one in the middle
GLYPH_SHARE = 0.6  # of the objects
SMALLEST_PX = 64
OVERSAMPLING = 4


@dataclass(frozen=True)
class SceneObject:
    """One shape.

    `glyph` is a digit, a capital letter or None; `region` its column and row, 0 to 2; `box` is (x0, y0, x1, y1), x1 and
    y1 exclusive.
    """

    shape: str
    colour: str
    glyph: str | None
    region: tuple[int, int]
    box: Box

    @property
    def name(self) -> str:
        """Colour and shape: no other object of the scene has both."""
        return f"{self.colour} {self.shape}"

    @property
    def glyph_box(self) -> Box:
        """Where a glyph is, or would be: the middle third of the box."""
        x0, y0, x1, y1 = self.box
        wide, high = (x1 - x0) // 3, (y1 - y0) // 3
        return x0 + wide, y0 + high, x1 - wide, y1 - high

    @property
    def place(self) -> str:
        """The region in words: 'top left'."""
        column, row = self.region
        return f"{ROWS[row]} {COLUMNS[column]}"


@dataclass(frozen=True)
class Scene:
    """What is to be seen; `paint` makes the image. The same seed gives the same scene at every size."""

    seed: int
    size_px: int
    objects: tuple[SceneObject, ...]


def draw_scene(seed: int, size_px: int = 256) -> tuple[Image.Image, Scene]:
    """An RGB image of `size_px` x `size_px` pixels and its description.

    Raises:
        ValueError: the image would be too small to tell shapes apart.
    """
    scene = make_scene(seed, size_px)
    return paint(scene), scene


def make_scene(seed: int, size_px: int = 256) -> Scene:
    """The description that `draw_scene` gives, without drawing."""
    if size_px < SMALLEST_PX:
        raise ValueError(f"size_px must be at least {SMALLEST_PX}, so that shapes can be told apart, got {size_px}")
    rng = random.Random(f"scene {seed}")
    looks = _choose_looks(rng)
    regions = rng.sample([*itertools.product(range(len(COLUMNS)), range(len(ROWS)))], len(looks))
    shift = [rng.randint(0, CELLS % REGION) for _ in range(2)]  # of all regions together
    objects = []
    for look, region in zip(looks, regions, strict=True):
        # Where a region ends, one cell stays free between its object and the next.
        x, y = (REGION * i + off + rng.randint(0, REGION - 1 - SIDE) for i, off in zip(region, shift, strict=True))
        objects.append(SceneObject(*look, region, _scaled((x, y, x + SIDE, y + SIDE), size_px)))
    return Scene(seed, size_px, tuple(objects))


def paint(scene: Scene) -> Image.Image:
    """Draw a scene, RGB. Outside the objects' boxes there is nothing but the background."""
    shape = (scene.size_px, scene.size_px)
    image = _background(random.Random(f"background {scene.seed}")).resize(shape, Image.Resampling.BICUBIC)
    for thing in scene.objects:
        image.paste(_painted(thing, image.crop(thing.box)), thing.box)
    return image


def _painted(thing: SceneObject, background: Image.Image) -> Image.Image:
    """The content of an object's box, with smooth edges."""
    width, height = background.width * OVERSAMPLING, background.height * OVERSAMPLING
    canvas = background.resize((width, height), Image.Resampling.NEAREST)
    draw = ImageDraw.Draw(canvas)
    paint_shape(draw, thing.shape, thing.colour, (0, 0, width, height))
    if thing.glyph:
        paint_glyph(draw, thing.glyph, thing.colour, (0, 0, width, height))
    return canvas.reduce(OVERSAMPLING)


def split_of(seed: int) -> str:
    """The split that a seed belongs to. Raises ValueError where it belongs to none."""
    for name, seeds in SPLITS.items():
        if seed in seeds:
            return name
    raise ValueError(f"seed must lie in one of the splits {SPLITS}, got {seed}")


def caption(scene: Scene) -> str:
    """All objects of a scene in words: 'a red circle with the digit 7 and a blue star'."""
    return " and ".join(_described(thing) for thing in scene.objects)


def with_article(words: str) -> str:
    """'a red star', 'an orange star'."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def glyph_in_words(glyph: str) -> str:
    """'digit 7', 'letter k'."""
    return f"{'digit' if glyph in DIGITS else 'letter'} {glyph.lower()}"


def _described(thing: SceneObject) -> str:
    glyph = f" with the {glyph_in_words(thing.glyph)}" if thing.glyph else ""
    return with_article(thing.name) + glyph


def _choose_looks(rng: random.Random) -> list[tuple[str, str, str | None]]:
    """Shape, colour and glyph of 3-6 objects. Some scenes have few kinds, so that there is something to count."""
    shapes = rng.sample(SHAPES, rng.randint(3, len(SHAPES)))
    colours = rng.sample(list(COLOURS), rng.randint(3, len(COLOURS)))
    chosen = rng.sample(list(itertools.product(shapes, colours)), rng.randint(3, 6))
    glyphs = rng.sample(DIGITS + LETTERS, len(chosen))  # no glyph twice
    return [(*kind, glyph if rng.random() < GLYPH_SHARE else None) for kind, glyph in zip(chosen, glyphs, strict=True)]


def _scaled(box: Box, size_px: int) -> Box:
    x0, y0, x1, y1 = (round(edge * size_px / CELLS) for edge in box)
    return x0, y0, x1, y1


def _background(rng: random.Random) -> Image.Image:
    """A few pale pixels; enlarged, they are a plain tint or soft clouds."""
    tint = [rng.randint(226, 250) for _ in range(3)]
    spread = rng.choice((0, 0, 3, 6))
    cells = rng.choice((6, 12, 24))
    levels = [max(0, min(255, channel + rng.randint(-spread, spread))) for _ in range(cells**2) for channel in tint]
    return Image.frombytes("RGB", (cells, cells), bytes(levels))


if __name__ == "__main__":
    from oval_mm.recipes.scene_samples import main

    main()
