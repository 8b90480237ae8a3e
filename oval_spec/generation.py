"""The loop: a drafter proposes, the target reads that in one pass and keeps what it would have said itself.

texts ── draft ──> trees ── read ──> logits ── walk ──> accepted paths ── keep ──> cache
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oval_core.attach import binding_of
from oval_core.stats import Recorder
from oval_spec.drafters.base import Seen
from oval_spec.pace import Pace
from oval_spec.stats import SpeculativeStats
from oval_spec.text import Text
from oval_spec.tree import Tree
from oval_spec.verification import Verification
from oval_spec.verify import Choose, Walk, make_choose, make_stop, walk


@dataclass(frozen=True)
class Wanted:
    """How the target chooses, when it stops, and who is told: as `generate` prepares them.

    Attributes:
        processors: a `LogitsProcessorList`.
        criteria: a `StoppingCriteriaList`.
        do_sample: draw instead of taking the most likely.
        streamer: gets the new tokens of the only row, one by one; None: nobody does.
    """

    processors: Any
    criteria: Any
    do_sample: bool
    streamer: Any = None


class Generation:
    """The texts on their way.

    A running row's cache holds all of its text but the root, its last token.
    """

    def __init__(self, verification: Verification, pace: Pace, wanted: Wanted, texts: list[Text]) -> None:
        self.verification, self.pace, self.wanted = verification, pace, wanted
        self.target, self.drafter, self.check_every = (
            verification.target,
            verification.drafter,
            verification.plan.check_every,
        )
        self.texts, self.running, self.stats = texts, [True] * len(texts), SpeculativeStats()
        self._stop, self._streamed = make_stop(wanted.criteria), len(texts[0])
        self._hidden: Tensor | None = None
        self._most_tokens: int | None = getattr(wanted.criteria, "max_length", None)
        self._checked = [len(text) for text in texts]  # tokens of each text that will not be taken back
        self._uncached = 0  # tokens that the cache holds and the texts do not, when the prompt is embeddings

    def through(self, model_inputs: dict[str, Any]) -> None:
        """Read the prompt and let all texts grow to their ends."""
        with self.stats.timed("prefill"), self.verification.of_prompt():
            logits = self.target.prefill(model_inputs)
        self._uncached = self.target.lengths[0] - len(self.texts[0])
        if self.wanted.streamer is not None:
            self.wanted.streamer.put(self.texts[0].ids.cpu())
        with self.drafter.begin(self.target, model_inputs, self.texts):
            self._follow([Tree()] * len(self.texts), logits[:, None])
            self._checked = [len(text) for text in self.texts]
            self._stream()
            while any(self.running):
                self._step()
                if self._check_is_due():
                    self._check()
                self._stream()
        if self.wanted.streamer is not None:
            self.wanted.streamer.end()
        if self.verification.router is not None and self.verification.router.stats.looks:
            self.stats.page_sets = self.verification.router.stats

    def _draft(self) -> list[Tree]:
        """The next trees, no deeper than a text may become longer."""
        size = self.pace.next_size()
        none = [Tree()] * len(self.texts)
        if not size:
            return none
        with self.stats.timed("draft", self._recorder_of(self.drafter.model)):
            seen = Seen(self.texts, self.running, self._hidden, self.verification.wants_pages)
            trees = self.drafter.draft(seen, size)
        if self._most_tokens is not None:
            room = [self._most_tokens - len(text) - 1 for text in self.texts]
            trees = [tree.down_to(left) for tree, left in zip(trees, room, strict=True)]
        return [tree.truncated(size) if goes_on else Tree() for tree, goes_on in zip(trees, self.running, strict=True)]

    def _step(self) -> None:
        """One draft, one pass of the target; the texts grow."""
        begin = time.perf_counter()
        trees = self._draft()
        walks = self._verify(trees, self.verification.how(any(map(len, trees))), "verify")
        drafted = [(tree, found) for tree, found in zip(trees, walks, strict=True) if found is not None and len(tree)]
        self.stats.history.append([None if found is None else len(found.path) for found in walks])
        for tree, found in drafted:
            self.stats.count(tree, found)
        self.pace.record([(tree, found.path) for tree, found in drafted], time.perf_counter() - begin)

    def _verify(self, trees: list[Tree], how: AbstractContextManager[Any], phase: str) -> list[Walk | None]:
        """Read the trees, follow them, keep the paths; None for a row that had ended before."""
        with self.stats.timed(phase, self._recorder_of(self.target.model)), how:
            logits = self.target.read([text.tokens[-1] for text in self.texts], trees)
            walks = self._follow(trees, logits)
            self.target.keep(max(map(len, trees)), [None if found is None else found.kept for found in walks])
        self.stats.steps += 1
        return walks

    def _follow(self, trees: Sequence[Tree], logits: Tensor) -> list[Walk | None]:
        """Let every running text grow along its tree."""
        walks: list[Walk | None] = []
        for row, (tree, text) in enumerate(zip(trees, self.texts, strict=True)):
            before = len(text)
            choose = self._choose(row, logits[row])
            walks.append(walk(tree, text, choose, self._stop) if self.running[row] else None)
            self.stats.tokens += len(text) - before
        self.running = [found is not None and not found.stopped for found in walks]
        last = torch.tensor([0 if found is None else 1 + found.last for found in walks], device=logits.device)
        self.verification.passed(last)
        if self.target.hidden is not None:
            self._hidden = self.target.hidden[torch.arange(len(walks), device=logits.device), last]
        return walks

    def _recorder_of(self, model: PreTrainedModel | None) -> Recorder | None:
        """What counts the bytes that a model reads; None: nobody wants to know."""
        binding = None if self.verification.plan.look_every is None else binding_of(model or self.target.model)
        return None if binding is None else binding.recorder

    def _choose(self, row: int, logits: Tensor) -> Choose:
        return make_choose(logits, self.wanted.processors, self.wanted.do_sample, row, len(self.texts))

    def _check_is_due(self) -> bool:
        if self.check_every is None:
            return False
        unchecked = [len(text) - checked for text, checked in zip(self.texts, self._checked, strict=True)]
        ended = [count for count, goes_on in zip(unchecked, self.running, strict=True) if not goes_on]
        return max(unchecked) >= self.check_every or any(ended)

    def _check(self) -> None:
        """Read densely what was said since the last check: the draft is what the pages made the target say."""
        trees = []
        self.running = [
            len(text) > checked or goes_on
            for text, checked, goes_on in zip(self.texts, self._checked, self.running, strict=True)
        ]
        for text, checked in zip(self.texts, self._checked, strict=True):
            trees.append(Tree.chain(text.tokens[checked:]))
            self.stats.tokens -= len(text) - checked
            text.crop(checked)
        self.target.crop(
            [
                self._uncached + checked - 1 if goes_on else have
                for checked, goes_on, have in zip(self._checked, self.running, self.target.lengths, strict=True)
            ]
        )
        walks = self._verify(trees, self.verification.densely(), "check")
        for tree, found in zip(trees, walks, strict=True):
            self.stats.checked += len(tree)
            self.stats.retracted += len(tree) - (0 if found is None else len(found.path))
        self._checked = [len(text) for text in self.texts]

    def _stream(self) -> None:
        """Hand over the tokens that are going to stay."""
        if self.wanted.streamer is None:
            return
        settled = self._checked[0] if self.check_every is not None else len(self.texts[0])
        for token in self.texts[0].tokens[self._streamed : settled]:
            self.wanted.streamer.put(torch.tensor([token]))
        self._streamed = settled
