"""What the tiny LLaVA learns when: stages with their steps, and which packs a step shows.

words   Captions stand in place of the images: the language model learns to read and to look things up. It has no other
        education, and a caption is several times shorter than its image.
align   The projector learns to make of image features what the language model can read; nothing else changes.
tune    Projector and language model, and slowly the tower, learn from images; first mostly from single ones.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from oval_mm.recipes.llava_batches import (
    CAPTION,
    IMAGES,
    SECOND_TURN,
    Batch,
    Pack,
    conversation_pack,
    easy_vqa_images,
    easy_vqa_pack,
    make_batch,
    make_words_batch,
    scene_pack,
    show_objects,
)
from oval_mm.recipes.scene_questions import KINDS
from oval_mm.recipes.scenes import SPLITS, make_scene

# What a caption tells: all but where things are.
TOLD = (*(kind for kind in KINDS if kind != "relation"), SECOND_TURN, CAPTION)
TOWER, PROJECTOR, LANGUAGE = "tower", "projector", "language"  # the parts of the model


@dataclass(frozen=True)
class Phase:
    """From `start` (a share of the stage's steps) on, a step shows `rows` packs of every source.

    Args:
        background: share of the patches outside of objects that are shown. Few make a step cheap: most of an image's
            patches show nothing.
        balanced: of the easy-vqa questions, as many are answered yes as no.
    """

    start: float
    rows: dict[str, int]
    background: float = 1.0
    balanced: bool = False


@dataclass(frozen=True)
class Stage:
    """A part of the training with its own learning rates.

    Args:
        rates: the highest learning rate of every part that is trained.
        kinds: what is asked, None: everything.
        words: captions stand in place of the images.
    """

    name: str
    steps: int
    rates: dict[str, float]
    phases: tuple[Phase, ...]
    kinds: tuple[str, ...] | None = None
    words: bool = False

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        return [phase for phase in self.phases if phase.start * self.steps <= step][-1]

    def fitted(self, pack: Pack) -> Pack:
        """The pack without what is not asked in this stage."""
        return pack if self.kinds is None else pack.keep(self.kinds)

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of this stage."""
        return tuple(dict.fromkeys(source for phase in self.phases for source in phase.rows))


def make_plan(steps_scale: float = 1.0, tower_rate: float = 1e-4, easy_vqa: bool = True) -> tuple[Stage, ...]:
    """The stages of the recipe.

    Args:
        steps_scale: of the steps that the recipe has; every stage has at least one.
        tower_rate: highest learning rate of the vision tower while it is tuned; 0: it stays as its CLIP was.
        easy_vqa: whether there is easy-vqa to learn from.

    Raises:
        ValueError: `steps_scale` is not positive, or `tower_rate` negative.
    """
    if steps_scale <= 0 or tower_rate < 0:
        raise ValueError(f"steps_scale must be > 0 and tower_rate >= 0, got {steps_scale} and {tower_rate}")
    easy = {"easy-vqa": 1} if easy_vqa else {}
    tuned = {PROJECTOR: 1e-3, LANGUAGE: 1e-3} | ({TOWER: tower_rate} if tower_rate else {})
    plan = (
        Stage("words", 400, {LANGUAGE: 2e-3}, (Phase(0, {"one": 4, "four": 4}),), kinds=TOLD, words=True),
        Stage("align", 200, {PROJECTOR: 2e-3}, (Phase(0, {"one": 16}),), kinds=(CAPTION,)),
        Stage(
            "tune",
            1600,
            tuned,
            (
                Phase(0, {"one": 6, "two": 1, **easy}),
                Phase(0.3, {"one": 3, "four": 2, **easy}),
                Phase(0.5, {"one": 3, "four": 2, **easy}, balanced=True),
            ),
        ),
    )
    return tuple(dataclasses.replace(stage, steps=max(1, round(stage.steps * steps_scale))) for stage in plan)


class StepBatches(Dataset[list[Batch]]):
    """The batches of a stage's step number i, one for each source, from the training split; drawn when asked for."""

    def __init__(self, stage: Stage, processor: Any, seed: int) -> None:
        self.stage, self.processor, self.seed = stage, processor, seed
        self.size_px: int = processor.image_processor.crop_size["height"]
        self.easy_vqa = easy_vqa_images("train") if "easy-vqa" in stage.sources else []

    def __getitem__(self, step: int) -> list[Batch]:
        rng = random.Random(f"llava {self.seed} {self.stage.name} {step}")
        phase = self.stage.phase(step)
        drawn = [[self._draw(source, phase.balanced, rng) for _ in range(rows)] for source, rows in phase.rows.items()]
        return [self._batch(packs, phase.background, rng) for packs in drawn]

    def _batch(self, packs: list[Pack], background: float, rng: random.Random) -> Batch:
        if self.stage.words:
            return make_words_batch(packs, self.processor)
        shown = show_objects(packs, self.processor, background, rng) if background < 1 else None
        return make_batch(packs, self.processor, shown)

    def _draw(self, source: str, balanced: bool, rng: random.Random) -> Pack:
        if source == "easy-vqa":
            return easy_vqa_pack(rng.choice(self.easy_vqa), rng if balanced else None)
        seed = rng.choice(SPLITS["train"])
        if source == "one":
            return self.stage.fitted(scene_pack(make_scene(seed, self.size_px), with_caption=True))
        return self.stage.fitted(conversation_pack(seed, IMAGES[source], self.size_px))
