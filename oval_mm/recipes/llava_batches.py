"""What the tiny LLaVA is asked: everything about the same images in one pack, and batches of packs for every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from oval_mm.recipes.easy_vqa import ImageQuestions, load_easy_vqa
from oval_mm.recipes.patches import image_tokens, symbols_of
from oval_mm.recipes.question_packing import Packed, make_block, make_prefix, pack
from oval_mm.recipes.scene_conversations import conversation
from oval_mm.recipes.scene_questions import located_questions, questions
from oval_mm.recipes.scenes import SPLITS, Scene, make_scene, paint
from oval_mm.recipes.shapes import COLOURS
from oval_mm.recipes.tiny_llava import IMAGE

SOURCES = ("one", "two", "four", "easy-vqa")  # one, two or four scenes, or an image of easy-vqa
IMAGES = {"one": 1, "two": 2, "four": 4, "easy-vqa": 1}
SECOND_TURN = "second turn"  # a kind beside those of the scenes' questions
MOST_QUESTIONS = 24  # about several scenes
HELD_OUT = 10  # one in so many of easy-vqa's training images is for validation
EASY_VQA_COLOURS = {*COLOURS, "brown", "gray", "teal"}


class Asked(NamedTuple):
    """One turn."""

    question: str
    answer: str
    kind: str


@dataclass(frozen=True)
class Pack:
    """Images, as scenes or files, and conversations about them that know nothing of each other."""

    pictures: tuple[Scene | Path, ...]
    dialogues: tuple[tuple[Asked, ...], ...]

    def images(self) -> list[Image.Image]:
        """The images, drawn or opened, RGB."""
        return [paint(one) if isinstance(one, Scene) else Image.open(one).convert("RGB") for one in self.pictures]

    def some(self, most: int, rng: random.Random, kinds: Collection[str] | None = None) -> Pack:
        """The same with up to `most` of the conversations, whose turns are all of these kinds (None: of any)."""
        fitting = [talk for talk in self.dialogues if kinds is None or {turn.kind for turn in talk} <= {*kinds}]
        return Pack(self.pictures, tuple(rng.sample(fitting, min(most, len(fitting)))))


class Batch(NamedTuple):
    """Packs of as many images each.

    Args:
        packed: the tokens.
        pixels: float32 `[images, 3, height, width]`, None where symbols stand for the images.
        symbols: int64 `[images, image tokens, words]`, see `symbols_of`; None: images only.
        shown: bool `[images, image tokens]`, see `packed_outputs`; None: all.
    """

    packed: Packed
    pixels: Tensor | None = None
    symbols: Tensor | None = None
    shown: Tensor | None = None

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        others = (None if part is None else part.to(device) for part in (self.pixels, self.symbols, self.shown))
        return Batch(self.packed.to(device), *others)


def scene_pack(scene: Scene) -> Pack:
    """All questions about one scene."""
    return Pack((scene,), tuple((Asked(one.question, one.answer, one.kind),) for one in questions(scene)))


def conversation_pack(seed: int, images: int, size_px: int, most: int = MOST_QUESTIONS) -> Pack:
    """Conversation number `seed` about several scenes, two turns, and up to `most` single questions about the same."""
    talk = conversation(seed, images, 2, size_px)
    first, second = talk.turns
    turns = (Asked(first.question, first.answer, first.kind), Asked(second.question, second.answer, SECOND_TURN))
    visible = [thing for scene in talk.scenes for thing in scene.objects]
    pool = [question for scene in talk.scenes for question in located_questions(scene, visible)]
    chosen = random.Random(f"pack {seed}").sample(pool, min(most, len(pool)))
    return Pack(talk.scenes, (turns, *((Asked(one.question, one.answer, one.kind),) for one in chosen)))


def easy_vqa_pack(image: ImageQuestions, balanced: random.Random | None = None) -> Pack:
    """All questions about an image; `balanced`: drops some, so that no more are answered no than yes, nor fewer."""
    asked = [Asked(question, answer, _easy_vqa_kind(answer)) for question, answer in image.questions]
    if balanced is not None:
        both = [[turn for turn in asked if turn.answer == answer] for answer in ("yes", "no")]
        fewest = min(map(len, both))
        dropped = {turn for turns in both for turn in balanced.sample(turns, len(turns) - fewest)}
        asked = [turn for turn in asked if turn not in dropped] or asked
    return Pack((image.path,), tuple((turn,) for turn in asked))


def _easy_vqa_kind(answer: str) -> str:
    if answer in ("yes", "no"):
        return "existence"
    return "colour" if answer in EASY_VQA_COLOURS else "shape"


def easy_vqa_images(split: str) -> list[ImageQuestions]:
    """The images of "train", "validation" (a tenth of the package's training images) or "test"."""
    images = load_easy_vqa("test" if split == "test" else "train")
    if split == "test":
        return images
    return [image for index, image in enumerate(images) if (index % HELD_OUT == 0) == (split == "validation")]


def packs(source: str, split: str, size_px: int) -> Iterator[Pack]:
    """The packs of a source, each made when it is asked for.

    Raises:
        ValueError: no such source or split.
        ImportError: easy-vqa is asked for and not installed.
    """
    if source not in SOURCES or split not in SPLITS:
        raise ValueError(f"source and split must be of {SOURCES} and {list(SPLITS)}, got {source!r}, {split!r}")
    if source == "easy-vqa":
        return (easy_vqa_pack(image) for image in easy_vqa_images(split))
    if source == "one":
        return (scene_pack(make_scene(seed, size_px)) for seed in SPLITS[split])
    return (conversation_pack(seed, IMAGES[source], size_px) for seed in SPLITS[split])


def pictures_of(packs: Sequence[Pack]) -> list[Scene | Path]:
    """All of them, in order."""
    return [picture for one in packs for picture in one.pictures]


def make_batch(packs: Sequence[Pack], processor: Any, shown: Tensor | None = None) -> Batch:
    """Model inputs of packs with as many images each.

    Args:
        packs: at least one.
        processor: a `LlavaProcessor`.
        shown: bool `[images, image tokens]`, which tokens of all images there are; None: all.
    """
    images = [image for one in packs for image in one.images()]
    pixels = processor.image_processor(images=images, return_tensors="pt").pixel_values
    return Batch(_packed(packs, processor, shown), pixels=pixels, shown=shown)


def make_symbols_batch(packs: Sequence[Pack], processor: Any, shown: Tensor | None = None) -> Batch:
    """The same with symbols in place of the images, which must be scenes."""
    return Batch(_packed(packs, processor, shown), symbols=symbols_of(pictures_of(packs), processor), shown=shown)


def _packed(packs: Sequence[Pack], processor: Any, shown: Tensor | None) -> Packed:
    flags = itertools.repeat(None) if shown is None else iter(shown.view(len(packs), -1).tolist())
    prefixes = [
        make_prefix(processor.tokenizer, IMAGE * image_tokens(processor) * len(one.pictures), kept)
        for one, kept in zip(packs, flags, strict=False)
    ]
    blocks = [[make_block(processor.tokenizer, [turn[:2] for turn in talk]) for talk in one.dialogues] for one in packs]
    return pack(prefixes, blocks, processor.tokenizer.pad_token_id)
