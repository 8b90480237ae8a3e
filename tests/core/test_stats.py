"""The figures of `stats()` on cases that can be computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oval_core import pages_read
from oval_core.pages_read import PagesRead
from oval_core.routers import ROUTERS, Selection
from oval_core.stats import Recorder, TraceEntry
from tests.core.scenes import DIM, HEADS, VALUE_DIM, Attention, Tokens, filled, random_tokens, small_config

TOKEN_BYTES = HEADS * (DIM + VALUE_DIM) * 4
COARSE_BYTES = (DIM + 4) + (DIM // 2 + 4) + 4


def report_of(tokens: Tokens, padding: list[int] | None = None, **config: Any) -> dict[str, Any]:
    return filled(small_config(**config), tokens, padding).recorder.report()


def test_nothing_was_read() -> None:
    report = Recorder(small_config()).report()
    zero = ("steps", "context_tokens", "bytes_read", "bytes_dense", "bytes_budgeted", "metadata_bytes")
    empty: dict[str, dict[str, int]] = {"dense_steps": {}, "impl_fallbacks": {}, "router_counts": {}}
    assert {name: report[name] for name in zero} == dict.fromkeys(zero, 0)
    assert {name: report[name] for name in empty} == empty
    assert all(value is None for name, value in report.items() if name not in (*zero, *empty))


def test_bytes_of_one_step() -> None:
    """83 tokens: 10 pages of 8 and 3 open tokens; 4 pages are read, the open one included."""
    report = report_of(random_tokens(1, 83), router="box")
    assert report["bytes_dense"] == 83 * TOKEN_BYTES
    assert report["metadata_bytes"] == HEADS * 10 * COARSE_BYTES
    assert report["bytes_read"] == (3 * 8 + 3) * TOKEN_BYTES + report["metadata_bytes"]
    assert report["read_ratio"] == report["bytes_read"] / report["bytes_dense"]
    assert report["bytes_budgeted"] == 4 * 8 * TOKEN_BYTES
    assert (report["pages"], report["pages_read_mean"], report["context_tokens"]) == (11, 4, 83)
    assert (report["steps"], report["dense_steps"]) == (2, {"empty cache": 1})


def test_a_dense_step_has_a_budget_too() -> None:
    """No more than there is, and no more because the step read everything."""
    for budget, budgeted in ((4, 4 * 8), (40, 82)):
        attention = filled(small_config(budget_pages=budget), random_tokens(1, 82))
        attention.recorder.reset()
        attention.recorder.dense(attention.layer, 1, "a reason")
        report = attention.recorder.report()
        assert report["bytes_dense"] == report["bytes_read"] == 82 * TOKEN_BYTES
        assert report["bytes_budgeted"] == budgeted * TOKEN_BYTES


def test_bytes_of_the_bases() -> None:
    """The shortlist is a quarter of 10 pages, but no less than the budget."""
    packed = (DIM // 2, 8 // 2, VALUE_DIM // 2)  # of two vectors each, two entries a byte
    basis_bytes = sum(2 * (bytes_ + 4) for bytes_ in packed) + (VALUE_DIM + 4) + 3 * 4
    for ratio, listed in ((0.25, 3), (0.7, 7)):
        report = report_of(random_tokens(1, 83), shortlist_ratio=ratio)
        metadata = HEADS * (10 * COARSE_BYTES + listed * basis_bytes)
        assert report["bytes_read"] == (3 * 8 + 3) * TOKEN_BYTES + metadata


def test_bytes_of_low_precision_and_of_several_rows() -> None:
    """Rows of 10 and of 5 pages; features of quest are in the dtype of the cache."""
    tokens = Tokens(*(x.bfloat16() for x in random_tokens(2, 83)))
    report = report_of(tokens, [0, 40], router="quest")
    assert report["bytes_dense"] == 2 * 83 * TOKEN_BYTES // 2
    assert report["bytes_read"] == 2 * (3 * 8 + 3) * TOKEN_BYTES // 2 + HEADS * 15 * 2 * DIM * 2
    assert (report["pages"], report["pages_read_mean"]) == (11, 4)


def test_short_pages_are_read_at_their_length() -> None:
    attention, tokens = Attention(small_config(router="window", budget_pages=3)), random_tokens(1, 21)
    attention(tokens.part(0, 20))
    attention.layer.mark(0, 0, 3, tag=0)
    attention.decode(tokens.part(20))
    assert attention.layer.tables[0].lengths == [3, 8, 8]
    assert attention.recorder.report()["bytes_read"] == (3 + 8 + 2) * TOKEN_BYTES


def test_a_dense_decoding_step_reads_everything() -> None:
    report = report_of(random_tokens(1, 83), always_paged=False, budget_pages=99)
    assert report["dense_steps"] == {"empty cache": 1, "budget covers every page": 1}
    assert report["bytes_read"] == report["bytes_dense"] == 83 * TOKEN_BYTES
    assert report["pages"] is None


def test_reasons_are_counted_once_a_step() -> None:
    attention = Attention(small_config(max_sparse_query_tokens=4, min_context_tokens=60, always_paged=False))
    tokens = random_tokens(1, 80)
    attention(tokens.part(0, 5))
    attention.recorder.note("empty cache")  # another layer of the same step
    attention.decode(tokens.part(5, 8))
    attention(tokens.part(8, 40))
    attention.decode(tokens.part(40, 43))
    attention(tokens.part(43, 46), position_bias=torch.zeros(1, 6, 3, 46))
    attention.train()
    attention(tokens.part(46, 47))
    attention.eval()
    attention.decode(tokens.part(47))
    report = attention.recorder.report()
    assert report["dense_steps"] == {
        "empty cache": 1,
        "no sealed page yet": 3,
        "query chunk longer than max_sparse_query_tokens": 1,
        "context below min_context_tokens": 3 + 12,
        "position bias": 1,
        "training": 1,
    }
    assert report["steps"] == 1 + 3 + 1 + 3 + 1 + 1 + 33
    assert report["pages_read_mean"] == 4


@pytest.mark.parametrize("router", [kind.name for kind in ROUTERS])
def test_hit_rate_is_a_share_and_the_oracle_has_the_highest(router: str) -> None:
    tokens = random_tokens(2, 83)
    rate = report_of(tokens, [0, 30], router=router)["route_hit_rate"]
    assert 0 < rate <= report_of(tokens, [0, 30], router="oracle")["route_hit_rate"] + 1e-6 < 1


@pytest.mark.parametrize("padding", [[0, 0], [0, 30], [0, 78]])
def test_a_full_budget_hits_everything(padding: list[int]) -> None:
    """Also if a row has no sealed page at all: nothing of it can be missed."""
    report = report_of(random_tokens(2, 83), padding, budget_pages=99)
    assert report["route_hit_rate"] == pytest.approx(1)
    assert report["page_utilization"] == 1


@pytest.mark.parametrize(("every", "samples"), [(0, 0), (1, 8), (3, 3), (64, 1)])
def test_hit_rate_is_sampled(every: int, samples: int) -> None:
    attention = filled(small_config(stats_every=every), random_tokens(1, 80))
    attention.decode(random_tokens(1, 7))
    assert len(attention.recorder._hit_rates) == samples
    assert (attention.recorder.report()["route_hit_rate"] is None) == (samples == 0)


def test_page_utilization_counts_pages_once() -> None:
    """Sink and window of one page: the sink again and again, every new page once it is the last."""
    attention = filled(small_config(router="window", budget_pages=3), random_tokens(1, 81))
    assert attention.recorder.report()["page_utilization"] == pytest.approx(2 / 10)
    attention.decode(random_tokens(1, 16))
    assert attention.layer.tables[0].num_pages == 12
    assert attention.recorder.report()["page_utilization"] == pytest.approx(4 / 12)


def test_pages_are_counted_at_the_length_they_had_when_they_were_read() -> None:
    """Steps that read full pages are still to be counted when the first short page is sealed."""
    attention = filled(small_config(router="window", budget_pages=3), random_tokens(1, 81))
    attention.decode(random_tokens(1, 3))
    before = 4 * 2 * 8  # steps, pages beside the open tokens, tokens
    attention.layer.crop(-14)
    attention.layer.mark(0, 66, 69, tag=0)
    attention(random_tokens(1, 12))
    attention.decode(random_tokens(1, 1))
    assert attention.layer.tables[0].lengths[-3:] == [2, 3, 8]
    read = next(iter(attention.recorder._read.values()))
    assert read.num_tokens == HEADS * (before + (8 + 3) + (8 + 8))


def test_page_utilization_forgets_cropped_pages() -> None:
    attention = filled(small_config(budget_pages=99), random_tokens(1, 81))
    attention.layer.crop(-40)
    attention.decode(random_tokens(1, 1))
    assert attention.recorder.report()["page_utilization"] == 1


def test_percentiles_are_measured_values() -> None:
    recorder = Recorder(small_config())
    recorder._route_s = [float(i) for i in range(201, 0, -1)]
    assert (recorder.report()["route_latency_p50_s"], recorder.report()["route_latency_p99_s"]) == (101, 199)
    recorder._route_s = [3.0]
    assert (recorder.report()["route_latency_p50_s"], recorder.report()["route_latency_p99_s"]) == (3, 3)


def test_the_time_of_every_selection_counts() -> None:
    attention = filled(small_config(), random_tokens(1, 81))
    attention.decode(random_tokens(1, 5))
    report = attention.recorder.report()
    assert len(attention.recorder._route_s) == 6
    assert 0 < report["route_latency_p50_s"] <= report["route_latency_p99_s"] < 10


def test_the_trace_shows_each_selection() -> None:
    attention = filled(small_config(), random_tokens(1, 81))
    attention.recorder.traces.append(trace := list[TraceEntry]())
    attention.decode(random_tokens(1, 2))
    assert [(entry.step, entry.layer_idx, entry.read.shape) for entry in trace] == [
        (3, 0, (1, HEADS, 10)),
        (4, 0, (1, HEADS, 10)),
    ]
    assert all((entry.read.sum(-1) == 3).all() for entry in trace)


def test_reset_starts_a_new_generation() -> None:
    attention = filled(small_config(), random_tokens(1, 81))
    attention.recorder.reset()
    assert attention.recorder.report() == Recorder(small_config()).report()


def test_selections_counted_together_are_those_counted_one_by_one() -> None:
    tokens = random_tokens(1, 200)
    attention = filled(small_config(router="random", stats_every=0), tokens.part(0, 100))
    few, many = PagesRead(), PagesRead()
    for step in range(3 * pages_read.SELECTIONS_AT_ONCE // 2):
        shape = (1, 2, 2 + step // 50)  # a budget that grows on the way
        chosen = torch.stack([torch.randperm(12)[: shape[2]] for _ in range(2)])[None]
        selection = Selection(chosen, torch.rand(shape) < 0.9)
        for counter in (few, many):
            counter.add(attention.layer, selection)
        assert few.num_pages >= 0  # asking counts what is pending
    assert (few.num_pages, few.num_tokens, few.share) == (many.num_pages, many.num_tokens, many.share)
    assert few.num_tokens == 8 * few.num_pages
