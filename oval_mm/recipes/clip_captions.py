"""What can be said of one object, from a single word to everything, and of which objects it is true."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oval_mm.recipes.easy_vqa import ImageQuestions
from oval_mm.recipes.scene_questions import VOCABULARY
from oval_mm.recipes.scenes import COLUMNS, ROWS, SceneObject, glyph_in_words, with_article
from oval_mm.recipes.shapes import COLOURS, DIGITS, LETTERS, SHAPES

EASY_VQA_COLOURS = ("red", "green", "blue", "yellow", "black", "gray", "teal", "brown")
EASY_VQA_SHAPES = ("circle", "rectangle", "triangle")
CAPTION_WORDS = (*dict.fromkeys((*VOCABULARY, *EASY_VQA_COLOURS, *EASY_VQA_SHAPES, "nothing")),)

Look = tuple[str, str, str, str]  # colour, shape, glyph and place of an object, or what is said of them
ANY = "any"  # nothing is said about this
NO_GLYPH = NO_PLACE = "none"
BACKGROUND: Look = ("nothing", "nothing", "nothing", "nothing")


@dataclass(frozen=True)
class Description:
    """`words` say of an object that it has the look `said`, ANY where they say nothing."""

    words: str
    said: Look


NOTHING = Description("nothing", BACKGROUND)
NAMES = tuple(
    Description(with_article(f"{colour} {shape}"), (colour, shape, ANY, ANY)) for colour in COLOURS for shape in SHAPES
)
GLYPHS = tuple(Description(glyph_in_words(glyph), (ANY, ANY, glyph, ANY)) for glyph in DIGITS + LETTERS)
PLACES = tuple(
    Description(f"at the {row} {column}", (ANY, ANY, ANY, f"{row} {column}")) for row in ROWS for column in COLUMNS
)
_PLACED = {place.said[-1]: place for place in PLACES}


def look_of(thing: SceneObject) -> Look:
    """Everything that can be said of an object."""
    return thing.colour, thing.shape, thing.glyph or NO_GLYPH, thing.place


def describe(look: Look, rng: random.Random) -> Description:
    """Say something true of how an object looks: colour, shape or glyph, or several; BACKGROUND is NOTHING."""
    if look == BACKGROUND:
        return NOTHING
    colour, shape, glyph, _ = look
    name = f"{colour} {shape}"
    ways = [
        ((colour, ANY, ANY, ANY), (colour, with_article(f"{colour} shape"))),
        ((ANY, shape, ANY, ANY), (shape, with_article(shape))),
        ((colour, shape, ANY, ANY), (name, with_article(name))),
    ]
    if glyph != NO_GLYPH:
        sign = glyph_in_words(glyph)
        ways += [
            _of_glyph(glyph),
            ((colour, shape, glyph, ANY), (f"{name} with the {sign}", f"{with_article(name)} with the {sign}")),
        ]
    said, wordings = rng.choice(ways)
    return Description(rng.choice(wordings), said)


def describe_part(look: Look, rng: random.Random) -> list[Description]:
    """Say one true thing of an object, one of its place, and one of its glyph, if it has one."""
    if look == BACKGROUND:
        return [NOTHING]
    colour, shape, glyph, place = look
    told = [describe((colour, shape, NO_GLYPH, place), rng), _PLACED[place]]
    if glyph != NO_GLYPH:
        said, wordings = _of_glyph(glyph)
        told.append(Description(rng.choice(wordings), said))
    return told


def _of_glyph(glyph: str) -> tuple[Look, tuple[str, str]]:
    """What is said of a glyph alone, and its wordings."""
    sign = glyph_in_words(glyph)
    return (ANY, ANY, glyph, ANY), (sign, f"a shape with the {sign}")


def is_of_glyph(description: Description) -> bool:
    """Whether it is about a glyph and nothing else."""
    colour, shape, glyph, place = description.said
    return glyph != ANY and colour == shape == place == ANY


def is_true(said: Sequence[Look], looks: Sequence[Look]) -> np.ndarray:
    """bool `[L, S]`: whether what is said in S descriptions holds of L objects."""
    claims, facts = np.array(said)[None], np.array(looks)[:, None]
    held: np.ndarray = ((claims == ANY) | (claims == facts)).all(-1)
    return held


def easy_vqa_look(image: ImageQuestions) -> Look | None:
    """The look of the one shape in an easy-vqa image, from its "what ..." questions; None where they do not say."""
    asked = [[*question.rstrip("?").split(), answer] for question, answer in image.questions if question[:4] == "what"]
    words = {word for sentence in asked for word in sentence}
    colours, shapes = words.intersection(EASY_VQA_COLOURS), words.intersection(EASY_VQA_SHAPES)
    if len(colours) != 1 or len(shapes) != 1:
        return None
    return colours.pop(), shapes.pop(), NO_GLYPH, NO_PLACE
