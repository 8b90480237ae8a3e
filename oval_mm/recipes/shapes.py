"""How the objects of a synthetic scene look: outlines, colours, and glyphs large enough to be read."""

from __future__ import annotations

import functools
import math

from PIL import ImageDraw, ImageFont

Point = tuple[float, float]
RGB = tuple[int, int, int]
Box = tuple[int, int, int, int]

COLOURS: dict[str, RGB] = {
    "red": (215, 25, 30),
    "green": (25, 150, 50),
    "blue": (35, 70, 225),
    "yellow": (250, 210, 0),
    "purple": (130, 30, 165),
    "orange": (255, 125, 0),
    "pink": (255, 135, 200),
    "black": (20, 20, 20),
}
DIGITS = "0123456789"
# No letter that passes for a digit or for another letter (B, I, O, S, V, Z, ...), none wider than high, and no A: lower
# case it would be the article.
LETTERS = "CEFHKLNPRTUXY"
WHITE, BLACK = (255, 255, 255), (0, 0, 0)
DARK_COLOURS = ("red", "green", "blue", "purple", "black")
CAP_HEIGHT = 0.7  # of the font's nominal size
STROKE = 0.03  # of the font's nominal size, on either side of every line


def _stretched(points: list[Point]) -> tuple[Point, ...]:
    """The points, scaled so that they touch all four sides of the unit square."""
    (left, right), (top, bottom) = ((min(axis), max(axis)) for axis in zip(*points, strict=True))
    return tuple(((x - left) / (right - left), (y - top) / (bottom - top)) for x, y in points)


def _around(count: int, *radii: float) -> tuple[Point, ...]:
    """`count` points on rays at equal angles, the first one at the top; the radii take turns."""
    rays = [(2 * math.pi * i / count, radii[i % len(radii)]) for i in range(count)]
    return _stretched([(radius * math.sin(angle), -radius * math.cos(angle)) for angle, radius in rays])


def _heart(count: int) -> tuple[Point, ...]:
    """The usual parametric heart curve."""
    turns = [2 * math.pi * i / count for i in range(count)]
    height = [13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) for t in turns]
    return _stretched([(16 * math.sin(t) ** 3, -y) for t, y in zip(turns, height, strict=True)])


def _cross(arm: float) -> tuple[Point, ...]:
    """A plus sign whose arms are `arm` wide."""
    a, b = (1 - arm) / 2, (1 + arm) / 2
    upper = ((0, b), (0, a), (a, a), (a, 0), (b, 0), (b, a))
    return (*upper, *((1 - x, 1 - y) for x, y in upper))


OUTLINES: dict[str, tuple[Point, ...]] = {
    "circle": _around(64, 1.0),
    "square": ((0, 0), (1, 0), (1, 1), (0, 1)),
    "triangle": ((0.5, 0), (1, 1), (0, 1)),
    "star": _around(10, 1.0, 0.55),
    "cross": _cross(0.5),
    "diamond": _around(4, 1.0),
    "heart": _heart(64),
}
SHAPES = tuple(OUTLINES)
GLYPH_HEIGHT = 0.3  # of the shape's height


def ink(colour: str) -> RGB:
    """The colour of a glyph on a shape of this colour: white or black, whichever can be read."""
    return WHITE if colour in DARK_COLOURS else BLACK


def paint_shape(draw: ImageDraw.ImageDraw, shape: str, colour: str, box: Box) -> None:
    """Fill a shape so that it touches all four sides of `box` (right and bottom exclusive) and stays inside."""
    x0, y0, x1, y1 = box
    corners = [(x0 + x * (x1 - 1 - x0), y0 + y * (y1 - 1 - y0)) for x, y in OUTLINES[shape]]
    draw.polygon(corners, fill=COLOURS[colour])


def paint_glyph(draw: ImageDraw.ImageDraw, glyph: str, colour: str, box: Box) -> None:
    """Write a digit or capital letter on the middle of a shape that `paint_shape` painted."""
    x0, y0, x1, y1 = box
    size = round(GLYPH_HEIGHT * (y1 - y0) / CAP_HEIGHT)
    font, stroke = _font(size), round(STROKE * size)
    left, top, right, bottom = font.getbbox(glyph, stroke_width=stroke)
    corner = ((x0 + x1 - left - right) / 2, (y0 + y1 - top - bottom) / 2)
    draw.text(corner, glyph, font=font, fill=ink(colour), stroke_width=stroke)


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)
