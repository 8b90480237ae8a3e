"""How much is drafted, as acceptance goes up and down."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oval_spec import SpeculativeStats, Tree, decode
from oval_spec.pace import FRESH_STEPS, LONGEST_PAUSE, PLAIN_PASSES, Pace
from oval_spec.verify import Walk
from tests.core.tiny_models import llama, prompt
from tests.spec.drafts import LineDrafter, plain, speculative


def sizes(pace: Pace, right: float, steps: int, cost: float = 0.1, seed: int = 0) -> list[int]:
    """Of the drafts of so many steps.

    Args:
        right: how likely a token of a draft is right where the one before it was.
        cost: of a token of a draft, in passes without a draft.
    """
    rng, said = random.Random(seed), []
    for _ in range(steps):
        said.append(pace.next_size())
        accepted = next((depth for depth in range(said[-1]) if rng.random() >= right), said[-1])
        drafts = [(Tree.chain([7] * said[-1]), range(accepted))] if said[-1] else []
        pace.record(drafts, 0.03 * (1 + cost * said[-1]))
    return said


def test_the_first_draft_is_as_large_as_may_be() -> None:
    assert sizes(Pace(8), 1.0, 4) == [0] * PLAIN_PASSES + [8, 8]
    assert Pace(8, by_clock=False).next_size() == 8


@pytest.mark.parametrize("by_clock", [False, True])
def test_what_is_always_refused_is_soon_drafted_hardly_ever(by_clock: bool) -> None:
    said = sizes(Pace(8, by_clock=by_clock), 0.0, 1000)
    drafted = [step for step, size in enumerate(said) if size]
    assert [said[step] for step in drafted[:6]] == [8, 8, 8, 8, 1, 1]
    pauses = [later - earlier for earlier, later in pairwise(drafted[3:])]
    assert pauses == sorted(pauses)
    assert max(pauses) == LONGEST_PAUSE + 1
    assert len(drafted) < 30
    assert sum(map(bool, said[100:200])) <= 3
    assert sum(0.1 * size for size in said[:256]) < 256 / 50, "seconds lost"


def test_defeats_grow_slowly() -> None:
    def drafts(steps: int) -> int:
        return sum(map(bool, sizes(Pace(8), 0.0, steps)))

    assert drafts(2000) - drafts(1000) <= 1000 // LONGEST_PAUSE + 1


def test_good_drafts_bring_it_back() -> None:
    pace = Pace(8)
    sizes(pace, 0.0, 100)
    said = sizes(pace, 1.0, 2 * LONGEST_PAUSE)
    assert said[-5:] == [8] * 5


def test_good_drafts_stay_as_large_as_may_be() -> None:
    said = sizes(Pace(7), 1.0, 200)[PLAIN_PASSES:]
    assert {*said} == {0, 7}
    assert said.count(0) <= 200 // FRESH_STEPS, "plain passes, to know what they cost by now"


@pytest.mark.parametrize(("right", "cost"), [(0.7, 0.02), (0.7, 0.1), (0.7, 0.3), (0.4, 0.1), (0.4, 0.3)])
def test_it_finds_the_size_that_pays_most(right: float, cost: float) -> None:
    """Against every fixed size, on average over runs."""

    def tokens_a_second(size: int) -> float:
        return (1 + sum(right**depth for depth in range(1, size + 1))) / (1 + cost * size)

    best = max(tokens_a_second(size) for size in (0, 1, 2, 4, 8))
    passes = [size for seed in range(5) for size in sizes(Pace(8), right, 400, cost, seed)]
    tokens = sum(1 + sum(right**depth for depth in range(1, size + 1)) for size in passes)
    seconds = sum(1 + cost * size for size in passes)
    assert tokens / seconds > 0.9 * best


def test_what_a_size_costs_is_measured_for_that_size() -> None:
    pace, costs = Pace(8), {0: 1.0, 1: 1.7, 2: 2.1, 4: 1.3, 8: 2.5}
    said = []
    for _ in range(150):
        said.append(pace.next_size())
        pace.record([(Tree.chain([7] * said[-1]), range(min(said[-1], 1)))] if said[-1] else [], costs[said[-1]])
    assert said[20:].count(4) > 110, "one token for 0.3 passes; others are tried now and then"


def test_a_slow_first_pass_does_not_count() -> None:
    pace = Pace(1)
    for seconds in (1.0, 0.02):
        assert pace.next_size() == 0
        pace.record([], seconds)
    for _ in range(4):
        assert pace.next_size() == 1
        pace.record([(Tree.chain([7]), [])], 0.04)
    assert pace.next_size() == 0, "a whole pass for nothing"


def test_small_drafts_are_judged_by_what_a_large_one_shows() -> None:
    pace, fork = Pace(8), Tree((5, 6, 7, 8), (-1, -1, 0, 2))
    assert [pace._would_accept(fork, [0, 2, 3], part) for part in (0.25, 0.5, 0.75, 1)] == [1, 1, 2, 3]
    assert [pace._would_accept(fork, [1], part) for part in (0.25, 0.5, 1)] == [0, 1, 1]


def test_a_larger_draft_is_worth_more_where_a_small_one_ran_out() -> None:
    pace, fork = Pace(8), Tree((5, 6, 7, 8), (-1, -1, 0, 2))
    assert pace._would_accept(fork, [0, 2, 3], 1.5) == 3 + 1 / 2 + 1 / 4, "every other one, as nothing is known"
    assert pace._would_accept(fork, [0], 2) == 1, "it was refused"
    assert pace._would_accept(fork, [], 2) == 0


def test_without_adapting_nothing_changes() -> None:
    assert set(sizes(Pace(6, adapts=False), 0.0, 50)) == {6}


@given(st.integers(1, 20), st.booleans(), st.lists(st.tuples(st.floats(0, 1), st.floats(-0.1, 3)), max_size=60))
def test_bounds(most: int, by_clock: bool, steps: list[tuple[float, float]]) -> None:
    pace = Pace(most, by_clock=by_clock)
    for right, cost in steps:
        assert 0 <= sizes(pace, right, 1, max(cost, -0.9 / most))[0] <= most


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
        assert out.stats.drafted_steps == (78 if not adapt else 9)  # 9 9 9 9, then 1 after every pause


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
