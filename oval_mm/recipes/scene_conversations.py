"""Conversations about one or several synthetic scenes, in which every turn asks about another place."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from oval_mm.recipes.scene_questions import located_questions
from oval_mm.recipes.scenes import SPLITS, Scene, make_scene, split_of
from oval_mm.recipes.shapes import Box

ATTEMPTS = 50


@dataclass(frozen=True)
class Turn:
    """A question; its answer is to be seen in `box` of the scene with index `image`."""

    question: str
    answer: str
    kind: str
    image: int
    box: Box


@dataclass(frozen=True)
class Conversation:
    """Scenes, shown in this order, and the turns about them. `scenes.paint` draws a scene."""

    seed: int
    scenes: tuple[Scene, ...]
    turns: tuple[Turn, ...]


def conversation(seed: int, images: int = 4, turns: int = 2, size_px: int = 256) -> Conversation:
    """A conversation about scenes from the split that `seed` belongs to.

    A question names something that is in only one of the images. No two turns are answered in the same place; while
    there are images left that nobody asked about, a turn is about one of those.

    Raises:
        ValueError: fewer than one image or turn, more turns than there are places, or a seed outside every split.
    """
    if images < 1 or turns < 1:
        raise ValueError(f"images and turns must be at least 1, got images={images}, turns={turns}")
    rng = random.Random(f"conversation {seed} {images} {turns}")
    for _ in range(ATTEMPTS):
        seeds = rng.sample(SPLITS[split_of(seed)], images)
        scenes = tuple(make_scene(scene_seed, size_px) for scene_seed in seeds)
        asked = _ask(rng, scenes, turns)
        if asked:
            return Conversation(seed, scenes, tuple(asked))
    raise ValueError(f"turns must leave every turn a place of its own in {images} images, got {turns}")


def conversations(split: str, images: int = 4, turns: int = 2, size_px: int = 256) -> Iterator[Conversation]:
    """The conversations of a split ("train", "validation" or "test"), each made when it is asked for."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}")
    return (conversation(seed, images, turns, size_px) for seed in SPLITS[split])


def _ask(rng: random.Random, scenes: tuple[Scene, ...], turns: int) -> list[Turn] | None:
    """One turn after the other, every kind of question equally often; None where the questions run out."""
    asked: list[Turn] = []
    pool = _all_turns(scenes)
    for _ in range(turns):
        pool = [turn for turn in pool if not _is_known(turn, asked)]
        unseen = [turn for turn in pool if turn.image not in {other.image for other in asked}]
        choice = unseen if len(asked) < len(scenes) else pool
        if not choice:
            return None
        kind = rng.choice(sorted({turn.kind for turn in choice}))
        asked.append(rng.choice([turn for turn in choice if turn.kind == kind]))
    return asked


def _all_turns(scenes: tuple[Scene, ...]) -> list[Turn]:
    visible = [thing for scene in scenes for thing in scene.objects]
    return [
        Turn(question.question, question.answer, question.kind, image, question.box)
        for image, scene in enumerate(scenes)
        for question in located_questions(scene, visible)
        if question.box
    ]


def _is_known(turn: Turn, asked: list[Turn]) -> bool:
    """Whether an earlier turn was about the same place, or its question gives the answer away."""
    if any((turn.image, turn.box) == (other.image, other.box) for other in asked):
        return True
    words = {word for other in asked for word in other.question.rstrip("?").split()}
    return words.issuperset(turn.answer.split())
