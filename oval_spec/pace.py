"""How much to draft: less where drafts are refused, nothing where they keep being refused."""

from __future__ import annotations

POOR, GOOD = 0.35, 0.8  # accepted tokens a draft
MEMORY = 0.7  # weight of the past
LONGEST_PAUSE = 64  # steps


class Pace:
    """Watches acceptance and sets the size of the next draft.

    Args:
        most: nodes of the largest draft.
        adapts: False: always the largest.
    """

    def __init__(self, most: int, adapts: bool = True) -> None:
        self.most, self.adapts = most, adapts
        self._size, self._accepted = most, (POOR + GOOD) / 2
        self._pause, self._waits = 1, 0

    def next_size(self) -> int:
        """Nodes of the next draft; 0: none. To be asked once a step."""
        if self._waits:
            self._waits -= 1
            return 0
        return self._size

    def record(self, accepted: float) -> None:
        """The last draft, which was not empty, had so many tokens accepted (the mean over the rows)."""
        if not self.adapts:
            return
        self._accepted = MEMORY * self._accepted + (1 - MEMORY) * accepted
        if self._accepted >= GOOD:
            self._size, self._pause = min(2 * self._size, self.most), 1
        elif self._accepted < POOR and self._size > 1:
            self._size = (self._size + 1) // 2
        elif self._accepted < POOR:
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._waits = self._pause
