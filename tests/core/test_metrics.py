"""Monitoring: figures, ranges, the graph of pages, and what Prometheus scrapes."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from oval_core import Handle, OvalConfig, attach
from oval_core.metrics import HEALTHY, MEANINGS, OvalCollector, health, readings
from oval_core.metrics.page_use import MOST_PAGES, graph_density, head_use
from oval_core.metrics.watch import LAST_TOKENS, Snapshot, Watch
from oval_core.stats import TraceEntry
from tests.core.tiny_models import generate, llama, prompt

CONFIG = OvalConfig(page_size=8, budget_pages=5, seal_tokens=1, router="box", impl="reference", stats_every=2)


@pytest.fixture
def handle() -> Iterator[Handle]:
    with attach(llama(), CONFIG) as handle:
        yield handle


def entry(read: Tensor, *counts: int) -> TraceEntry:
    """A step of rows that have `counts` pages, all of them if nothing is said."""
    return TraceEntry(1, 0, read, counts or (read.shape[2],) * len(read))


def selection(*pages: int, of: int = 6) -> TraceEntry:
    """One step of one row and two KV heads; the second reads page 0 alone."""
    read = torch.zeros(1, 2, of, dtype=torch.bool)
    read[0, 0, [*pages]] = True
    read[0, 1, 0] = True
    return entry(read)


def test_the_graph_by_hand() -> None:
    """Pages 0, 1 are always together; 2 joins them in one step of three; 3 comes and goes with 4."""
    steps = [selection(0, 1, 2), selection(0, 1), selection(0, 1, 3, 4)]
    joined = 2  # (0, 1) and (3, 4) of 15 pairs; none of the other head
    assert graph_density({0: steps}) == pytest.approx(joined / 15 / 2)
    half = [selection(0, 1), selection(0), selection(5)]
    assert graph_density({0: half}) == pytest.approx(1 / 15 / 2)
    assert graph_density({0: steps, 1: half}) == pytest.approx((joined + 1) / 15 / 4)


def test_the_graph_of_nothing() -> None:
    assert graph_density({}) is None
    assert graph_density({0: [selection(0)]}) is None
    assert graph_density({0: [entry(torch.ones(1, 1, 1, dtype=torch.bool))] * 3}) is None


def test_the_graph_of_many_pages_is_sampled() -> None:
    pages = 3 * MOST_PAGES
    every = torch.ones(1, 1, pages, dtype=torch.bool)
    assert graph_density({0: [entry(every)] * 2}) == 1
    assert graph_density({0: [entry(~every)] * 2}) == 0


def test_the_use_of_heads() -> None:
    """Over pages that became more on the way; steps of another batch do not count."""
    steps = [entry(torch.ones(3, 2, 9, dtype=torch.bool)), selection(0, 1, of=4), selection(1, 2, of=6)]
    assert head_use(steps) == pytest.approx([3 / 6, 1 / 6])
    assert head_use([entry(torch.ones(1, 2, 0, dtype=torch.bool))]) == []


def test_a_batch_is_the_mean_of_its_rows() -> None:
    """Rows with fewer pages than the fullest one; a row with one page or none has no pairs."""
    long, short = torch.rand(2, 5, 40) < 0.3, torch.rand(2, 5, 8) < 0.5
    batch = torch.zeros(3, 2, 5, 40, dtype=torch.bool)
    batch[0], batch[1, :, :, :8] = long, short
    both = [entry(read, 40, 8, 0) for read in batch.unbind(2)]
    alone = [[entry(read[None]) for read in row.unbind(1)] for row in (long, short)]
    assert graph_density({0: both}) == pytest.approx(sum(graph_density({0: row}) or 0 for row in alone) / 2)
    uses = [head_use(row) for row in alone]
    assert head_use(both) == pytest.approx([sum(heads) / 2 for heads in zip(*uses, strict=True)])


def test_a_padded_batch_is_the_mean_of_its_rows() -> None:
    text, mask = prompt(200, rows=2), torch.ones(2, 200, dtype=torch.long)
    mask[1, :120] = 0
    found = []
    for rows, start in ((slice(0, 2), 0), (slice(0, 1), 0), (slice(1, 2), 120)):
        with attach(llama(), CONFIG) as handle, Watch(handle, trace_every=1, refresh_s=0) as watch:
            generate(handle.model, text[rows, start:], attention_mask=mask[rows, start:], max_new_tokens=12)
            selections = watch.snapshot.selections
            found.append([graph_density(selections) or 0, *head_use(selections[0]), *head_use(selections[1])])
    both, *alone = map(torch.tensor, found)
    torch.testing.assert_close(both, torch.stack(alone).mean(0))
    assert both[0] > 0
    assert not torch.allclose(alone[0], alone[1])


def test_health_names_what_is_out_of_range() -> None:
    figures: dict[str, float | None] = {name: (low + high) / 2 for name, (low, high) in HEALTHY.items()}
    assert health(figures, "cpu") == {}
    assert health({**figures, "route_hit_rate": None}, "cpu") == {}
    assert health({name: low for name, (low, _) in HEALTHY.items()}, "cpu") == {}
    found = health({**figures, "route_hit_rate": 0.5, "page_utilization": 0.9}, "cpu")
    assert found == {
        "route_hit_rate": "expected 0.85 to 1.0, got 0.5",
        "page_utilization": "expected 0.6 to 0.8, got 0.9",
    }


def test_latency_has_a_range_on_cuda_alone() -> None:
    """0.3 ms."""
    assert health({"route_latency_p99_seconds": 0.29e-3}, "cuda") == {}
    found = health({"route_latency_p99_seconds": 0.31e-3, "route_hit_rate": 0.5}, "cuda")
    assert found["route_latency_p99_seconds"] == "expected 0.0 to 0.0003, got 0.00031"
    assert "route_hit_rate" in found
    assert health({"route_latency_p99_seconds": 0.31e-3}, "cpu") == {}


def test_readings_of_nothing() -> None:
    assert {*readings(Snapshot())} == {*MEANINGS}
    assert set(readings(Snapshot()).values()) == {None}


def test_readings_are_those_of_stats(handle: Handle) -> None:
    with Watch(handle, trace_every=1, refresh_s=0) as watch:
        generate(handle.model, prompt(120), max_new_tokens=12)
        stats, found = handle.stats(), readings(watch.snapshot)
    assert found["route_hit_rate"] == stats["route_hit_rate"]
    assert found["page_utilization"] == stats["page_utilization"]
    assert found["route_latency_p99_seconds"] == stats["route_latency_p99_s"]
    assert found["bandwidth_saved"] == 1 - stats["bytes_read"] / stats["bytes_dense"]
    assert found["kv_efficiency"] == stats["bytes_read"] / stats["bytes_budgeted"]
    assert 0 < (found["graph_density"] or 0) < 1
    assert {layer: len(steps) for layer, steps in watch.snapshot.selections.items()} == {0: 11, 1: 11}


def test_a_watch_is_bounded_and_traces_now_and_then(handle: Handle) -> None:
    with Watch(handle, trace_every=3, keep_selections=2, refresh_s=0) as watch, handle.trace() as entries:
        generate(handle.model, prompt(120), max_new_tokens=13)
        kept = watch.snapshot.selections
    wanted = [one for one in entries if one.layer_idx == 1 and one.step in (9, 12)]
    assert len(wanted) == 2
    assert all(torch.equal(one.read, other.read) for one, other in zip(wanted, kept[1], strict=True))


def test_snapshots_are_not_made_more_often_than_asked(handle: Handle) -> None:
    with Watch(handle, refresh_s=3600) as watch:
        generate(handle.model, prompt(60), max_new_tokens=4)
        assert watch.snapshot.report["steps"] == 1


def test_a_closed_watch_leaves_nothing(handle: Handle) -> None:
    before = len(handle.model._forward_hooks), len(handle.model._forward_pre_hooks)
    watch = Watch(handle)
    watch.close()
    watch.close()
    assert (len(handle.model._forward_hooks), len(handle.model._forward_pre_hooks)) == before


def test_a_pass_that_fails_does_not_leave_a_trace_open(handle: Handle) -> None:
    with Watch(handle, trace_every=1) as watch:
        with pytest.raises(ValueError, match="empty"):
            handle.model(torch.zeros(1, 0, dtype=torch.long))
        with pytest.raises(IndexError):
            handle.model(torch.full((1, 4), 10**6))
        assert handle._recorder.traces == []
        generate(handle.model, prompt(60), max_new_tokens=4)
        assert watch.last_tokens().shape == (1, 63)


def test_an_interrupt_does_not_leave_a_trace_open(handle: Handle) -> None:
    """No hook runs after it: the next pass, or `close`, tidies up, and leaves the traces of others alone."""
    layer = handle.model.get_submodule("model.layers.0")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    watch = Watch(handle, trace_every=1)
    for tidy in (lambda: generate(handle.model, prompt(60), max_new_tokens=3), watch.close):
        hook = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.model(prompt(60))
        hook.remove()
        with handle.trace() as mine:
            tidy()
            generate(handle.model, prompt(60), max_new_tokens=3)
        assert mine
        assert handle._recorder.traces == []


def test_a_refused_call_is_no_sample(handle: Handle) -> None:
    heard: list[Tensor] = []
    with Watch(handle, trace_every=1) as watch:
        watch.on_low_hit_rate(1.0, 2, heard.append)
        output = generate(handle.model, prompt(60), max_new_tokens=2)
        for _ in range(4):
            with pytest.raises(ValueError, match="empty"):
                handle.model(torch.zeros(1, 0, dtype=torch.long), cache=output.cache)
    assert heard == []


def test_the_last_tokens(handle: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oval_core.metrics.watch.LAST_TOKENS", 50)
    with Watch(handle) as watch:
        assert watch.last_tokens().shape == (0, 0)
        text = generate(handle.model, prompt(60, rows=2), max_new_tokens=20).sequences
        assert torch.equal(watch.last_tokens(), text[:, :-1][:, -50:])
        assert len(watch._tokens) <= 50
        text = generate(handle.model, prompt(30, seed=1), max_new_tokens=2).sequences
        assert torch.equal(watch.last_tokens(), text[:, :-1])


def test_a_low_hit_rate_calls_back_with_the_tokens(handle: Handle) -> None:
    called: list[Tensor] = []
    with Watch(handle) as watch:
        watch.on_low_hit_rate(1.0, 3, called.append)
        watch.on_low_hit_rate(1e-6, 1, lambda tokens: pytest.fail("never that low"))
        text = generate(handle.model, prompt(120), max_new_tokens=14).sequences
    assert [tokens.shape[1] for tokens in called] == [120 + 5, 120 + 11]  # sampled at steps 2, 4, 6, ...
    assert all(torch.equal(tokens, text[:, : tokens.shape[1]]) for tokens in called)
    assert LAST_TOKENS == 1000


def test_low_samples_must_follow_one_another(handle: Handle) -> None:
    called: list[Tensor] = []
    with Watch(handle) as watch:
        watch.on_low_hit_rate(0.5, 2, called.append)
        for rate in (0.4, 0.6, 0.4, 0.5, 0.4):
            watch._alarms[0].hear(rate, torch.zeros(1, 1))
        assert not called
        watch._alarms[0].hear(0.3, torch.zeros(1, 1))
    assert len(called) == 1


def test_what_cannot_be_watched_is_refused(handle: Handle) -> None:
    with pytest.raises(ValueError, match="trace_every"):
        Watch(handle, trace_every=0)
    with Watch(handle) as watch, pytest.raises(ValueError, match="threshold"):
        watch.on_low_hit_rate(85, 1, print)
    handle.detach()
    with pytest.raises(ValueError, match="detached"):
        Watch(handle)
    never = attach(handle.model, OvalConfig(page_size=8, impl="reference", stats_every=0))
    with Watch(never) as watch, pytest.raises(ValueError, match="stats_every"):
        watch.on_low_hit_rate(0.85, 1, print)
    never.detach()


def scrape(port: int) -> dict[str, list[Any]]:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {family.name: family.samples for family in text_string_to_metric_families(text)}


def test_prometheus_scrapes_the_figures(handle: Handle) -> None:
    registry, collector = CollectorRegistry(), OvalCollector(handle, trace_every=1, refresh_s=0)
    registry.register(collector)
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        assert "oval_route_hit_rate" not in scrape(server.server_port)
        generate(handle.model, prompt(120), max_new_tokens=12)
        found, expected = scrape(server.server_port), readings(collector.watch.snapshot)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        collector.close()
    for name, value in expected.items():
        assert [sample.value for sample in found[f"oval_{name}"]] == [value]
    healthy = {sample.labels["figure"]: sample.value for sample in found["oval_healthy"]}
    assert healthy == {name: float(name not in health(expected, "cpu")) for name in HEALTHY}
    heads = {(sample.labels["layer"], sample.labels["kv_head"]) for sample in found["oval_kv_head_use"]}
    kv_heads = handle.model.config.num_key_value_heads
    assert heads == {(str(layer), str(head)) for layer in range(2) for head in range(kv_heads)}


def test_without_prometheus_only_the_collector_is_missing() -> None:
    code = """
import sys
sys.modules["prometheus_client"] = None
from oval_core.metrics import OvalCollector, Watch
try:
    OvalCollector(None)
except ImportError as error:
    assert "oval-suite[metrics]" in str(error), error
else:
    raise AssertionError("there is no prometheus_client")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
