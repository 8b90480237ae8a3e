"""One training: how long, how fast, and how it goes on after an interruption."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from oval_core.checks import check_count, check_positive
from oval_core.config import OvalConfig
from oval_core.routers.learned import LearnedHead
from oval_core.routers.learned_file import LearnedModule
from oval_core.routers.repair import InputRepair
from oval_core.training.learning import routing_loss
from oval_core.training.lessons import Lesson
from oval_core.training.state import Content, StateFile, interrupts_wait, make_accelerator, share_of_rate

LARGEST_GRADIENT, WEIGHT_DECAY = 1.0, 0.01
VALIDATIONS = 10  # of a training


@dataclass(frozen=True)
class LearningSettings:
    """How a router, or a repair, learns.

    Args:
        steps: of the optimizer, one passage each.
        batch: positions a step.
        rate: highest learning rate.
        focus: of the focal factor, see `routing_loss`.
        dim: of the comparison of queries and pages.
        coarse: whether the router adds to the training-free coarse score instead of doing without.
        budget_pages: of the hit rates, see `OvalConfig`; nothing is learned from it.

    Raises:
        TypeError, ValueError: one is out of range.
    """

    steps: int = 1000
    batch: int = 32
    rate: float = 2e-3
    focus: float = 2.0
    dim: int = 32
    coarse: bool = False
    budget_pages: int = 24

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "dim"):
            check_count(name, getattr(self, name))
        check_positive("rate", self.rate)
        if not 0 <= self.focus < math.inf:
            raise ValueError(f"focus must be a finite number >= 0, got {self.focus}")
        OvalConfig(budget_pages=self.budget_pages)

    @property
    def forced(self) -> tuple[int, int]:
        """Sink and window pages, which are left out of the loss."""
        config = OvalConfig()
        return config.sink_pages, config.window_pages


class Run:
    """Something on its way to being trained, and what is needed to go on with it.

    It computes in float32: in bfloat16, a window would be off by many tokens of a long context.

    Args:
        head: the router's.
        repair: to train in front of it; None: the head itself is trained.
        settings: how.
        seed: of what is drawn.
        state: where to keep what was reached.
        validate: a hit rate of what is trained, asked for after every tenth of the steps; None: nobody looks.

    Attributes:
        seconds: that the steps took, those before an interruption included.
        validation: what `validate` said after which step, and with which budget.
    """

    def __init__(
        self,
        head: LearnedHead,
        repair: InputRepair | None,
        settings: LearningSettings,
        seed: int,
        state: StateFile,
        validate: Callable[[], float] | None = None,
    ) -> None:
        self.head, self.repair, self.settings, self.seed, self.state, self.step = head, repair, settings, seed, state, 0
        self.seconds, self.validate, self.validation = 0.0, validate, list[dict[str, float]]()
        self.trained: LearnedModule = head if repair is None else repair
        self.trained.requires_grad_(True)  # a router that was made of it has no gradients
        self.accelerator = make_accelerator()
        self.optimizer = torch.optim.AdamW(self.trained.parameters(), lr=settings.rate, weight_decay=WEIGHT_DECAY)
        saved = state.load()
        if saved:
            self.step, self.seconds, self.validation = saved["step"], saved["seconds"], saved["validation"]
            self.trained.load_state_dict(saved["trained"])
            self.optimizer.load_state_dict(saved["optimizer"])

    @torch.enable_grad()
    def through(self, lessons: Sequence[Lesson]) -> list[float]:
        """Take all steps that are left; their losses."""
        losses: list[float] = []
        bar = tqdm(total=self.settings.steps, initial=self.step, desc=self.trained.kind, unit="step")
        with bar, interrupts_wait() as interrupted:
            while self.step < self.settings.steps:
                begin = time.perf_counter()
                losses.append(self._advance(lessons))
                self.seconds += time.perf_counter() - begin
                self._validate()
                bar.set_postfix_str(f"loss {losses[-1]:.4f}{self._last_hit_rate()}", refresh=False)
                bar.update()
                self.state.after_step(self._content, interrupted())
        return losses

    def _validate(self) -> None:
        every = math.ceil(self.settings.steps / VALIDATIONS)
        if self.validate is not None and (self.step % every == 0 or self.step == self.settings.steps):
            measured = {"step": self.step, "budget_pages": self.settings.budget_pages, "hit_rate": self.validate()}
            self.validation.append(measured)

    def _last_hit_rate(self) -> str:
        return f", held out {self.validation[-1]['hit_rate']:.3f}" if self.validation else ""

    def _advance(self, lessons: Sequence[Lesson]) -> float:
        """One step; its loss. What it draws depends on the seed and its number alone."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.rate * share_of_rate(self.step, self.settings.steps)
        noise = torch.Generator().manual_seed((self.seed << 32) + self.step)
        lesson = lessons[int(torch.randint(len(lessons), (), generator=noise))]
        chosen = torch.randperm(len(lesson.positions), generator=noise)[: self.settings.batch]
        part = lesson.at(chosen).to(self.trained.device)
        loss = routing_loss(self.head, part, noise, self.settings.focus, self.settings.forced, self.repair)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.trained.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return float(loss.detach())

    def _content(self) -> Content:
        reached = {"step": self.step, "seconds": self.seconds, "validation": self.validation}
        return {**reached, "trained": self.trained.state_dict(), "optimizer": self.optimizer.state_dict()}
