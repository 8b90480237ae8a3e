"""Draft by looking up what followed the last tokens when they occurred before."""

from __future__ import annotations

import numpy as np

from oval_spec.drafters.base import Drafter, Seen, check_count
from oval_spec.tree import Tree


class PromptLookupDrafter(Drafter):
    """The text's last n-gram, looked up in the text itself; what followed its latest occurrence is the draft.

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

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`."""
        return [
            self._lookup(np.array(text.tokens), most) if goes_on else Tree()
            for text, goes_on in zip(seen.texts, seen.running, strict=True)
        ]

    def _lookup(self, tokens: np.ndarray, most: int) -> Tree:
        for length in range(min(self.ngram_tokens, len(tokens) - 1), 0, -1):
            begins = np.lib.stride_tricks.sliding_window_view(tokens[:-1], length)
            found = np.flatnonzero((begins == tokens[-length:]).all(-1))
            if len(found):
                follows = int(found[-1]) + length
                return Tree.chain(tokens[follows : follows + most].tolist())
        return Tree()
