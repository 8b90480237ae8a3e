"""Notes of a row, against a naive list."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oval_core.page_table import PageTable
from oval_core.row_memory import RowMemory


@given(st.lists(st.tuples(st.sampled_from(("add", "crop", "copy")), st.integers(0, 1), st.integers(0, 20))))
def test_notes_are_those_of_a_naive_list(moves: list[tuple[str, int, int]]) -> None:
    memory, naive, most = RowMemory(), dict[int, list[tuple[int, Any]]](), 3
    for number, (move, owner, token) in enumerate(moves):
        if move == "add":
            memory.add(owner, token, number, most)
            naive[owner] = ([note for note in naive.get(owner, []) if note[0] < token] + [(token, number)])[-most:]
        elif move == "crop":
            memory.crop(token)
            naive = {name: [note for note in notes if note[0] < token] for name, notes in naive.items()}
        else:
            old, memory = memory, memory.copy()
            old.crop(0)
        for name in (0, 1):
            assert memory.notes(name) == naive.get(name, [])
            assert memory.last(name) == next(reversed(naive.get(name, [])), None)


def test_pages_that_are_opened_again_take_along_what_was_noted_since() -> None:
    table = PageTable(4, length=10)
    table.mark(4, 8, 0, blocks=[[0, 2], [1, 3]])
    table.seal()
    for token in (3, 6, 9):
        table.memory.add("who", token, None, most=9)
    copy = table.copy()
    table.reopen(7)
    assert [token for token, _ in table.memory.notes("who")] == [3]
    copy.crop(9)
    assert [token for token, _ in copy.memory.notes("who")] == [3, 6]
