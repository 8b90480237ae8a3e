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

from oval_mm.recipes.scenes import COLUMNS, ROWS, SPLITS, Scene, SceneObject, draw_scene, glyph_in_words, with_article
from oval_mm.recipes.shapes import COLOURS, DIGITS, LETTERS, SHAPES, Box

KINDS = ("glyph", "colour", "shape", "place", "relation", "count", "existence")
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six")
DIRECTIONS: dict[str, tuple[int, int]] = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}

PLURALS: dict[str, str] = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
_GRAMMAR = """? a above an and are at below color digit how in is letter many of shape shapes the there what which with
yes no"""
# Every word of every question, answer and caption.
VOCABULARY: tuple[str, ...] = (
    *_GRAMMAR.split(),
    *ROWS,
    *COLUMNS,
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


def examples(split: str, size_px: int = 256) -> Iterator[Example]:
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

    `visible` are the objects of all images shown, those of `scene` included: a question names one of them only. What is
    beside what is asked only where no other image is shown.
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
        if seen[thing.place] == 1:
            yield Question(f"what is at the {thing.place}?", thing.name, "place", thing.box)
        if seen[thing.name] == 1 and len(visible) == len(scene.objects):
            yield from _relations(scene, thing, thing.shape if seen[thing.shape] == 1 else thing.name)


def _word_counts(things: Sequence[SceneObject]) -> Counter[str | None]:
    """How many things have a colour, a shape, a name, a place or a glyph."""
    words = ((thing.colour, thing.shape, thing.name, thing.place, thing.glyph) for thing in things)
    return Counter(itertools.chain.from_iterable(words))


def _relations(scene: Scene, anchor: SceneObject, name: str) -> Iterator[Question]:
    """What is in the next regions: first where that is, so that each word of the answer takes one look."""
    things = {thing.region: thing for thing in scene.objects}
    for direction, (across, down) in DIRECTIONS.items():
        neighbour = things.get((anchor.region[0] + across, anchor.region[1] + down))
        if neighbour:
            yield Question(
                f"what is {direction} the {name}?", f"{neighbour.place} {neighbour.name}", "relation", neighbour.box
            )


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
