"""What the tiny LLaVA learns when: stages with their steps, and which packs a step shows.

symbols   Sums of word embeddings stand in place of patches: the language model learns to look things up. It has no
          other education, and needs few of the patches for it.
align     The projector learns to make of the features of a patch what its symbol would be; nothing else changes.
tune      Projector and language model learn from images; the tower stays as its CLIP was.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.utils.data import Dataset

from oval_mm.recipes.llava_batches import (
    IMAGES,
    Batch,
    Pack,
    conversation_pack,
    easy_vqa_images,
    easy_vqa_pack,
    make_batch,
    make_symbols_batch,
    pictures_of,
    scene_pack,
)
from oval_mm.recipes.patches import show_some, symbols_of
from oval_mm.recipes.scenes import SPLITS, make_scene

PROJECTOR, LANGUAGE = "projector", "language"  # the parts of the model that are trained
Seen = Literal["symbols", "both", "images"]


@dataclass(frozen=True)
class Phase:
    """From `start` (a share of the stage's steps) on, a step shows `rows` packs of every source.

    Args:
        objects: share of the patches of every object that are shown, at least one.
        background: share of all other patches that are shown. Few make a step cheap: most of an image shows nothing.
        asked: conversations about a pack, at most.
        kinds: what they ask, "place" among them; None: everything.
        balanced: of the easy-vqa questions, as many are answered yes as no.
    """

    start: float
    rows: dict[str, int]
    objects: float = 1.0
    background: float = 1.0
    asked: int = 24
    kinds: tuple[str, ...] | None = None
    balanced: bool = False


@dataclass(frozen=True)
class Stage:
    """A part of the training with its own learning rates.

    Args:
        rates: the highest learning rate of every part that is trained; see `muon.make_optimizers`.
        seen: "symbols": these stand in place of the images; "both": answers do not matter, but how near the features
            of a patch come to its symbol; "images": answers about these.
    """

    name: str
    steps: int
    rates: dict[str, float]
    phases: tuple[Phase, ...]
    seen: Seen = "images"

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        return [phase for phase in self.phases if phase.start * self.steps <= step][-1]

    @property
    def sources(self) -> tuple[str, ...]:
        """All sources of this stage."""
        return tuple(dict.fromkeys(source for phase in self.phases for source in phase.rows))


def make_plan(steps_scale: float = 1.0, easy_vqa: bool = True) -> tuple[Stage, ...]:
    """The stages of the recipe.

    Args:
        steps_scale: of the steps that the recipe has; every stage has at least one.
        easy_vqa: whether there is easy-vqa to learn from.

    Raises:
        ValueError: `steps_scale` is not positive.
    """
    if steps_scale <= 0:
        raise ValueError(f"steps_scale must be > 0, got {steps_scale}")
    easy = {"easy-vqa": 2} if easy_vqa else {}
    symbols = (
        Phase(0, {"one": 4}, objects=0, background=0.02, asked=14, kinds=("glyph", "colour", "shape", "place")),
        Phase(0.25, {"one": 4, "four": 1}, objects=0, background=0.02, asked=16),
        Phase(0.85, {"one": 4, "four": 1}, objects=0.3, background=0.1, asked=16),
    )
    plan = (
        Stage("symbols", 4500, {LANGUAGE: 5e-3}, symbols, "symbols"),
        Stage("align", 400, {PROJECTOR: 5e-3}, (Phase(0, {"one": 16}, background=0.2),), "both"),
        Stage(
            "tune",
            2400,
            {PROJECTOR: 2e-3, LANGUAGE: 3e-3},
            (
                Phase(0, {"one": 4, "four": 1, **easy}, background=0.3),
                Phase(0.6, {"one": 4, "four": 2, **easy}, balanced=True),
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
        drawn = [[self._draw(source, phase, rng) for _ in range(rows)] for source, rows in phase.rows.items()]
        return [batch_of(self.stage.seen, packs, self.processor, phase, rng) for packs in drawn]

    def _draw(self, source: str, phase: Phase, rng: random.Random) -> Pack:
        if source == "easy-vqa":
            return easy_vqa_pack(rng.choice(self.easy_vqa), rng if phase.balanced else None)
        seed = rng.choice(SPLITS["train"])
        if source == "one":
            return scene_pack(make_scene(seed, self.size_px)).some(phase.asked, rng, phase.kinds)
        return conversation_pack(seed, IMAGES[source], self.size_px).some(phase.asked, rng, phase.kinds)


def batch_of(seen: Seen, packs: Sequence[Pack], processor: Any, phase: Phase, rng: random.Random) -> Batch:
    """What is seen of packs in a phase."""
    whole = phase.objects == phase.background == 1
    shown = None if whole else show_some(pictures_of(packs), processor, phase.objects, phase.background, rng)
    if seen == "symbols":
        return make_symbols_batch(packs, processor, shown)
    batch = make_batch(packs, processor, shown)
    return batch if seen == "images" else batch._replace(symbols=symbols_of(pictures_of(packs), processor))
