"""Synthetic scenes: a few coloured shapes, some with a digit or letter, at random places of a grid.

A glyph looks the same wherever it is, so a small model whose patches are the grid's cells can learn to read it. What
can be asked about a scene lies in one place, so that it matters which parts of the image a model reads.

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
SIDES, SIDES_WITH_GLYPH = (3, 4), (4,)  # cells of an object
GAP = 1  # cells between two objects
GLYPH_SHARE = 0.6  # of the objects
SMALLEST_PX = 64
OVERSAMPLING = 4


@dataclass(frozen=True)
class SceneObject:
    """One shape. `glyph` is a digit, a capital letter or None; `box` is (x0, y0, x1, y1), x1 and y1 exclusive."""

    shape: str
    colour: str
    glyph: str | None
    box: Box

    @property
    def name(self) -> str:
        """Colour and shape: no other object of the scene has both."""
        return f"{self.colour} {self.shape}"

    @property
    def centre(self) -> tuple[float, float]:
        """The middle of the box, in pixels."""
        x0, y0, x1, y1 = self.box
        return (x0 + x1) / 2, (y0 + y1) / 2


@dataclass(frozen=True)
class Scene:
    """What is to be seen; `paint` makes the image. The same seed gives the same scene at every size."""

    seed: int
    size_px: int
    objects: tuple[SceneObject, ...]


def draw_scene(seed: int, size_px: int = 128) -> tuple[Image.Image, Scene]:
    """An RGB image of `size_px` x `size_px` pixels and its description.

    Raises:
        ValueError: the image would be too small for glyphs to be read.
    """
    scene = make_scene(seed, size_px)
    return paint(scene), scene


def make_scene(seed: int, size_px: int = 128) -> Scene:
    """The description that `draw_scene` gives, without drawing."""
    if size_px < SMALLEST_PX:
        raise ValueError(f"size_px must be at least {SMALLEST_PX}, so that glyphs can be read, got {size_px}")
    rng = random.Random(f"scene {seed}")
    looks = _choose_looks(rng)
    places = None
    while places is None:
        places = _choose_places(rng, [SIDES_WITH_GLYPH if glyph else SIDES for *_, glyph in looks])
    boxes = [_scaled(place, size_px) for place in places]
    objects = [SceneObject(*look, box) for look, box in zip(looks, boxes, strict=True)]
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
        paint_glyph(draw, thing.glyph, thing.shape, thing.colour, (0, 0, width, height))
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


def _choose_places(rng: random.Random, sides: list[tuple[int, ...]]) -> list[Box] | None:
    """A box in cells for every object, or None where the last ones found no room."""
    places: list[Box] = []
    for possible in sides:
        for _ in range(60):
            side = rng.choice(possible)
            x, y = (rng.randint(0, CELLS - side) for _ in range(2))
            if not any(_too_near((x, y, x + side, y + side), other) for other in places):
                places.append((x, y, x + side, y + side))
                break
        else:
            return None
    return places


def _too_near(one: Box, other: Box) -> bool:
    apart = one[2] + GAP <= other[0] or other[2] + GAP <= one[0] or one[3] + GAP <= other[1] or other[3] + GAP <= one[1]
    return not apart


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
