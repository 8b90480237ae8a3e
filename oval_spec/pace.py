"""How much to draft: the size that brings most tokens a second.

A pass over a draft of some size takes its time and brings the tokens that are accepted, and one more. Nodes of a draft
stand in the order of their use, so that one draft tells what smaller ones would have brought; a larger one would have
brought the same, or, where this one was accepted to its end, as many more as are accepted in a row by now. Where
nothing pays, nothing is drafted for a while.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

from oval_spec.tree import Tree

PLAIN_PASSES = 2  # to begin with: the first of them may be slow
PASSES = 5  # of each size, the quickest counts: other work on the machine only makes them slower
FRESH_STEPS = 64  # older measurements are forgotten: contexts grow
TOKEN_COST = 0.1  # of a pass without a draft, for each token of one that was not timed
PRIOR = 1.5  # accepted tokens to begin with, in those that it takes to pay
MEMORY = 0.9  # weight of past acceptance
LONGEST_PAUSE = 64  # steps


class Pace:
    """Watches what drafts cost and bring, and sets the size of the next one.

    Args:
        most: nodes of the largest draft; others have half of that, a quarter, ..., 1.
        adapts: False: always the largest.
        by_clock: False: every token of a draft is taken to cost `TOKEN_COST`, so that sizes are the same in every run.
    """

    def __init__(self, most: int, adapts: bool = True, by_clock: bool = True) -> None:
        self.most, self.adapts, self.by_clock = most, adapts, by_clock
        self._sizes = [most]
        while self._sizes[-1] > 1:
            self._sizes.append((self._sizes[-1] + 1) // 2)
        self._accepted: dict[int, float] = {}
        self._hits, self._misses = 1.0, 1.0  # drafted tokens after a right one
        self._timed: defaultdict[int, deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=PASSES))
        self._step, self._pause, self._waits = 0, 1, 0

    def next_size(self) -> int:
        """Nodes of the next draft; 0: none. To be asked once a step."""
        if not self.adapts:
            return self.most
        self._step += 1
        if self._waits:
            self._waits -= 1
            return 0
        if self.by_clock and (self._step <= PLAIN_PASSES or not self._fresh(0)):
            return 0
        return max(self._sizes, key=self._rate)

    def record(self, drafts: Sequence[tuple[Tree, Sequence[int]]], seconds: float) -> None:
        """How the last step went.

        Args:
            drafts: of each row that had one, the draft and the nodes that were accepted.
            seconds: that drafting and reading took.
        """
        size = max((len(tree) for tree, _ in drafts), default=0)
        size = min((fits for fits in self._sizes if fits >= size), default=self.most) if size else 0
        self._timed[size].append((self._step, seconds))
        if not size or not self.adapts:
            return
        self._hits = MEMORY * self._hits + sum(len(path) for _, path in drafts) / len(drafts)
        self._misses = MEMORY * self._misses + sum(not _ran_out(*draft) for draft in drafts) / len(drafts)
        for other in self._sizes:
            found = sum(self._would_accept(*draft, other / size) for draft in drafts) / len(drafts)
            self._accepted[other] = MEMORY * self._expected(other) + (1 - MEMORY) * found
        if max(map(self._rate, self._sizes)) > 1 / self._cost(0):
            self._pause = 1
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._waits = self._pause

    def _rate(self, size: int) -> float:
        """Tokens a second to be expected."""
        return (1 + self._expected(size)) / self._cost(size)

    def _expected(self, size: int) -> float:
        """Tokens that are accepted."""
        return self._accepted.get(size, PRIOR * max(0.0, self._cost(size) / self._cost(0) - 1))

    def _cost(self, size: int) -> float:
        """Seconds of a pass; in passes without a draft, where the clock is not asked."""
        if not self.by_clock:
            return 1 + TOKEN_COST * size
        timed = self._fresh(size)
        return min(timed) if timed else (1 + TOKEN_COST * size) * self._cost(0)

    def _fresh(self, size: int) -> list[float]:
        return [seconds for step, seconds in self._timed[size] if self._step - step < FRESH_STEPS]

    def _would_accept(self, tree: Tree, path: Sequence[int], part: float) -> float:
        """Tokens that `part` of a draft would have brought, or a draft so many times larger."""
        if part <= 1:
            return sum(node < part * len(tree) for node in path)
        right = self._hits / (self._hits + self._misses)
        more = round((part - 1) * len(tree)) if _ran_out(tree, path) else 0
        return len(path) + sum(right**depth for depth in range(1, more + 1))


def _ran_out(tree: Tree, path: Sequence[int]) -> bool:
    """Whether all of a draft down to a leaf was accepted."""
    return bool(path) and path[-1] not in tree.parents
