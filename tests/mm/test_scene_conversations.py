import itertools
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_mm.recipes.scene_conversations import Conversation, conversation, conversations
from oval_mm.recipes.scenes import SPLITS, Scene, split_of
from tests.mm.test_scene_questions import answer_to, matching

SEEDS = st.integers(0, 9_999_999)


def _named(question: str) -> str:
    """The description in a question that must fit one object only: what follows the first 'the'."""
    return question.split(" the ", 1)[1].rstrip("?")


def _check(talk: Conversation) -> None:
    everything = Scene(0, 128, tuple(thing for scene in talk.scenes for thing in scene.objects))
    for turn in talk.turns:
        answer, thing = answer_to(turn.question, talk.scenes[turn.image])
        assert thing is not None
        assert (turn.answer, turn.box) == (answer, thing.box)
        assert len(matching(_named(turn.question), everything)) == 1


@given(SEEDS, st.sampled_from((1, 2, 4, 8)))
@settings(max_examples=40)
def test_answers_are_right_and_questions_fit_one_image_only(seed: int, images: int) -> None:
    talk = conversation(seed, images=images)
    assert len(talk.scenes) == images
    assert len({scene.seed for scene in talk.scenes}) == images
    _check(talk)


@given(SEEDS, st.sampled_from(((1, 2), (1, 3), (2, 3), (4, 2), (4, 4))))
@settings(max_examples=40)
def test_every_turn_is_about_another_place_and_first_about_other_images(seed: int, sizes: tuple[int, int]) -> None:
    images, turns = sizes
    talk = conversation(seed, images, turns)
    assert len({(turn.image, turn.box) for turn in talk.turns}) == len(talk.turns) == turns
    assert len({turn.image for turn in talk.turns}) == min(images, turns)


@given(SEEDS)
@settings(max_examples=40)
def test_a_later_question_cannot_be_answered_from_an_earlier_one(seed: int) -> None:
    first, second = conversation(seed, images=1).turns
    assert not set(second.answer.split()) <= set(first.question.rstrip("?").split())


@pytest.mark.parametrize("split", SPLITS)
def test_a_conversation_stays_in_its_split(split: str) -> None:
    for talk in itertools.islice(conversations(split), 5):
        assert {split_of(seed) for seed in (talk.seed, *(scene.seed for scene in talk.scenes))} == {split}


def test_conversations_are_reproducible() -> None:
    assert conversation(5) == conversation(5)
    assert conversation(5) != conversation(6)


@pytest.mark.parametrize("images", [1, 4])
def test_kinds_images_and_answers_are_mixed(images: int) -> None:
    kinds: Counter[str] = Counter()
    places: Counter[int] = Counter()
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for talk in itertools.islice(conversations("train", images), 150):
        for turn in talk.turns:
            kinds[turn.kind] += 1
            places[turn.image] += 1
            answers[turn.kind][turn.answer] += 1
    assert set(kinds) == {"glyph", "colour", "shape", "place"} | ({"relation"} if images == 1 else set())
    rare = {"place"} if images > 1 else set()  # in few of four images is a place where nothing is in the others
    assert min(number for kind, number in kinds.items() if kind not in rare) > 0.1 * kinds.total()
    assert min(places.values()) > 0.7 * places.total() / images
    assert all(max(counts.values()) < 0.3 * counts.total() for counts in answers.values())


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="at least 1, got images=0, turns=2"):
        conversation(0, images=0)
    with pytest.raises(ValueError, match="got 30"):
        conversation(0, images=1, turns=30)
    with pytest.raises(ValueError, match="one of the splits"):
        conversation(-4)
    with pytest.raises(ValueError, match="got 'dev'"):
        conversations("dev")
