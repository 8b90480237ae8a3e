"""How much is drafted, as acceptance goes up and down."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oval_spec import SpeculativeStats, Tree, decode
from oval_spec.pace import LONGEST_PAUSE, PLAIN_PASSES, Pace
from oval_spec.verify import Walk
from tests.core.tiny_models import llama, prompt
from tests.spec.drafts import LineDrafter, plain, speculative


def sizes(pace: Pace, rate: float, steps: int, cost: float = 0.1) -> list[int]:
    """Of the drafts of so many steps.

    Args:
        rate: part of each draft that is accepted.
        cost: of a token of a draft, in passes without a draft.
    """
    said = []
    for _ in range(steps):
        said.append(pace.next_size())
        pace.record(said[-1], rate * said[-1], 0.03 * (1 + cost * said[-1]))
    return said


def test_the_first_draft_is_as_large_as_may_be() -> None:
    assert sizes(Pace(8), 1.0, 4) == [0] * PLAIN_PASSES + [8, 8]
    assert Pace(8, by_clock=False).next_size() == 8


@pytest.mark.parametrize("by_clock", [False, True])
def test_what_is_always_refused_is_soon_drafted_hardly_ever(by_clock: bool) -> None:
    said = sizes(Pace(8, by_clock=by_clock), 0.0, 1000)
    drafted = [step for step, size in enumerate(said) if size]
    assert [said[step] for step in drafted[:8]] == [8, 8, 4, 4, 2, 2, 1, 1]
    pauses = [later - earlier for earlier, later in pairwise(drafted[6:])]
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE + 1
    assert len(drafted) < 30
    assert sum(map(bool, said[100:200])) <= 3
    lost = sum(0.1 * size for size in said[:256])
    assert lost < 256 / 50


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
    assert set(sizes(Pace(7), 1.0, 50)[PLAIN_PASSES:]) == {7}


def test_what_is_dear_has_to_bring_more() -> None:
    assert sizes(Pace(8), 0.25, 100, cost=0.05)[-1] == 8  # 2 tokens for 0.4 passes
    assert sum(sizes(Pace(8), 0.25, 400, cost=0.5)[-200:]) < 10  # 2 tokens for 4 passes


def test_a_slow_first_pass_does_not_count() -> None:
    pace = Pace(4)
    for seconds in (1.0, 0.02):
        pace.record(pace.next_size(), 0, seconds)
    for _ in range(2):
        pace.record(pace.next_size(), 0.5, 0.04)
    assert pace.next_size() == 2  # half a token for a whole pass


def test_without_adapting_nothing_changes() -> None:
    assert set(sizes(Pace(6, adapts=False), 0.0, 50)) == {6}


@given(st.integers(1, 20), st.booleans(), st.lists(st.tuples(st.floats(0, 1), st.floats(-0.1, 3)), max_size=60))
def test_bounds(most: int, by_clock: bool, steps: list[tuple[float, float]]) -> None:
    pace = Pace(most, by_clock=by_clock)
    for rate, cost in steps:
        assert 0 <= sizes(pace, rate, 1, max(cost, -0.9 / most))[0] <= most


@pytest.mark.parametrize(("right", "adapt"), [(0.0, True), (0.0, False), (1.0, True)])
def test_in_a_generation(right: float, adapt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "Pace", lambda most, adapts, by_clock: Pace(most, adapts, by_clock=False))
    model, text = llama(layers=1), prompt(20)
    answer = plain(model, text, max_new_tokens=80)
    out = speculative(model, text, LineDrafter(answer, right), max_new_tokens=80, adapt=adapt)
    assert out.sequences.tolist() == answer.tolist()
    if right:
        assert out.stats.accepted_mean > 4
        assert out.stats.steps < 20
    else:
        assert out.stats.steps == 79
        assert out.stats.drafted_steps == (78 if not adapt else 13)  # 9 9 5 3 3 2 1 1, then pauses


@pytest.mark.parametrize(
    ("rows", "options", "by_clock"),
    [
        (1, {}, True),
        (2, {}, True),
        (1, {"do_sample": True}, True),
        (2, {"do_sample": True}, False),
        (1, {"mode": "pages"}, False),
    ],
)
def test_the_clock_decides_nothing_about_the_text(
    rows: int, options: dict[str, Any], by_clock: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def noted(most: int, adapts: bool, by_clock: bool) -> Pace:
        asked.append(by_clock)
        return Pace(most, adapts, by_clock)

    monkeypatch.setattr(decode, "Pace", noted)
    model, text = llama(layers=1), prompt(20).repeat(rows, 1)
    speculative(model, text, LineDrafter(text, 0.0), max_new_tokens=4, **options)
    assert asked == [by_clock]


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
