"""Draft by looking up what followed the last tokens when they occurred before."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oval_core.checks import check_count
from oval_spec.drafters.base import Drafter, Seen
from oval_spec.page_sets import Ask
from oval_spec.tree import Tree


class PromptLookupDrafter(Drafter):
    """The text's last n-gram, looked up in the text itself; the draft is what followed its latest occurrence that
    enough tokens follow, or its first one.

    Args:
        most_tokens: of a draft.
        ngram_tokens: of the longest n-gram that is looked up; shorter ones follow, down to 1.

    Raises:
        TypeError, ValueError: not an integer of at least 1.
    """

    name = "prompt lookup"

    def __init__(self, most_tokens: int = 10, ngram_tokens: int = 3) -> None:
        self.most_tokens = check_count("most_tokens", most_tokens)
        self.ngram_tokens = check_count("ngram_tokens", ngram_tokens)
        self._matched: list[range] = []

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`."""
        found = [
            self._lookup(np.array(text.tokens), most) if goes_on else (Tree(), range(0))
            for text, goes_on in zip(seen.texts, seen.running, strict=True)
        ]
        self._matched = [span for _, span in found]
        return [tree for tree, _ in found]

    def expects(self, layer_idx: int, ask: Ask) -> Tensor:
        """See `Drafter.expects`: where the n-gram was found, and what followed it."""
        tokens = torch.zeros(len(self._matched), 1, max(span.stop for span in self._matched), dtype=torch.bool)
        for row, span in enumerate(self._matched):
            tokens[row, 0, span.start : span.stop] = True
        return tokens

    def _lookup(self, tokens: np.ndarray, most: int) -> tuple[Tree, range]:
        """The draft, and the positions that it comes from."""
        for length in range(min(self.ngram_tokens, len(tokens) - 1), 0, -1):
            begins = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            found = np.flatnonzero((begins == tokens[-length:]).all(-1))
            if len(found):
                whole = found[found + length + most <= len(tokens)]  # the last of a repetition is followed by little
                begin = int(whole[-1] if len(whole) else found[0])
                stop = min(begin + length + most, len(tokens))
                return Tree.chain(tokens[begin + length : stop].tolist()), range(begin, stop)
        return Tree(), range(0)
