"""How much to draft: as long as it pays.

A draft makes a pass of the target longer by a share `extra` of a pass without one, and it saves as many passes as its
tokens are accepted. It pays as long as those are more than `extra`; a larger one is tried where they are twice as many.
"""

from __future__ import annotations

from collections import deque

PLAIN_PASSES = 2  # without a draft, to begin with: the first of them may be slow
TOKEN_COST = 0.1  # of a pass, for each token of a draft, where the clock is not asked
PASSES = 5  # the quickest of so many counts: other work on the machine only makes them slower
MEMORY = 0.7  # weight of past acceptance
LONGEST_PAUSE = 64  # steps


class Pace:
    """Watches what drafts cost and bring, and sets the size of the next one.

    Args:
        most: nodes of the largest draft.
        adapts: False: always the largest.
        by_clock: False: every token of a draft is taken to cost `TOKEN_COST`, so that sizes are the same in every run.
    """

    def __init__(self, most: int, adapts: bool = True, by_clock: bool = True) -> None:
        self.most, self.adapts, self.by_clock = most, adapts, by_clock
        self._size, self._accepted = most, -1.0  # < 0: nothing is known yet
        self._plain, self._drafted = deque[float](maxlen=PASSES), deque[float](maxlen=PASSES)
        self._pause, self._waits = 1, 0

    def next_size(self) -> int:
        """Nodes of the next draft; 0: none. To be asked once a step."""
        if self._waits:
            self._waits -= 1
            return 0
        if self.adapts and self.by_clock and len(self._plain) < PLAIN_PASSES:
            return 0
        return self._size

    def record(self, size: int, accepted: float, seconds: float) -> None:
        """How the last step went.

        Args:
            size: nodes of the largest draft of a row; 0: nothing was drafted.
            accepted: tokens, the mean over the rows that had a draft.
            seconds: that drafting and reading took.
        """
        if not self.adapts:
            return
        if not size:
            self._plain.append(seconds)
            return
        self._drafted.append(seconds)
        extra = min(self._drafted) / min(self._plain) - 1 if self.by_clock else TOKEN_COST * size
        past = 1.5 * extra if self._accepted < 0 else self._accepted  # neither good nor poor
        self._accepted = MEMORY * past + (1 - MEMORY) * accepted
        if self._accepted >= 2 * extra:
            self._become(min(2 * self._size, self.most))
            self._pause = 1
        elif self._accepted < extra and self._size > 1:
            self._become((self._size + 1) // 2)
        elif self._accepted < extra:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._waits = self._pause

    def _become(self, size: int) -> None:
        if size != self._size:
            self._size = size
            self._drafted.clear()
