"""Locality: the graph and its convolution by formula; what is remembered is that of a row's own past."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

from oval_core import OvalConfig
from oval_core.routers import Pages, Router, make_router, page_graph
from oval_core.routers.basis import BasisRouter
from oval_core.routers.locality import GRAPHS_BUILT, LocalityRouter
from oval_core.routers.page_graph import GraphConvolution, PageGraph, build_graph
from tests.core.scenes import DIM, GROUP, HEADS, filled, random_tokens, small_config
from tests.tolerance import assert_dense

pytestmark = pytest.mark.usefixtures("poisoned_memory")

FREE = {"sink_pages": 0, "window_pages": 0, "budget_pages": 4}  # three pages of ten are read, none of them forced
STEPS = st.lists(st.lists(st.lists(st.integers(-1, 6), min_size=3, max_size=3), min_size=2, max_size=2), min_size=1)


class Scripted(Router):
    """Wants these pages, step after step; then all alike."""

    name = "scripted"

    def __init__(self, *wanted: list[int]) -> None:
        self.wanted = list(wanted)

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        scores = query.new_zeros(*query.shape[:4], len(pages.index))
        if self.wanted:
            scores[..., self.wanted.pop(0)] = 50
        return scores


def naive_counts(steps: list[Tensor]) -> Tensor:
    """Pairs of pages that one step read or two steps in a row, over heads, without loops: `[P, P]`."""
    size = 1 + max(int(step.max()) for step in steps)
    counts = torch.zeros(size, size)
    sets = [[{page for page in head.tolist() if page >= 0} for head in step] for step in steps]
    for at, step in enumerate(sets):
        for head, read in enumerate(step):
            around = [sets[other][head] for other in (at - 1, at, at + 1) if 0 <= other < len(sets)]
            for page, other in ((page, other) for page in read for more in around for other in more if page != other):
                counts[page, other] += 1
    return counts


def adjacency(graph: PageGraph) -> Tensor:
    return graph.spread(torch.eye(len(graph.loops)))


@given(STEPS)
def test_the_convolution_by_formula(numbers: list[list[list[int]]]) -> None:
    """`w D^-1/2 (A + I) D^-1/2 x`, with all edges kept."""
    steps = [torch.tensor(step, dtype=torch.int32) for step in numbers]
    graph = build_graph(steps, edges_per_page=99)
    if graph is None:
        assert all((step == -1).all() for step in steps)
        return
    counts = naive_counts(steps)
    scale = torch.diag((1 + counts.sum(-1)).rsqrt())
    x = torch.rand(2, len(counts) + 2)  # two pages were sealed since
    expected = torch.cat([x[:, :-2] @ scale @ (counts + torch.eye(len(counts))) @ scale, x[:, -2:]], -1)
    torch.testing.assert_close(GraphConvolution(0.5)(x, graph), 0.5 * expected)


def test_few_edges_are_the_heaviest_and_go_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [torch.randint(-1, 30, (2, 5), dtype=torch.int32) for _ in range(60)]
    graph = build_graph(steps, edges_per_page=2)
    assert graph is not None
    assert graph.neighbours.shape == (30, 2)
    torch.testing.assert_close(adjacency(graph), adjacency(graph).T)
    assert float(torch.linalg.eigvalsh(adjacency(graph)).abs().max()) <= 1 + 1e-5
    counts = naive_counts(steps)
    assert torch.equal(counts.gather(1, graph.neighbours), counts.topk(2, dim=-1).values)
    monkeypatch.setattr(page_graph, "SCRATCH_BYTES", 30 * 4 * 7)  # seven pages at a time
    in_parts = build_graph(steps, edges_per_page=2)
    assert in_parts is not None
    assert all(map(torch.equal, graph, in_parts))


def test_decay_by_formula() -> None:
    router = LocalityRouter(Scripted(), decay_weight=2.0, reach_pages=4.0, graph_weight=0.0)
    attention = filled(small_config(router=router, **FREE), random_tokens(1, 81))
    query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
    distance = torch.arange(10.0, 0, -1)
    expected = (2 * (-distance / 4).exp()).expand(1, HEADS, GROUP, 1, 10)
    torch.testing.assert_close(router.score(query, pages), expected)
    assert router.select(query, pages).pages[0, 0].tolist() == [9, 8, 7]


def test_what_was_read_with_the_pages_of_the_last_step_is_wanted() -> None:
    for refresh_tokens, wanted in ((1, {2, 4, 5, 6, 7, 8}), (1000, {2, 4, 6})):  # without a graph: what was read
        router = LocalityRouter(Scripted([2, 5, 7], [4, 6, 8], [2, 4, 6]), 0.0, 1.0, 2.0, refresh_tokens=refresh_tokens)
        attention = filled(small_config(router=router, **FREE), random_tokens(1, 81))
        attention.decode(random_tokens(1, 2))
        query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
        router._refresh(pages)
        score = router.score(query, pages)[0, 0, 0, 0].detach()
        assert set(score.nonzero().flatten().tolist()) == wanted
        assert float(score.max()) <= 2
        assert attention.recorder.report()["router_counts"] == {GRAPHS_BUILT: 3 if refresh_tokens == 1 else 1}


def test_a_graph_is_of_the_steps_before_it_was_due() -> None:
    """Of ten steps at most, though more are noted; after a crop that takes all graphs back, of no later steps."""
    read = {token: [token % 5, 5 + token % 3, 9 - token % 2] for token in range(80, 99)}
    script = Scripted(*read.values(), *[read[token] for token in range(90, 92)])
    router = LocalityRouter(script, 0.0, 1.0, 1.0, window_tokens=10, refresh_tokens=4)
    attention = filled(small_config(router=router, **FREE), random_tokens(1, 81))
    memory = attention.layer.tables[0].memory

    def assert_graph_of(*tokens: int) -> None:
        expected = build_graph([torch.tensor([read[token]] * HEADS) for token in tokens], edges_per_page=8)
        noted = memory.last(router._graphs)
        assert expected is not None
        assert noted is not None
        assert noted[0] == tokens[-1] + 1
        torch.testing.assert_close(adjacency(noted[1]), adjacency(expected))

    attention.decode(random_tokens(1, 4))
    assert_graph_of(*range(80, 84))
    attention.decode(random_tokens(1, 14))
    assert_graph_of(*range(86, 96))
    attention.layer.crop(-9)  # 90 tokens are left, and what the last five steps of 14 read
    attention.decode(random_tokens(1, 1))
    assert_graph_of(*range(85, 88))


def test_the_weight_can_be_trained() -> None:
    router = LocalityRouter(Scripted([2, 5, 7]), graph_weight=1.0)
    attention = filled(small_config(router=router, **FREE), random_tokens(1, 81))
    query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
    router.score(query, pages)[..., [2, 5, 7]].sum().backward()
    assert router.convolution.weight.grad == 3 * HEADS * GROUP  # shares of 1, no edges
    with torch.no_grad():
        router.convolution.weight.zero_()
    assert (router.score(query, pages).diff(dim=-1) > 0).all()  # the decay is left


def test_without_weights_it_is_the_inner_router() -> None:
    tokens = random_tokens(2, 120)
    router = LocalityRouter(decay_weight=0.0, graph_weight=0.0)
    one, other = (filled(small_config(router=kind), tokens.part(0, 81), [0, 20]) for kind in (router, "basis"))
    assert_dense(one.decode(tokens.part(81), [0, 20]), other.decode(tokens.part(81), [0, 20]))
    assert router.metadata_bytes(9, 3, one.layer.pages.basis, None) == BasisRouter().metadata_bytes(
        9, 3, one.layer.pages.basis, None
    )


def lively(**arguments: Any) -> LocalityRouter:
    """Weights that decide, and graphs that are made anew all the time."""
    chosen = {"decay_weight": 2.0, "graph_weight": 3.0, "window_tokens": 10, "refresh_tokens": 12, "edges_per_page": 3}
    return LocalityRouter(**{**chosen, **arguments})


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(("step", "step", "crop")), st.integers(1, 14)), max_size=6))
def test_crop_then_replay_is_fresh(moves: list[tuple[str, int]]) -> None:
    """As long as no more than `refresh_tokens` are taken back."""
    tokens, config = random_tokens(1, 200), small_config(router=lively(), budget_pages=7)
    attention, fresh = (filled(config, tokens.part(0, 81)) for _ in range(2))
    furthest = 81
    for move, count in moves:
        length = attention.layer.get_seq_length()
        if move == "crop":
            attention.layer.crop(max(length - count, furthest - 12, 81) - length)
        else:
            attention.decode(tokens.part(length, length + count))
            furthest = max(furthest, length + count)
    length = attention.layer.get_seq_length()
    expected = fresh.decode(tokens.part(81, length + 15))[:, length - 81 :]
    torch.testing.assert_close(attention.decode(tokens.part(length, length + 15)), expected)


def test_a_row_is_as_if_read_alone_and_goes_its_way() -> None:
    tokens, config = random_tokens(2, 120), small_config(router=lively(), budget_pages=7)
    together = filled(config, tokens.part(0, 81), [0, 11])
    alone = [filled(config, tokens.part(padding, 81, row)) for row, padding in enumerate((0, 11))]
    outputs = together.decode(tokens.part(81, 105), [0, 11])
    together.layer.reorder_cache(torch.tensor([1, 0]))
    swapped = together.decode(type(tokens)(*(x[[1, 0], :, 105:] for x in tokens)), [11, 0])
    for row, run in enumerate(alone):
        expected = run.decode(tokens.part(81, row=row))[0]
        assert_dense(torch.cat([outputs[row], swapped[1 - row]]), expected)


def test_one_router_serves_several_caches_and_their_copies() -> None:
    tokens, others, config = random_tokens(1, 110), random_tokens(1, 110), small_config(router=lively())
    alone, mixed, other = (filled(config, text.part(0, 81)) for text in (tokens, tokens, others))
    expected = alone.decode(tokens.part(81))
    for at in range(81, 95):
        mixed.decode(tokens.part(at, at + 1))
        other.decode(others.part(at, at + 1))
    copied = copy.deepcopy(mixed)
    assert copied.layer.router is mixed.layer.router
    mixed.decode(others.part(95))
    torch.testing.assert_close(copied.decode(tokens.part(95)), expected[:, 14:])
    other.layer.reset()
    other(tokens.part(0, 80))
    torch.testing.assert_close(other.decode(tokens.part(80))[:, 1:], expected)


def test_memory_is_bounded() -> None:
    router = lively()
    attention = filled(small_config(router=router), random_tokens(1, 81))
    attention.decode(random_tokens(1, 60))
    memory = attention.layer.tables[0].memory
    assert len(memory.notes(router)) == 10 + 12
    graphs = [graph for _, graph in memory.notes(router._graphs)]
    assert [graph.neighbours.shape[1] for graph in graphs] == [3, 3]


@pytest.mark.parametrize("name", ["locality", "basis"])
def test_it_is_made_by_name(name: str) -> None:
    router = make_router(OvalConfig(router=name, estimate_tail="none"))
    basis = router.inner if isinstance(router, LocalityRouter) else router
    assert isinstance(router, LocalityRouter) == (name == "locality")
    assert isinstance(basis, BasisRouter)
    assert not basis.estimate_tail


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inner": BasisRouter}, TypeError, r"inner must be a Router, got .*BasisRouter.* \(type\)"),
        ({"window_tokens": 0}, ValueError, "window_tokens must be an integer >= 1, got 0"),
        ({"refresh_tokens": -1}, ValueError, "refresh_tokens must be an integer >= 1, got -1"),
        ({"edges_per_page": 0}, ValueError, "edges_per_page must be an integer >= 1, got 0"),
        ({"reach_pages": 0}, ValueError, "reach_pages must be a finite number > 0, got 0"),
    ],
)
def test_what_is_refused_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LocalityRouter(**arguments)


def steps_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randint(-1, 9 + rank, (2, 4), generator=generator, dtype=torch.int32) for _ in range(12)]


def build_together(rank: int, file: str, processes: int) -> None:
    """What one of several processes does: it saves the graph that it gets."""
    distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=processes)
    try:
        torch.save(tuple(build_graph(steps_of(rank), 3, distributed.group.WORLD) or ()), f"{file}.{rank}")
    finally:
        distributed.destroy_process_group()


def graph_of_all(processes: int) -> PageGraph:
    """What every process must have: the graph of all heads together."""
    graph = build_graph([torch.cat(step) for step in zip(*map(steps_of, range(processes)), strict=True)], 3)
    assert graph is not None
    return graph


def test_edge_counts_are_summed_over_a_group() -> None:
    """Of two threads that share a store: as quick as one process."""
    store = distributed.HashStore()  # type: ignore[attr-defined]

    def build(rank: int) -> PageGraph | None:
        group: Any = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        return build_graph(steps_of(rank), 3, group)

    with ThreadPoolExecutor(2) as threads:
        for graph in threads.map(build, range(2)):
            assert graph is not None
            assert all(map(torch.equal, graph, graph_of_all(2)))


@pytest.mark.slow
def test_edge_counts_are_summed_over_processes(tmp_path: Path) -> None:
    spawn(build_together, (str(tmp_path / "group"), 2), nprocs=2)
    for rank in range(2):
        assert all(map(torch.equal, torch.load(tmp_path / f"group.{rank}"), graph_of_all(2)))
