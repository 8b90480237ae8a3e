"""What routers remember of one row of one layer from step to step."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Any


class RowMemory:
    """Notes that end when the row is cropped to before them; every owner sees its own.

    Copies of a row (beams) share the values of their notes, so that these must never be changed in place.
    """

    def __init__(self) -> None:
        self._notes: dict[Hashable, deque[tuple[int, Any]]] = {}

    def add(self, owner: Hashable, token: int, value: Any, most: int) -> None:
        """Note `value` at the row's token number `token`, in place of notes at it or after it; keep the last `most`."""
        notes = self._notes.setdefault(owner, deque())
        _crop(notes, token)
        notes.append((token, value))
        while len(notes) > most:
            notes.popleft()

    def notes(self, owner: Hashable) -> list[tuple[int, Any]]:
        """Tokens and values of what is noted, oldest first."""
        return [*self._notes.get(owner, ())]

    def last(self, owner: Hashable) -> tuple[int, Any] | None:
        """Token and value of the newest note, or None."""
        notes = self._notes.get(owner)
        return notes[-1] if notes else None

    def crop(self, length: int) -> None:
        """Forget what was noted at the tokens from `length` on."""
        for notes in self._notes.values():
            _crop(notes, length)

    def copy(self) -> RowMemory:
        """Another memory with the same notes."""
        copy = RowMemory()
        copy._notes = {owner: notes.copy() for owner, notes in self._notes.items()}
        return copy


def _crop(notes: deque[tuple[int, Any]], length: int) -> None:
    while notes and notes[-1][0] >= length:
        notes.pop()
