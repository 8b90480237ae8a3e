import functools
import itertools
import math
import re
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_mm.recipes.scene_questions import KINDS, NUMBERS, VOCABULARY, Question, examples, questions
from oval_mm.recipes.scenes import SPLITS, Scene, SceneObject, caption, make_scene
from oval_mm.recipes.shapes import COLOURS, SHAPES

SEEDS = st.integers(0, 9_999_999)
ANGLES = {"right of": 0, "below": 90, "left of": 180, "above": 270}  # y grows downwards


def matching(words: str, scene: Scene) -> list[SceneObject]:
    """The objects that a description fits: 'red circles', 'star', 'shape with the digit 7', 'top left'."""
    placed = [thing for thing in scene.objects if thing.place == words]
    if placed:
        return placed
    words, _, glyph = words.partition(" with the ")
    tokens = words.split()
    shape = next((shape for shape in SHAPES if tokens[-1] in (shape, f"{shape}s", f"{shape}es")), None)
    assert shape or tokens[-1] in ("shape", "shapes")
    found = [thing for thing in scene.objects if shape in (None, thing.shape)]
    found = [thing for thing in found if len(tokens) == 1 or thing.colour == tokens[0]]
    return [thing for thing in found if not glyph or (thing.glyph or "").lower() == glyph.split()[-1]]


def _angle_off(anchor: SceneObject, other: SceneObject, direction: str) -> float:
    """Degrees between a direction and where another object lies."""
    (x, y), (u, v) = _centre(anchor), _centre(other)
    off = math.degrees(math.atan2(v - y, u - x)) - ANGLES[direction]
    return abs((off + 180) % 360 - 180)


def the_only(words: str, scene: Scene) -> SceneObject:
    (thing,) = matching(words, scene)
    return thing


def answer_to(question: str, scene: Scene) -> tuple[str, SceneObject | None]:
    """Answer by reading the question, with the object that shows it."""
    if match := re.fullmatch(r"which (digit|letter) is in the (.+)\?", question):
        thing = the_only(match[2], scene)
        assert thing.glyph is not None
        assert thing.glyph.isdigit() == (match[1] == "digit")
        return thing.glyph.lower(), thing
    if match := re.fullmatch(r"what color is the (.+)\?", question):
        return the_only(match[1], scene).colour, the_only(match[1], scene)
    if match := re.fullmatch(r"what is the (\w+ shape)\?", question):
        return the_only(match[1], scene).shape, the_only(match[1], scene)
    if match := re.fullmatch(r"what is at the (\w+ \w+)\?", question):
        return the_only(match[1], scene).name, the_only(match[1], scene)
    if match := re.fullmatch(r"what is (left of|right of|above|below) the (.+)\?", question):
        thing = _neighbour(the_only(match[2], scene), match[1], scene)
        return f"{thing.place} {thing.colour} {thing.shape}", thing
    if match := re.fullmatch(r"how many (.+) are there\?", question):
        return NUMBERS[len(matching(match[1], scene))], None
    match = re.fullmatch(r"is there an? (.+)\?", question)
    assert match, question
    found = matching(match[1], scene)
    return ("yes" if found else "no"), found[0] if len(found) == 1 else None


def _neighbour(anchor: SceneObject, direction: str, scene: Scene) -> SceneObject:
    """The nearest one that lies straight in a direction; asserts that no other one could be meant."""
    others = [thing for thing in scene.objects if thing is not anchor and _angle_off(anchor, thing, direction) < 20]
    nearest, *rest = sorted(others, key=lambda thing: math.dist(_centre(anchor), _centre(thing)))
    for other in rest:
        assert math.dist(_centre(anchor), _centre(other)) > 1.39 * math.dist(_centre(anchor), _centre(nearest))
    return nearest


def _centre(thing: SceneObject) -> tuple[float, float]:
    x0, y0, x1, y1 = thing.box
    return (x0 + x1) / 2, (y0 + y1) / 2


@given(SEEDS)
@settings(max_examples=100)
def test_every_answer_and_its_place_is_right(seed: int) -> None:
    scene = make_scene(seed)
    asked = questions(scene)
    assert len({question.question for question in asked}) == len(asked)
    for question in asked:
        answer, thing = answer_to(question.question, scene)
        assert question.answer == answer
        assert question.box == (thing.box if thing else None)


@given(SEEDS)
@settings(max_examples=50)
def test_every_word_is_in_the_vocabulary(seed: int) -> None:
    scene = make_scene(seed)
    texts = [text for question in questions(scene) for text in (question.question, question.answer)]
    for text in (*texts, caption(scene)):
        assert set(re.findall(r"\w+|[^\w\s]", text)) <= set(VOCABULARY)
        assert text == text.lower()
    assert all(len(question.answer.split()) <= 4 for question in questions(scene))


@functools.cache
def _many() -> list[Question]:
    return [question for seed in range(400) for question in questions(make_scene(seed))]


def test_the_vocabulary_has_no_word_twice_and_none_in_vain() -> None:
    captions = [caption(make_scene(seed)) for seed in range(50)]
    texts = [f"{question.question} {question.answer}" for question in _many()]
    used = {word for text in (*texts, *captions) for word in re.findall(r"\w+|\?", text)}
    assert len(set(VOCABULARY)) == len(VOCABULARY) <= 128
    assert used == set(VOCABULARY)


def test_no_kind_of_question_can_be_guessed() -> None:
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for question in _many():
        answers[question.kind][question.answer] += 1
    assert set(answers) == set(KINDS)
    assert answers["existence"]["yes"] == answers["existence"]["no"]
    for kind, most in {
        "glyph": 0.1,
        "colour": 0.2,
        "shape": 0.25,
        "place": 0.06,
        "relation": 0.06,
        "count": 0.35,
    }.items():
        assert max(answers[kind].values()) < most * answers[kind].total()
    assert len(answers["colour"]) == len(COLOURS)
    assert len(answers["count"]) == len(NUMBERS)


def test_yes_and_no_are_balanced_for_every_form_of_the_question() -> None:
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for question in _many():
        if question.kind == "existence":
            described = question.question.split()[3:]
            forms["shape" if len(described) == 1 else "colour" if "shape?" in described else "both"][
                question.answer
            ] += 1
    assert set(forms) == {"shape", "colour", "both"}
    assert all(counts["yes"] == counts["no"] for counts in forms.values())


@pytest.mark.parametrize("split", SPLITS)
def test_examples_of_a_split_are_drawn_when_asked_for(split: str) -> None:
    first, second = itertools.islice(examples(split, 64), 2)
    assert [first.scene.seed, second.scene.seed] == list(SPLITS[split][:2])
    assert first.image.size == (64, 64)
    assert first.image.mode == "RGB"
    assert list(first.questions) == questions(first.scene)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match=r"split must be one of .*'validation'.*, got 'dev'"):
        next(examples("dev"))
