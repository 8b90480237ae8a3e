"""Draft with Medusa heads: a tree of candidates from the hidden state that gave the root."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oval_core.checks import check_count
from oval_spec.cached_model import CachedModel, head_of
from oval_spec.drafters.base import Drafter, Seen
from oval_spec.medusa_heads import MedusaHeads
from oval_spec.page_sets import Ask
from oval_spec.predicted_queries import PredictedQueries
from oval_spec.text import Text
from oval_spec.tree import Tree, check_paths, likely_paths

MOST_TOKENS = 12
UNMEASURED = tuple(0.5 ** (1 + rank) for rank in range(10))  # by rank, for every head whose accuracies nobody measured


class MedusaDrafter(Drafter):
    """Heads beside the target's own one guess the tokens after the root; the best guesses of each make one tree.

    Args:
        heads: for the target.
        paths: shape of the tree, see `oval_spec.tree.check_paths`: a path names the rank of each of its nodes among the
            candidates of head 0, head 1, ...; the most useful ones first, because small drafts are made of the first
            ones. None: the most likely nodes by `heads.accuracies`, or if those were not measured, by accuracies that
            halve from rank to rank (1/2, 1/4, ...), which gives chains of best candidates and their nearest siblings.
        most_tokens: nodes of a draft; None: all of `paths`, or `MOST_TOKENS` without.

    Raises:
        TypeError, ValueError: an argument is out of range, or a path is deeper than there are heads.
    """

    name = "Medusa"
    needs_hidden = True

    def __init__(
        self, heads: MedusaHeads, paths: Sequence[Sequence[int]] | None = None, most_tokens: int | None = None
    ) -> None:
        if not isinstance(heads, MedusaHeads):
            raise TypeError(f"heads must be MedusaHeads, got {type(heads).__name__}")
        if most_tokens is not None:
            check_count("most_tokens", most_tokens)
        if paths is None:
            accuracies: Sequence[Sequence[float]] = heads.accuracies or [UNMEASURED] * heads.num_heads
            paths = likely_paths(accuracies, most_tokens or MOST_TOKENS)
        self.heads, self.paths = heads, check_paths(paths)[:most_tokens]
        if not self.paths:
            raise ValueError("paths must name at least one node, got none")
        deepest = max(self.paths, key=len)
        if len(deepest) > heads.num_heads:
            raise ValueError(f"path {deepest} needs {len(deepest)} Medusa heads, got {heads.num_heads}")
        self.most_tokens = len(self.paths)
        self._target: CachedModel | None = None
        self._ready: MedusaHeads | None = None  # on the device and in the dtype of the hidden states
        self._says: Callable[[Tensor], Tensor] | None = None
        self._queries: PredictedQueries | None = None  # None: the target's cannot be predicted
        self._states: Tensor | None = None  # of the last draft, [depths, B, hidden]

    def check(self, target: PreTrainedModel) -> None:
        """See `Drafter.check`."""
        self.heads.check(target)
        words = self.heads.words
        widest, choice = max(map(max, self.paths)), head_of(target).out_features if words is None else len(words)
        if widest >= choice:
            raise ValueError(f"ranks of paths must be below the vocabulary of {choice}, got {widest}")

    @contextmanager
    def begin(self, target: CachedModel, model_inputs: dict[str, Any], texts: Sequence[Text]) -> Iterator[None]:
        """See `Drafter.begin`."""
        assert target.hidden is not None
        self._target, self._ready = target, deepcopy(self.heads).to(target.hidden)
        self._says = self._ready.speaker(head_of(target.model))
        with suppress(ValueError):
            self._queries = PredictedQueries(target.model)
        try:
            yield
        finally:
            self._target, self._ready, self._says, self._queries, self._states = None, None, None, None, None

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`."""
        assert seen.hidden is not None
        paths = self.paths[:most]
        candidates = self._candidates(seen.hidden, max(map(len, paths)), 1 + max(map(max, paths)))
        return [
            Tree.grow(paths, [depth[row] for depth in candidates]) if goes_on else Tree()
            for row, goes_on in enumerate(seen.running)
        ]

    def expects(self, layer_idx: int, ask: Ask) -> Tensor | None:
        """See `Drafter.expects`: what the target's router would read for the heads' predicted states."""
        if self._queries is None or self._states is None or self._target is None:
            return None
        states = self._states.transpose(0, 1)  # [B, depths, hidden]
        return ask(self._queries.of_layer(layer_idx, states, self._target.positions_ahead(states.shape[1])))

    def _candidates(self, hidden: Tensor, depths: int, ranks: int) -> list[list[list[int]]]:
        """The best tokens of each head, best first, `[depths, B, ranks]`, from the hidden states `[B, hidden]`."""
        assert self._ready is not None
        assert self._says is not None
        assert self._target is not None
        noted = self._target.hidden
        self._states = self._ready.states(hidden, depths)
        best = torch.topk(self._says(self._states), ranks).indices
        self._target.hidden = noted  # whoever watches the target's head may have seen our states, too
        candidates: list[list[list[int]]] = (best if self._ready.words is None else self._ready.words[best]).tolist()
        return candidates
