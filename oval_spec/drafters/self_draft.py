"""Draft with the target itself, reading few pages of its own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor

from oval_core import OvalConfig
from oval_core.checks import check_count, check_share
from oval_core.stats import TraceEntry
from oval_spec.cached_model import CachedModel
from oval_spec.drafters.base import Drafter, Seen
from oval_spec.drafters.step_by_step import draft_chains, read_chains
from oval_spec.page_sets import Ask
from oval_spec.selections import tokens_read, traced
from oval_spec.text import Text
from oval_spec.tree import Tree


class SparseSelfDrafter(Drafter):
    """The target drafts with a small budget of pages; the verification reads more, or everything.

    Args:
        budget_pages: pages per KV head that a drafting step reads exactly.
        most_tokens: of a draft.
        min_confidence: a draft ends before a token that the target gives a smaller probability.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    name = "sparse self-draft"

    def __init__(self, budget_pages: int = 32, most_tokens: int = 8, min_confidence: float = 0.4) -> None:
        self.paging = OvalConfig(budget_pages=budget_pages)
        self.most_tokens = check_count("most_tokens", most_tokens)
        self.min_confidence = check_share("min_confidence", min_confidence)
        self._target: CachedModel | None = None
        self._selections: list[TraceEntry] = []

    @contextmanager
    def begin(self, target: CachedModel, model_inputs: dict[str, Any], texts: Sequence[Text]) -> Iterator[None]:
        """See `Drafter.begin`."""
        self._target = target
        try:
            yield
        finally:
            self._target = None

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`; the target's cache is left as it was."""
        target = self._target
        assert target is not None
        assert self.paging is not None
        before = target.lengths.copy()
        sparse = replace(target.config, budget_pages=self.paging.budget_pages, budget_ratio=None)
        with target.reading(sparse):
            roots = [[text.tokens[-1]] if more else [] for text, more in zip(seen.texts, seen.running, strict=True)]
            with traced(target.model, seen.wants_pages) as self._selections:
                trees = draft_chains(target, read_chains(target, roots), seen.running, most, self.min_confidence)
        target.crop(before)
        return trees

    def expects(self, layer_idx: int, ask: Ask) -> Tensor | None:
        """See `Drafter.expects`: what the drafting steps read."""
        assert self._target is not None
        return tokens_read(self._selections, self._target.layers[layer_idx])
