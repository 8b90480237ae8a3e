"""How much is drafted, as acceptance goes up and down."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oval_spec import SpeculativeStats, Tree
from oval_spec.pace import LONGEST_PAUSE, Pace
from oval_spec.verify import Walk
from tests.core.tiny_models import llama, prompt
from tests.spec.drafts import LineDrafter, plain, speculative


def sizes(pace: Pace, rate: float, steps: int) -> list[int]:
    """Of the drafts of so many steps; of each so large a part is accepted."""
    said = []
    for _ in range(steps):
        said.append(pace.next_size())
        if said[-1]:
            pace.record(rate * said[-1])
    return said


def test_the_first_draft_is_as_large_as_may_be() -> None:
    assert Pace(8).next_size() == 8


def test_what_is_always_refused_is_soon_drafted_hardly_ever() -> None:
    said = sizes(Pace(8), 0.0, 1000)
    drafted = [step for step, size in enumerate(said) if size]
    assert [said[step] for step in drafted[:6]] == [8, 8, 4, 2, 1, 1]
    pauses = [later - earlier for earlier, later in pairwise(drafted)]
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE + 1
    assert len(drafted) < 30
    assert sum(map(bool, said[100:200])) <= 3


def test_defeats_grow_slowly() -> None:
    def drafts(steps: int) -> int:
        return sum(map(bool, sizes(Pace(8), 0.0, steps)))

    assert drafts(2000) - drafts(1000) <= 1000 // LONGEST_PAUSE + 1


def test_good_drafts_bring_it_back() -> None:
    pace = Pace(8)
    sizes(pace, 0.0, 100)
    said = sizes(pace, 1.0, 3 * LONGEST_PAUSE + 20)
    assert said[-5:] == [8] * 5


def test_good_drafts_stay_as_large_as_may_be() -> None:
    assert set(sizes(Pace(7), 1.0, 50)) == {7}


def test_without_adapting_nothing_changes() -> None:
    assert set(sizes(Pace(6, adapts=False), 0.0, 50)) == {6}


@given(st.integers(1, 20), st.lists(st.floats(0, 1), max_size=60))
def test_bounds(most: int, rates: list[float]) -> None:
    pace = Pace(most)
    for rate in rates:
        assert 0 <= sizes(pace, rate, 1)[0] <= most


@pytest.mark.parametrize(("right", "adapt"), [(0.0, True), (0.0, False), (1.0, True)])
def test_in_a_generation(right: float, adapt: bool) -> None:
    model, text = llama(layers=1), prompt(20)
    answer = plain(model, text, max_new_tokens=80)
    out = speculative(model, text, LineDrafter(answer, right), max_new_tokens=80, adapt=adapt)
    assert out.sequences.tolist() == answer.tolist()
    if right:
        assert out.stats.accepted_mean > 4
        assert out.stats.steps < 20
    else:
        assert out.stats.steps == 79
        assert out.stats.drafted_steps == (78 if not adapt else 11)  # 9 9 5 3 2 1, then pauses


class TestStats:
    def test_counts(self) -> None:
        stats = SpeculativeStats()
        fork = Tree((5, 6, 7, 8), (-1, -1, 1, 2))
        for path in ([1, 2], [0], []):
            stats.count(fork, Walk(path, path, False))
        stats.count(Tree(), Walk([], [], False))
        assert stats.drafted_steps == 3
        assert stats.accepted == {2: 1, 1: 1, 0: 1}
        assert stats.accepted_mean == 1
        assert stats.tried_at == {1: 3, 2: 1, 3: 1}
        assert stats.accept_rate == {1: 2 / 3, 2: 1, 3: 0}

    def test_nothing_is_tried_after_the_end_of_the_text(self) -> None:
        stats = SpeculativeStats()
        stats.count(Tree.chain([5, 6, 7]), Walk([0, 1], [0], True))
        stats.count(Tree.chain([5, 6, 7]), Walk([0], [0], True))  # the target ended it instead of 6
        assert stats.accept_rate == {1: 1, 2: 1 / 2}
        assert stats.accepted == {2: 1, 1: 1}

    def test_nothing_was_drafted(self) -> None:
        assert SpeculativeStats().accepted_mean == 0
        assert SpeculativeStats().accept_rate == {}

    def test_time_counts_when_it_fails(self) -> None:
        stats = SpeculativeStats()
        with pytest.raises(KeyError), stats.timed("draft"):
            raise KeyError
        assert stats.seconds["draft"] > 0
