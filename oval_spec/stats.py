"""What one speculative generation did."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from oval_core.stats import Recorder
from oval_spec.page_sets import PageSetStats
from oval_spec.tree import Tree
from oval_spec.verify import Walk


@dataclass
class SpeculativeStats:
    """Counts over all rows of one generation.

    Attributes:
        steps: forward passes of the target after the prompt.
        tokens: new tokens, those of the prompt's own pass included.
        drafted_steps: row-steps that had a draft.
        accepted: by length of the accepted path, row-steps that had a draft.
        history: by step, how many draft tokens every row accepted; None for a row that had ended.
        tried_at, accepted_at: by depth, row-steps whose draft went that deep after an accepted parent, and those where
            that depth was accepted.
        seconds: by phase: prefill, draft, verify, check.
        bytes_read: by phase: of keys, values and metadata, with `look_every`; without it nothing.
        page_sets: what `look_every` measured.
        checked, retracted: tokens that a dense check looked at, and those that it took back.
    """

    steps: int = 0
    tokens: int = 0
    drafted_steps: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    history: list[list[int | None]] = field(default_factory=list)
    tried_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    bytes_read: Counter[str] = field(default_factory=Counter)
    page_sets: PageSetStats | None = None
    checked: int = 0
    retracted: int = 0

    @property
    def accepted_mean(self) -> float:
        """Mean accepted draft tokens of the row-steps that had a draft; 0 without any."""
        return sum(length * count for length, count in self.accepted.items()) / max(1, self.drafted_steps)

    @property
    def accept_rate(self) -> dict[int, float]:
        """By depth: how often a draft that was right up to there was right there, too."""
        return {depth: self.accepted_at[depth] / tried for depth, tried in sorted(self.tried_at.items())}

    @contextmanager
    def timed(self, phase: str, recorder: Recorder | None = None) -> Iterator[None]:
        """Add the time of the `with` block to a phase, and what the model of `recorder` read in it."""
        begin, before = time.perf_counter(), recorder.bytes_read if recorder else 0
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - begin
            if recorder is not None:
                self.bytes_read[phase] += recorder.bytes_read - before

    def count(self, tree: Tree, found: Walk) -> None:
        """A row had this draft, and this came of it."""
        if not len(tree):
            return
        self.drafted_steps += 1
        accepted = len(found.path)
        self.accepted[accepted] += 1
        for depth in range(1, accepted + 1):
            self.tried_at[depth] += 1
            self.accepted_at[depth] += 1
        ended_by_draft = len(found.kept) < accepted
        if not ended_by_draft and found.last in tree.parents:
            self.tried_at[accepted + 1] += 1
