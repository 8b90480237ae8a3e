"""What a verification reads of the target's cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from oval_core.checks import check_count
from oval_core.routers import make_router
from oval_spec.cached_model import CachedModel, dense
from oval_spec.drafters.base import Drafter
from oval_spec.page_sets import AgreementRouter, Ask

MODES = ("exact", "pages")
READS = ("own", "agreed", "union")


@dataclass(frozen=True)
class ReadingPlan:
    """See the arguments of `speculative_generate`.

    Raises:
        TypeError, ValueError: an argument is none of those, or does not go with the others.
    """

    mode: str = "exact"
    reads: str = "own"
    check_every: int | None = None
    look_every: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("reads", READS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        for name in ("check_every", "look_every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        if self.mode == "exact" and self.check_every is not None:
            raise ValueError(f"check_every is for mode 'pages': mode 'exact' is checked anyway; got {self.check_every}")
        if self.mode == "exact" and self.reads != "own":
            raise ValueError(f"reads is for mode 'pages': mode 'exact' reads everything; got {self.reads!r}")
        if self.mode == "pages" and self.reads == "own" and self.look_every is not None:
            raise ValueError("look_every needs reads='agreed' or 'union' in mode 'pages': 'own' asks no drafter")


class Verification:
    """How the target reads, step after step.

    Attributes:
        router: by page sets; None where they play no part.
    """

    def __init__(self, target: CachedModel, drafter: Drafter, plan: ReadingPlan) -> None:
        self.target, self.drafter, self.plan = target, drafter, plan
        self.router: AgreementRouter | None = None
        if plan.look_every is not None or plan.reads != "own":
            reads = "all" if plan.mode == "exact" else plan.reads
            self.router = AgreementRouter(make_router(target.config), reads, drafter.expects)
        self._step = 0

    @property
    def wants_pages(self) -> bool:
        """Whether the next verification is going to ask what the drafter expects."""
        return self.router is not None and (self.plan.mode == "pages" or self._looks(self._step))

    def how(self, has_draft: bool) -> AbstractContextManager[Any]:
        """The next verification, to be entered once."""
        step, router = self._step, self.router
        self._step += 1
        if router is None:
            return self.densely() if self.plan.mode == "exact" else nullcontext()
        router.expects = self.drafter.expects if has_draft else _nothing
        router.measures = has_draft and self._looks(step)
        if self.plan.mode == "pages":
            return self.target.reading(self.target.config, router)
        if self._looks(step) or self._looks(step + 1):  # the one before tells the target's last state
            paged = replace(self.target.config, always_paged=True, min_context_tokens=0)
            return self.target.reading(paged, router)
        return self.densely()

    def of_prompt(self) -> AbstractContextManager[Any]:
        """How the prompt is read: as the text after it, or exactly where that is checked."""
        exact = self.plan.mode == "exact" or self.plan.check_every is not None
        return self.densely() if exact else nullcontext()

    def densely(self) -> AbstractContextManager[Any]:
        """Everything."""
        return self.target.reading(dense(self.target.config))

    def passed(self, last: Tensor) -> None:
        """The texts went on after query `last`, int64 `[B]`, of each row."""
        if self.router is not None:
            self.router.passed(last)

    def _looks(self, step: int) -> bool:
        every = self.plan.look_every
        return every is not None and step % every == every - 1


def _nothing(layer_idx: int, ask: Ask) -> None:
    """What no drafter expects."""
