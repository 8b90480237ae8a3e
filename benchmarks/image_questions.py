"""Conversations about images as `benchmarks.image_qa` reads them: many at a time, one a row, all over their images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from oval_mm.recipes.llava_batches import Asked, Pack
from oval_mm.recipes.patches import image_tokens
from oval_mm.recipes.question_packing import IGNORED, Block, make_block, make_prefix, padded
from oval_mm.recipes.scene_questions import Question, located_questions, questions
from oval_mm.recipes.scenes import Scene
from oval_mm.recipes.shapes import Box
from oval_mm.recipes.tiny_llava import END, IMAGE, PAD

MOST_ROWS = 64  # that run together
MOST_PADDING = 0.2  # a row is longer than the shortest one beside it by at most this share


@dataclass(frozen=True)
class Region:
    """Where the asked-about object is: a box in pixels of image number `image`."""

    image: int
    box: Box


@dataclass(frozen=True)
class Talk:
    """A conversation about the images of pack number `pack`; `regions` has one entry a turn, None: not one place."""

    pack: int
    turns: tuple[Asked, ...]
    regions: tuple[Region | None, ...]
    block: Block


@dataclass(frozen=True)
class Rows:
    """Conversations that are read together, padded on the right: R rows of up to T tokens, the very last left out.

    Args:
        talks: one a row.
        tokens: int64 `[R, T]`.
        wanted: int64 `[R, T]`, the answer token that should follow each token; IGNORED where none has to.
        turn: int64 `[R, T]`, the turn that the next token belongs to.
        is_word: bool `[R, T]`, whether a word of an answer should follow; the end of an answer is none.
    """

    talks: Sequence[Talk]
    tokens: Tensor
    wanted: Tensor
    turn: Tensor
    is_word: Tensor

    @property
    def packs(self) -> Tensor:
        """The number of each row's pack, int64 `[R]`."""
        return torch.tensor([talk.pack for talk in self.talks])

    @property
    def is_answer(self) -> Tensor:
        """bool `[R, T]`: an answer token should follow."""
        return self.wanted != IGNORED


@dataclass(frozen=True)
class ImageBatch:
    """Packs of as many images each and everything that is asked about them.

    Args:
        images: of all packs, one after the other.
        prefix: int64 `[packs, P]`, what stands before a question.
        rows: all conversations.
    """

    images: Sequence[Image.Image]
    prefix: Tensor
    rows: Sequence[Rows]


def make_batch(packs: Sequence[Pack], processor: Any) -> ImageBatch:
    """A batch; conversations of about the same length become rows that are read together."""
    tokenizer = processor.tokenizer
    talks = [talk for number, one in enumerate(packs) for talk in _talks(number, one, tokenizer)]
    prefix = make_prefix(tokenizer, IMAGE * image_tokens(processor) * len(packs[0].pictures)).tokens
    return ImageBatch(
        images=[image for one in packs for image in one.images()],
        prefix=torch.tensor(prefix).expand(len(packs), -1),
        rows=[make_rows(alike, tokenizer) for alike in _alike(talks)],
    )


def _alike(talks: Sequence[Talk]) -> list[list[Talk]]:
    groups: list[list[Talk]] = []
    longest = 0.0
    for talk in sorted(talks, key=lambda talk: len(talk.block.tokens)):
        if len(talk.block.tokens) > longest or len(groups[-1]) == MOST_ROWS:
            groups.append([])
            longest = (1 + MOST_PADDING) * len(talk.block.tokens)
        groups[-1].append(talk)
    return groups


def _talks(number: int, pack: Pack, tokenizer: Any) -> Iterator[Talk]:
    regions = regions_of(pack)
    for turns in pack.dialogues:
        where = tuple(regions.get((turn.question, turn.answer)) for turn in turns)
        yield Talk(number, turns, where, make_block(tokenizer, [turn[:2] for turn in turns]))


def regions_of(pack: Pack) -> dict[tuple[str, str], Region]:
    """Where the answers to the questions (and answers) about scenes can be seen, if that is one place."""
    scenes = [scene for scene in pack.pictures if isinstance(scene, Scene)]
    visible = [thing for scene in scenes for thing in scene.objects]
    found: dict[tuple[str, str], Region] = {}
    for image, scene in enumerate(scenes):
        asked: Iterator[Question] = iter(questions(scene)) if len(scenes) == 1 else located_questions(scene, visible)
        found |= {(one.question, one.answer): Region(image, one.box) for one in asked if one.box}
    return found


def make_rows(talks: Sequence[Talk], tokenizer: Any) -> Rows:
    """One row a conversation."""
    words = tokenizer.get_vocab()
    tokens = padded([talk.block.tokens for talk in talks], words[PAD])
    labels = padded([talk.block.labels for talk in talks], IGNORED)
    wanted, ends = labels[:, 1:], labels[:, 1:] == words[END]
    return Rows(
        talks=talks,
        tokens=tokens[:, :-1],
        wanted=wanted,
        turn=ends.long().cumsum(1) - ends.long(),
        is_word=(wanted != IGNORED) & ~ends,
    )
