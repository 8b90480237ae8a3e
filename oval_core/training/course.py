"""A model and the passages that something is trained on and measured on: what all trainings here have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oval_core.routers import Router
from oval_core.routers.learned import LearnedHead
from oval_core.routers.learned_file import ModelSizes
from oval_core.routers.repair import InputRepair
from oval_core.training.hits import hit_rates, rehearse
from oval_core.training.lessons import Lesson, make_lessons
from oval_core.training.passages import PassageSettings, cut_passages, digests
from oval_core.training.record import BUDGET, Record
from oval_core.training.run import LearningSettings, Run
from oval_core.training.state import Content, StateFile

STATE_FILE = "training.pt"
FEW_WEIGHTS = 256  # of each tensor of a model, evenly spread, by which it is known


@dataclass(frozen=True)
class Course:
    """How something is trained and measured.

    Args:
        model: that is watched, not attached, in eval mode.
        texts: token ids `[t]` by name.
        passages, learning: settings.
    """

    model: Any
    texts: Mapping[str, Tensor]
    passages: PassageSettings
    learning: LearningSettings

    def source(self) -> Content:
        """What decides which lessons there are; a folder counts by its name, a model also by a few of its weights."""
        name = self.model.config.name_or_path or ""
        name = Path(name).name if Path(name).is_dir() else name
        few = [_sample(weights.detach().flatten()).float().cpu() for weights in self.model.parameters()]
        known_by = {
            "sizes": dataclasses.asdict(ModelSizes.of(self.model)),
            **digests({"model_weights": torch.cat(few)}),
        }
        return {"model": name, **known_by, "texts": digests(self.texts), **dataclasses.asdict(self.passages)}

    def influence(self) -> Content:
        """The settings that decide, with the lessons, about weights."""
        return {name: value for name, value in dataclasses.asdict(self.learning).items() if name != BUDGET}

    def lessons(self, folder: Path, about: Content, coarse: bool) -> list[Lesson]:
        """See `make_lessons`."""
        return make_lessons(folder, self.model, self._passages()[0], self.passages, about, coarse)

    def train(
        self,
        record: Record,
        lessons: Sequence[Lesson],
        router: Router,
        head: LearnedHead,
        repair: InputRepair | None = None,
    ) -> None:
        """Take all steps that are left, and leave the weights. `router` is made of what is trained, see `Run`."""
        rehearsal = rehearse(self.model, self._passages()[1][0], self.passages, self.learning.budget_pages)
        state = StateFile(record.path.with_name(STATE_FILE), record.about)
        run = Run(head, repair, self.learning, self.passages.seed, state, lambda: rehearsal.hit_rate(router))
        run.through(lessons)
        record.add_weights(run)

    def hit_rates(self, routers: Mapping[str, Router]) -> dict[str, float]:
        """On the held-out passages, see `hit_rates`."""
        return hit_rates(self.model, self._passages()[1], routers, self.passages, self.learning.budget_pages)

    def _passages(self) -> tuple[list[Tensor], list[Tensor]]:
        return cut_passages(self.texts, self.passages)


def _sample(weights: Tensor) -> Tensor:
    return weights[:: max(1, len(weights) // FEW_WEIGHTS)]
