"""Questions about a synthetic scene, with short answers from a closed vocabulary and the place where the answer is.

Spelt as in easy-vqa ("color"), so that both data sets share their words.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from PIL import Image

from oval_mm.recipes.scenes import SPLITS, Scene, SceneObject, draw_scene, glyph_in_words, with_article
from oval_mm.recipes.shapes import COLOURS, DIGITS, LETTERS, SHAPES, Box

KINDS = ("glyph", "colour", "shape", "relation", "count", "existence")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
DIRECTIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
STRAIGHT = 0.5  # sideways offset over distance ahead: up to here something lies in a direction
ASKEW = 2.0  # and up to here a person may think that it does
CLEARLY_NEARER = 1.4

PLURALS: dict[str, str] = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
_GRAMMAR = """? a above an and are below color digit how in is left letter many of right shape shapes the there
what which with yes no"""
# Every word of every question, answer and caption.
VOCABULARY: tuple[str, ...] = (
    *_GRAMMAR.split(),
    *COLOURS,
    *SHAPES,
    *PLURALS.values(),
    *NUMBERS,
    *DIGITS,
    *LETTERS.lower(),
)


@dataclass(frozen=True)
class Question:
    """`kind` is one of KINDS; `box` is where the answer can be seen, None where that is not one place."""

    question: str
    answer: str
    kind: str
    box: Box | None


@dataclass(frozen=True)
class Example:
    """An image with everything that is asked about it."""

    image: Image.Image
    scene: Scene
    questions: tuple[Question, ...]


def examples(split: str, size_px: int = 128) -> Iterator[Example]:
    """The examples of a split ("train", "validation" or "test"), each drawn when it is asked for."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}")
    for seed in SPLITS[split]:
        image, scene = draw_scene(seed, size_px)
        yield Example(image, scene, tuple(questions(scene)))


def questions(scene: Scene) -> list[Question]:
    """Everything that is asked about one scene: all located questions, some counts, as many yes as no."""
    rng = random.Random(f"questions {scene.seed}")
    return [*located_questions(scene, scene.objects), *_counts(scene, rng), *_existence(scene, rng)]


def located_questions(scene: Scene, visible: Sequence[SceneObject]) -> Iterator[Question]:
    """The questions whose answer is in one place of this scene.

    `visible` are the objects of all images shown, those of `scene` included: a question names one of them only.
    """
    seen = _word_counts(visible)
    for thing in scene.objects:
        if thing.glyph and seen[thing.name] == 1:
            sort, answer = glyph_in_words(thing.glyph).split()
            yield Question(f"which {sort} is in the {thing.name}?", answer, "glyph", thing.box)
        if thing.glyph and seen[thing.glyph] == 1:
            asked = f"what color is the shape with the {glyph_in_words(thing.glyph)}?"
            yield Question(asked, thing.colour, "colour", thing.box)
        if seen[thing.shape] == 1:
            yield Question(f"what color is the {thing.shape}?", thing.colour, "colour", thing.box)
        if seen[thing.colour] == 1:
            yield Question(f"what is the {thing.colour} shape?", thing.shape, "shape", thing.box)
        if seen[thing.name] == 1:
            yield from _relations(scene, thing, thing.shape if seen[thing.shape] == 1 else thing.name)


def _word_counts(things: Sequence[SceneObject]) -> Counter[str | None]:
    """How many things have a colour, a shape, a name or a glyph."""
    return Counter(word for thing in things for word in (thing.colour, thing.shape, thing.name, thing.glyph))


def _relations(scene: Scene, anchor: SceneObject, name: str) -> Iterator[Question]:
    for direction, step in DIRECTIONS.items():
        neighbour = _neighbour(scene, anchor, step)
        if neighbour:
            yield Question(f"what is {direction} the {name}?", neighbour.name, "relation", neighbour.box)


def _neighbour(scene: Scene, anchor: SceneObject, step: tuple[int, int]) -> SceneObject | None:
    """The nearest object in a direction, None where there is none or where another one could be meant."""
    found: list[tuple[float, float, SceneObject]] = []
    for other in scene.objects:
        dx, dy = other.centre[0] - anchor.centre[0], other.centre[1] - anchor.centre[1]
        ahead, aside = dx * step[0] + dy * step[1], abs(dx * step[1]) + abs(dy * step[0])
        if ahead > 0 and aside <= ASKEW * ahead:
            found.append(((dx**2 + dy**2) ** 0.5, aside / ahead, other))
    found.sort(key=lambda entry: entry[0])
    if not found or found[0][1] > STRAIGHT:
        return None
    if len(found) > 1 and found[1][0] < CLEARLY_NEARER * found[0][0]:
        return None
    return found[0][2]


def _counts(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """One question for every number of things of one shape or colour, and how many there are in all."""
    seen = _word_counts(scene.objects)
    numbers = {plural: seen[shape] for shape, plural in PLURALS.items()}
    numbers |= {f"{colour} shapes": seen[colour] for colour in COLOURS}
    different = sorted(set(numbers.values()), reverse=True)
    asked = [rng.choice([words for words in numbers if numbers[words] == number]) for number in different]
    numbers["shapes"] = len(scene.objects)
    for words in (*asked, "shapes"):
        yield Question(f"how many {words} are there?", NUMBERS[numbers[words]], "count", None)


def _existence(scene: Scene, rng: random.Random) -> Iterator[Question]:
    """One yes and one no for a shape, for a colour, and for both."""
    thing = rng.choice(scene.objects)
    seen = _word_counts(scene.objects)
    yield _is_there(thing.shape, "yes", thing if seen[thing.shape] == 1 else None)
    yield _is_there(rng.choice([shape for shape in SHAPES if not seen[shape]]), "no")
    yield _is_there(f"{thing.colour} shape", "yes", thing if seen[thing.colour] == 1 else None)
    yield _is_there(f"{rng.choice([colour for colour in COLOURS if not seen[colour]])} shape", "no")
    yield _is_there(thing.name, "yes", thing)
    yield _is_there(rng.choice(_near_misses(scene)), "no")


def _near_misses(scene: Scene) -> list[str]:
    """Absent objects that differ from a present one in colour or in shape, but not in both."""
    seen = _word_counts(scene.objects)
    pairs = [pair for pair in itertools.product(COLOURS, SHAPES) if seen[pair[0]] or seen[pair[1]]]
    return [name for name in map(" ".join, pairs) if not seen[name]]


def _is_there(words: str, answer: str, where: SceneObject | None = None) -> Question:
    return Question(f"is there {with_article(words)}?", answer, "existence", where.box if where else None)
