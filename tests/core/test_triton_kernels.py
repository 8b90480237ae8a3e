"""The Triton kernels against the reference: on a GPU where there is one, under Triton's interpreter elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oval_core import OvalConfig, attach, kernels
from oval_core.attention import paged_attention
from oval_core.basis import PageBasis, build_basis
from oval_core.binding import Binding
from oval_core.kernels import Kernels, Partial, Reads, reference, triton_select
from oval_core.kernels.triton import on_its_device, step_of_zeros
from oval_core.layer import OvalLayer
from oval_core.memory import take
from oval_core.stats import Recorder
from tests.core import tiny_models
from tests.tolerance import assert_as_accurate_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, SCALING = 2, 2, 0.3
HALF = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def triton() -> Kernels:
    return kernels.load("triton")


def on_device(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


class Unpacked(NamedTuple):
    """What a basis stands for, in any precision: the part of `PageBasis` that the reference kernels use."""

    tokens: Tensor
    mu: Tensor
    radius: Tensor
    b: Tensor
    c: Tensor
    w: Tensor
    v0: Tensor

    def coarse(self) -> tuple[Tensor, Tensor]:
        return self.mu, self.radius

    def approximation(self) -> tuple[Tensor, ...]:
        return self[3:]

    def gather(self, pages: Tensor) -> Unpacked:
        return Unpacked(*(take(field, pages) for field in self))


class Shape(NamedTuple):
    """Of a basis and of the queries that it is asked for."""

    dims: tuple[int, int]
    group: int = 4
    queries: int = 1
    page_size: int = 16
    rank: int = 8
    pages: int = 5
    softcap: float | None = None


def bases(shape: Shape) -> PageBasis:
    """In room for more pages; short pages, hidden tokens and one page without any token among them."""
    at = (BATCH, HEADS, shape.pages, shape.page_size)
    keys, values = (on_device(*at, dim) for dim in shape.dims)
    mask = torch.rand(BATCH, 1, *at[2:], device=DEVICE) < 0.8
    mask[0, :, -1] = False
    return build_basis(keys, values, mask, shape.rank).grown(shape.pages + 3).narrow(shape.pages)


def query_of(shape: Shape) -> Tensor:
    return on_device(BATCH, HEADS, shape.group, shape.queries, shape.dims[0])


def assert_same_tiers(triton: Kernels, shape: Shape) -> None:
    basis, query = bases(shape), query_of(shape)
    parts = (query, *basis.coarse(), *basis.approximation())

    def scores(query: Tensor, *fields: Tensor) -> Tensor:
        found = reference.coarse_scores(query, unpacked(fields), SCALING, shape.softcap)
        return found.nan_to_num(neginf=0.0)

    def unpacked(fields: tuple[Tensor, ...]) -> Any:
        return Unpacked(basis.tokens, *fields)

    got = triton.coarse_scores(query, basis, SCALING, shape.softcap)
    assert (got[0, ..., -1] == -torch.inf).all()
    assert_as_accurate_as(scores, parts, got.nan_to_num(nan=torch.inf, neginf=0.0))

    listed = torch.stack([torch.randperm(shape.pages, device=DEVICE)[:4] for _ in range(BATCH * HEADS)])
    listed = listed.view(BATCH, HEADS, -1)
    page = triton.evaluate_bases(query, basis, listed, SCALING, shape.softcap)
    empty = (take(basis.tokens, listed) == 0)[:, :, None, None].expand_as(page.lse)
    assert (page.lse[empty] == -torch.inf).all()
    for name in Partial._fields:

        def expected(query: Tensor, *fields: Tensor, name: str = name) -> Tensor:
            found = reference.evaluate_bases(query, unpacked(fields), listed, SCALING, shape.softcap)
            return getattr(found, name).nan_to_num(neginf=0.0)

        assert_as_accurate_as(expected, parts, getattr(page, name).nan_to_num(nan=torch.inf, neginf=0.0))


@pytest.mark.parametrize(
    "shape",
    [
        Shape((64, 64)),
        Shape((80, 48), group=3, queries=5, softcap=0.7),
        Shape((96, 96), group=1, page_size=32, rank=3),
        Shape((128, 128), group=8, pages=70, rank=2),
        Shape((256, 64), group=1, page_size=64),
        Shape((17, 33), group=3, page_size=8, rank=1),
        Shape((64, 64), group=1, queries=64, pages=1, rank=2),
    ],
    ids=str,
)
def test_tiers(triton: Kernels, shape: Shape) -> None:
    assert_same_tiers(triton, shape)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 48), (128, 128), (256, 256)], ids=str)
def test_tiers_of_every_shape(triton: Kernels, dims: tuple[int, int], group: int, queries: int, page_size: int) -> None:
    assert_same_tiers(triton, Shape(dims, group, queries, page_size, softcap=0.7 if queries == 5 else None))


def test_bases_without_directions_and_without_pages(triton: Kernels) -> None:
    """The coarse part alone, a layout that differs between fields, and nothing at all."""
    keys = on_device(BATCH, HEADS, 5, 16, 64)
    basis, query = build_basis(keys, keys, None, 0), on_device(BATCH, HEADS, 2, 1, 64)
    expected = reference.coarse_scores(query, basis, SCALING, None)
    torch.testing.assert_close(triton.coarse_scores(query, basis, SCALING, None), expected)
    basis.radius = basis.radius.new_zeros(()).expand_as(basis.radius)
    expected = reference.coarse_scores(query, basis, SCALING, None)
    torch.testing.assert_close(triton.coarse_scores(query, basis, SCALING, None), expected)
    nothing = PageBasis.empty(BATCH, HEADS, 16, 4, (64, 64), DEVICE)
    assert triton.coarse_scores(query, nothing, SCALING, None).shape == (BATCH, HEADS, 2, 1, 0)
    none = torch.zeros(BATCH, HEADS, 0, dtype=torch.long, device=DEVICE)
    assert triton.evaluate_bases(query, nothing, none, SCALING, None).out.shape == (BATCH, HEADS, 2, 1, 0, 64)


class Read(NamedTuple):
    """An exact read."""

    dims: tuple[int, int]
    group: int = 4
    queries: int = 1
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    runs: int = 5
    masked: bool = False
    softcap: float | None = None


def inputs_of(read: Read, tokens: int = 401) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values; the storage has spare room full of NaN."""
    query = on_device(BATCH, HEADS, read.group, read.queries, read.dims[0], dtype=read.dtype)
    keys, values = (on_device(BATCH, HEADS, tokens + 9, dim, dtype=read.dtype) for dim in read.dims)
    keys[:, :, tokens:] = values[:, :, tokens:] = torch.nan
    return query, keys[:, :, :tokens], values[:, :, :tokens]


def reads_of(read: Read, tokens: int = 401) -> Reads:
    """Runs that start anywhere and do not overlap, the first ones at token 0, the last ones in reach of `last`."""
    slots = (tokens - 1) // read.page_size
    chosen = torch.stack([torch.randperm(slots - 2)[: read.runs] + 1 for _ in range(BATCH * HEADS)])
    chosen[:, 0], chosen[:, -1] = 0, slots - 1
    lengths = torch.randint(0, read.page_size + 1, chosen.shape)
    lengths[:, 0] = read.page_size
    starts = chosen * read.page_size + (torch.rand(chosen.shape) * (read.page_size - lengths + 1)).long()
    at = (BATCH, HEADS, read.runs)
    last = torch.tensor([[tokens - read.queries], [tokens - 40]]) + torch.arange(read.queries)
    mask = None
    if read.masked:  # padding in front, a tree behind; the first query of the first row sees nothing
        mask = torch.rand(BATCH, 1, read.queries, tokens) < 0.7
        mask[0, 0, 0] = False
        mask = mask.to(DEVICE)
    return Reads(starts.view(at).to(DEVICE), lengths.view(at).to(DEVICE), read.page_size, last.to(DEVICE), mask)


def readable_of(reads: Reads, tokens: int) -> Tensor:
    """What `Reads` promises, token by token: bool `[B, H, Q, T]`."""
    token = torch.arange(tokens, device=DEVICE)
    after = token >= reads.starts[..., None]
    in_runs = (after & (token < (reads.starts + reads.lengths)[..., None])).any(2)[:, :, None]
    readable = in_runs & (token <= reads.last[:, None, :, None])
    return readable if reads.mask is None else readable & reads.mask


def assert_same_read(triton: Kernels, read: Read) -> None:
    inputs, reads = inputs_of(read), reads_of(read)
    readable = readable_of(reads, inputs[1].shape[2])[:, :, None]

    def logits(query: Tensor, keys: Tensor) -> Tensor:
        found = SCALING * query @ keys[:, :, None].mT
        if read.softcap is not None:
            found = read.softcap * torch.tanh(found / read.softcap)
        return found.masked_fill(~readable, -torch.inf)

    got = triton.attend_pages(inputs[0].float(), *inputs[1:], reads, SCALING, read.softcap)
    nothing = ~readable.any(-1).expand_as(got.lse)
    assert nothing.any() == read.masked
    assert (got.lse[nothing] == -torch.inf).all()
    assert not got.out[nothing].any()
    assert_as_accurate_as(lambda q, k, v: logits(q, k).softmax(-1).nan_to_num(0.0) @ v[:, :, None], inputs, got.out)
    assert_as_accurate_as(
        lambda q, k, v: logits(q, k).logsumexp(-1).nan_to_num(neginf=0.0),
        inputs,
        got.lse.nan_to_num(nan=torch.inf, neginf=0.0),
    )


@pytest.mark.parametrize(
    "read",
    [
        Read((64, 64)),
        Read((80, 48), group=3, queries=5, masked=True),
        Read((96, 96), group=1, page_size=32, dtype=torch.bfloat16),
        Read((128, 128), group=8, dtype=torch.bfloat16, runs=9),
        Read((128, 128), group=1, queries=64, dtype=torch.float16, masked=True, runs=3),
        Read((256, 64), page_size=64, runs=3, softcap=0.7),
        Read((64, 256), group=3, queries=5, runs=2, dtype=torch.float16),
        Read((64, 64), queries=64, group=1, masked=True, runs=2),
    ],
    ids=str,
)
def test_exact_reads(triton: Kernels, read: Read) -> None:
    assert_same_read(triton, read)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("queries", [1, 5, 64])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 48), (128, 128), (256, 256)], ids=str)
def test_exact_reads_of_every_shape(
    triton: Kernels, dims: tuple[int, int], group: int, queries: int, page_size: int, dtype: torch.dtype
) -> None:
    for masked, softcap in ((False, None), (True, 0.7)):
        assert_same_read(triton, Read(dims, group, queries, page_size, dtype, 3, masked, softcap))


def test_reading_nothing(triton: Kernels) -> None:
    """Runs without a token, and no run at all."""
    inputs, reads = inputs_of(Read((64, 48))), reads_of(Read((64, 48)))
    for runs in (5, 0):
        empty = reads._replace(starts=reads.starts[..., :runs], lengths=torch.zeros_like(reads.lengths[..., :runs]))
        got = triton.attend_pages(*inputs, empty, SCALING, None)
        assert not got.out.any()
        assert (got.lse == -torch.inf).all()


def test_everything_read_in_pages_is_dense(triton: Kernels) -> None:
    query, keys, values = inputs_of(Read((64, 64), queries=5), 160)
    starts = torch.arange(0, 160, 16, device=DEVICE).expand(BATCH, HEADS, -1)
    last = (155 + torch.arange(5, device=DEVICE)).expand(BATCH, -1)
    causal = torch.arange(160, device=DEVICE) <= last[:, None, :, None]
    got = triton.attend_pages(
        query, keys, values, Reads(starts, torch.full_like(starts, 16), 16, last, None), 0.1, None
    )
    expected = reference.attend(query, keys, values, causal, 0.1, None)
    torch.testing.assert_close(got.out, expected.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.lse, expected.lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_merge(triton: Kernels, count: int, sink: bool) -> None:
    shape = (BATCH, HEADS, 3, 2)
    parts = [Partial(on_device(*shape, 33), 3 * on_device(*shape)) for _ in range(count)]
    parts[0].lse[0], parts[-1].lse[:, 0] = -torch.inf, -torch.inf
    sinks = on_device(1, HEADS, 3, 1) if sink else None
    expected = reference.merge(parts, sinks)
    assert not expected[0, 0].any() or count > 2
    torch.testing.assert_close(triton.merge(parts, sinks), expected)


def layer_of(config: OvalConfig, group_dims: tuple[int, int], dtype: torch.dtype, short_pages: bool) -> OvalLayer:
    """Two rows, one of which may have short pages and so other tables; the last token is new."""
    layer = OvalLayer(config, None, 0)
    for tokens in (110, 1):
        keys, values = (on_device(BATCH, HEADS, tokens, dim, dtype=dtype) for dim in group_dims)
        layer.update(2 * keys, values)
        if short_pages and tokens > 1:
            layer.mark(1, 21, 83, tag=0)
        layer.attended(None)
    layer.update(*(on_device(BATCH, HEADS, 1, dim, dtype=dtype) for dim in group_dims))
    layer.attended(None)
    return layer


STEPS: list[tuple[dict[str, Any], int, tuple[int, int], torch.dtype, bool]] = [
    ({"router": "basis"}, 4, (24, 24), torch.float32, False),
    ({"router": "basis", "rank": 3, "seal_tokens": 1}, 3, (17, 33), torch.float32, True),
    ({"router": "basis", "estimate_tail": "none", "shortlist_pages": 7}, 1, (16, 16), torch.bfloat16, False),
    ({"router": "basis", "sink_pages": 2, "window_pages": 3, "shortlist_ratio": 1.0}, 2, (16, 16), torch.float32, True),
    ({"router": "box", "seal_tokens": 1}, 3, (24, 16), torch.float32, True),
    ({"router": "box", "sink_pages": 0, "window_pages": 0, "budget_pages": 1}, 1, (16, 16), torch.float16, False),
]


@pytest.mark.parametrize(("settings", "group", "dims", "dtype", "short_pages"), STEPS, ids=str)
def test_a_step_in_few_launches(
    settings: dict[str, Any], group: int, dims: tuple[int, int], dtype: torch.dtype, short_pages: bool
) -> None:
    """Same output, same pages, same figures, and nothing is left to the tiers."""
    config = OvalConfig(**{"page_size": 8, "budget_pages": 6, "rank": 4, **settings})
    layer, query = layer_of(config, dims, dtype, short_pages), on_device(BATCH, HEADS * group, 1, dims[0], dtype=dtype)
    found = {}
    for impl in ("reference", "triton"):
        recorder = Recorder(config)
        recorder.step = 2
        with recorder.tracing() as entries:
            out = paged_attention(Binding(impl, "sdpa", recorder), layer, query, None, SCALING)
        found[impl] = out, entries[0].read, recorder.report()
    (ours, our_pages, our_stats), (theirs, their_pages, their_stats) = found["triton"], found["reference"]
    assert torch.equal(our_pages, their_pages)
    tolerance = max(2e-5, float(torch.finfo(dtype).eps))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert our_stats["impl_fallbacks"] == {}
    for name in ("bytes_read", "metadata_bytes", "pages_read_mean", "page_utilization", "route_hit_rate"):
        assert our_stats[name] == their_stats[name], name


def test_a_config_that_changes_is_followed() -> None:
    config = OvalConfig(router="basis", page_size=8, budget_pages=6, rank=4)
    layer, query = layer_of(config, (16, 16), torch.float32, False), on_device(BATCH, HEADS, 1, 16)
    triton = Binding("triton", "sdpa", Recorder(config))
    read = {}
    for budget in (6, 4):
        layer.config = dataclasses.replace(config, budget_pages=budget)
        with triton.recorder.tracing() as entries:
            paged_attention(triton, layer, query, None, SCALING)
        read[budget] = entries[0].read.sum(-1).unique().tolist()
    assert read == {6: [5], 4: [3]}  # the open tokens count as one


@pytest.mark.parametrize(("pages", "wanted"), [(70, 20), (70, 7), (2100, 735), (5, 5), (3, 0)])
def test_of_equal_pages_the_first_is_listed(pages: int, wanted: int) -> None:
    """As by a stable sort; ranks are of few values, some pages are absent, rows differ in length."""
    group, sinks, window = 3, 1, 2
    level = torch.randint(0, 4, (BATCH, HEADS, 1, pages), device=DEVICE).float()
    scores = level.expand(-1, -1, group, -1).contiguous()
    tokens = torch.randint(0, 5, (BATCH, HEADS, pages), dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([[pages, max(1, pages - 3)], [0, 0], [wanted, max(0, wanted - 1)], [0, 0]], device=DEVICE)
    listed = torch.empty(BATCH, HEADS, max(1, wanted), dtype=torch.int32, device=DEVICE)
    launch: Any = triton_select.shortlist_kernel
    launch[(BATCH * HEADS,)](
        triton_select.Scored(scores, scores), tokens, triton_select.Rows(*rows.unbind()), listed, pages, pages,
        pages, max(1, wanted), HEADS, group, sinks, window,
        ROWS=4, TILES=4096, PAGES=4096, LISTED=1024, num_warps=8,
    )  # fmt: skip
    page, count = torch.arange(pages, device=DEVICE), rows[0, :, None, None]
    forced = (page < sinks) | (page >= count - window)
    ranks = level[:, :, 0].masked_fill(forced, torch.inf).masked_fill((page >= count) | (tokens == 0), -torch.inf)
    order = ranks.sort(dim=-1, descending=True, stable=True)
    for row, head in product(range(BATCH), range(HEADS)):
        some = int(rows[2, row])
        expected = order.indices[row, head, :some][order.values[row, head, :some] > -torch.inf].sort().values.tolist()
        filling = [-1] * (listed.shape[2] - len(expected))
        assert listed[row, head].tolist() == expected + filling


MOST_LAUNCHES, MOST_OPERATIONS = {"basis": 7, "box": 4}, 16  # on the host, those that touch no number included


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@contextmanager
def no_waiting() -> Iterator[None]:
    """To wait for a GPU is an error."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("router", ["basis", "box"])
def test_a_step_costs_few_launches_and_operations(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the step also runs, and must not wait for the device."""
    config = OvalConfig(page_size=8, budget_pages=6, rank=4, router=router, stats_every=0)
    layer, query = layer_of(config, (16, 16), torch.float32, False), on_device(BATCH, HEADS * 2, 1, 16)
    binding, launches = Binding("triton", "sdpa", Recorder(config)), list[str]()
    kind: Any = type(triton_select.shortlist_kernel)
    run = kind.run

    def note(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launches.append(kernel.fn.__name__)
        return run(kernel, *args, **kwargs) if DEVICE.type == "cuda" else None

    paged_attention(binding, layer, query, None, SCALING)
    monkeypatch.setattr(kind, "run", note)
    with Operations() as operations, no_waiting():
        paged_attention(binding, layer, query, None, SCALING)
    assert len(launches) <= MOST_LAUNCHES[router], launches
    assert operations.count <= MOST_OPERATIONS


@pytest.mark.parametrize("router", ["basis", "box"])
def test_a_warm_up_compiles_what_steps_launch(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel is compiled for its compile-time arguments: the same ones while a context grows, pages being sealed."""
    config = OvalConfig(router=router, stats_every=0)
    launches, kind = set[tuple[str, ...]](), type(triton_select.shortlist_kernel)

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.add((kernel.fn.__name__, *(f"{name}={value}" for name, value in sorted(kwargs.items()))))

    monkeypatch.setattr(kind, "run", note)
    step_of_zeros((4, 2, 16), torch.bfloat16, DEVICE, config)
    compiled, layer = set(launches), OvalLayer(config, None, 0)
    assert len(compiled) == MOST_LAUNCHES[router]
    for tokens in (3000, *[1] * 70):
        layer.update(*(on_device(1, 2, tokens, 16, dtype=torch.bfloat16) for _ in range(2)))
        layer.attended(None)
        if layer.pages.num_pages:
            binding = Binding("triton", "sdpa", Recorder(config))
            paged_attention(binding, layer, on_device(1, 4, 1, 16, dtype=torch.bfloat16), None, SCALING)
    assert launches == compiled


def test_several_queries_without_a_mask_go_tier_by_tier() -> None:
    config = OvalConfig(page_size=8, budget_pages=6, rank=4, router="basis", stats_every=0)
    layer, query = layer_of(config, (16, 16), torch.float32, False), on_device(BATCH, HEADS * 2, 5, 16)
    found = {}
    for impl in ("reference", "triton"):
        recorder = Recorder(config)
        found[impl] = paged_attention(Binding(impl, "sdpa", recorder), layer, query, None, SCALING)
    torch.testing.assert_close(found["triton"], found["reference"], rtol=2e-5, atol=2e-5)
    assert recorder.report()["impl_fallbacks"] == {"several queries": 1}


def test_kernels_are_launched_on_the_device_of_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device] = []

    def guard(device: torch.device) -> AbstractContextManager[None]:
        entered.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", guard)

    @on_its_device
    def launch(parts: list[Partial], count: int) -> int:
        return count * len(parts)

    for device in (torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)):
        first: Any = SimpleNamespace(device=device)
        assert launch([Partial(first, first)], 3) == 3
    assert entered == [torch.device("cuda", 1)]


@pytest.mark.parametrize(("router", "padded"), [("quest", True), ("basis", True), ("basis", False), ("box", False)])
def test_a_model_says_the_same(router: str, padded: bool) -> None:
    """Decoding and sealing, budgets that leave pages out; padding is left to the tiers, nothing else is."""
    model: Any = tiny_models.llama()
    model, text = model.to(DEVICE), tiny_models.prompt(90, rows=2).to(DEVICE)
    mask = torch.ones_like(text)
    mask[0, : 21 * padded] = 0
    found = {}
    for impl in ("reference", "triton"):
        config = OvalConfig(page_size=8, budget_pages=5, seal_tokens=1, impl=impl, router=router)
        with attach(model, config) as handle:
            found[impl] = tiny_models.generate(model, text, attention_mask=mask, max_new_tokens=4)
            stats = handle.stats()
        assert stats["impl"] == impl
        assert stats["read_ratio"] < 0.7
        left_to_tiers = impl == "triton" and router == "basis" and padded
        assert stats["impl_fallbacks"] == ({"attention mask": 3} if left_to_tiers else {})
    assert torch.equal(found["triton"].sequences, found["reference"].sequences)
    for ours, theirs in zip(found["triton"].logits, found["reference"].logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
