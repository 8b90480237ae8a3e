"""The fused CPU cascade equals the reference; what it cannot do is counted and done by the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import OvalConfig
from oval_core.attention import paged_attention
from oval_core.binding import Binding
from oval_core.layer import OvalLayer
from oval_core.stats import Recorder

pytestmark = pytest.mark.usefixtures("poisoned_memory", "little_spare")
SCALING = 0.2


def small_config(**changes: Any) -> OvalConfig:
    return OvalConfig(**{"page_size": 8, "router": "basis", **changes})


def layer_of(
    config: OvalConfig, batch: int, heads: int, dims: tuple[int, int], tokens: tuple[int, int], dtype: torch.dtype
) -> OvalLayer:
    """A layer that has read `tokens[0]` tokens and then `tokens[1]` more, not yet attended."""
    layer = OvalLayer(config, None, 0)
    for count in tokens:
        keys, values = (torch.randn(batch, heads, count, dim).to(dtype) for dim in dims)
        layer.update(2 * keys, values)
        if count != tokens[-1]:
            layer.attended(None)
    layer.attended(None)
    return layer


def run(impl: str, layer: OvalLayer, query: Tensor, mask: Tensor | None = None, **options: Any) -> tuple[Tensor, dict]:
    recorder = Recorder(layer.config)
    recorder.step = 2
    with recorder.tracing() as trace:
        out = paged_attention(Binding(impl, "sdpa", recorder), layer, query, mask, SCALING, **options)
    return out, {**recorder.report(), "read": trace[0].read}


def assert_same(layer: OvalLayer, query: Tensor, mask: Tensor | None = None, atol: float = 2e-5) -> None:
    """Same output, same pages, same figures, and no fallback."""
    ours, stats = run("cpu", layer, query, mask)
    theirs, expected = run("reference", layer, query, mask)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert torch.equal(stats["read"], expected["read"])
    assert stats["impl_fallbacks"] == {}
    for name in ("bytes_read", "bytes_dense", "metadata_bytes", "pages_read_mean", "page_utilization"):
        assert stats[name] == expected[name], name


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("dims", [(64, 64), (80, 48), (17, 33)])
@pytest.mark.parametrize("router", ["basis", "box"])
def test_shapes(router: str, queries: int, group: int, dims: tuple[int, int]) -> None:
    layer = layer_of(small_config(budget_pages=6, router=router), 2, 3, dims, (301, queries), torch.float32)
    assert_same(layer, torch.randn(2, 3 * group, queries, dims[0]))


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 32, "rank": 8},
        {"page_size": 16, "rank": 1, "sink_pages": 0, "window_pages": 0, "budget_pages": 1},
        {"estimate_tail": "none"},
        {"budget_ratio": 1.0, "budget_pages": None},
        {"sink_pages": 2, "window_pages": 3},
        {"shortlist_ratio": 1.0},
        {"shortlist_pages": 7},
        {"router": "box"},
        {"router": "box", "sink_pages": 2, "window_pages": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_settings(settings: dict[str, Any], threads: int) -> None:
    config = small_config(**{"budget_pages": 6, **settings})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert_same(layer_of(config, 1, 2, (24, 24), (333, 1), torch.float32), torch.randn(1, 4, 1, 24))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("router", ["basis", "box"])
def test_bfloat16(router: str) -> None:
    layer = layer_of(small_config(budget_pages=6, router=router), 1, 2, (32, 32), (200, 1), torch.bfloat16)
    query = torch.randn(1, 4, 1, 32).bfloat16()
    assert_same(layer, query, atol=float(torch.finfo(torch.bfloat16).eps))


@pytest.mark.parametrize("router", ["basis", "box"])
def test_rows_of_different_length_and_padding(router: str) -> None:
    config = small_config(budget_pages=5, router=router)
    layer = OvalLayer(config, None, 0)
    visible = torch.ones(2, 150, dtype=torch.bool)
    visible[0, :37] = False
    layer.update(torch.randn(2, 2, 150, 16), torch.randn(2, 2, 150, 16))
    layer.attended(visible)
    layer.update(torch.randn(2, 2, 1, 16), torch.randn(2, 2, 1, 16))
    mask = torch.cat([visible, torch.ones(2, 1, dtype=torch.bool)], 1)[:, None, None]
    layer.attended(mask[:, 0, 0, -1:])
    assert_same(layer, torch.randn(2, 4, 1, 16), mask)


@pytest.mark.parametrize("router", ["basis", "box"])
def test_tokens_hidden_inside_pages(router: str) -> None:
    config = small_config(budget_pages=5, router=router)
    layer = OvalLayer(config, None, 0)
    visible = torch.rand(1, 160) < 0.7
    visible[0, 0] = True
    visible[0, 40:48] = False  # a page without a readable token
    layer.update(torch.randn(1, 2, 160, 16), torch.randn(1, 2, 160, 16))
    layer.attended(visible)
    layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    layer.attended(torch.ones(1, 1, dtype=torch.bool))
    mask = torch.cat([visible, torch.ones(1, 1, dtype=torch.bool)], 1)[:, None, None]
    assert_same(layer, torch.randn(1, 4, 1, 16), mask)


def test_a_tree_mask() -> None:
    layer = layer_of(small_config(budget_pages=5), 1, 2, (16, 16), (140, 4), torch.float32)
    mask = torch.ones(1, 1, 4, 144, dtype=torch.bool)
    mask[0, 0, :, 140:] = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    assert_same(layer, torch.randn(1, 4, 4, 16), mask)


@pytest.mark.parametrize("router", ["basis", "box"])
def test_marked_pages_are_short(router: str) -> None:
    config = small_config(budget_pages=5, router=router)
    layer = OvalLayer(config, None, 0)
    layer.update(torch.randn(1, 2, 150, 16), torch.randn(1, 2, 150, 16))
    layer.mark(0, 21, 83, tag=0)
    layer.attended(None)
    layer.update(torch.randn(1, 2, 1, 16), torch.randn(1, 2, 1, 16))
    layer.attended(None)
    assert min(layer.tables[0].lengths) < 8
    assert_same(layer, torch.randn(1, 4, 1, 16))


@pytest.mark.parametrize("router", ["basis", "box"])
def test_a_row_with_fewer_pages_than_the_budget(router: str) -> None:
    config = small_config(budget_pages=8, seal_tokens=1, router=router)
    layer = layer_of(config, 2, 2, (16, 16), (150, 1), torch.float32)
    layer.crop_rows([20, 151])
    for count in (1, 1):
        layer.update(torch.randn(2, 2, count, 16), torch.randn(2, 2, count, 16))
        layer.attended(None)
    assert layer.pages.counts == [2, 19]
    assert_same(layer, torch.randn(2, 4, 1, 16))


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_a_query_that_is_no_number_spoils_only_its_own_head(odd: float) -> None:
    layer = layer_of(small_config(budget_pages=6), 1, 2, (16, 16), (140, 1), torch.float32)
    query = torch.randn(1, 4, 1, 16)
    query[0, 0, 0, 3] = odd
    ours, theirs = (run(impl, layer, query)[0] for impl in ("cpu", "reference"))
    torch.testing.assert_close(ours[:, :, 2:], theirs[:, :, 2:], rtol=0, atol=2e-5)  # the other KV head's


def test_what_it_cannot_do_is_counted() -> None:
    config = small_config(budget_pages=5)
    layer = layer_of(config, 1, 2, (16, 16), (140, 1), torch.float32)
    query = torch.randn(1, 4, 1, 16)
    hiding = torch.ones(1, 1, 1, 141, dtype=torch.bool)
    hiding[..., 50] = False
    cases: list[tuple[str, Tensor, Tensor | None, dict[str, Any]]] = [
        ("softcap", query, None, {"softcap": 5.0}),
        ("sink logits", query, None, {"s_aux": torch.randn(4)}),
        ("mask that hides sealed tokens", query, hiding, {}),
        ("gradients", query.clone().requires_grad_(), None, {}),
    ]
    for reason, asked, mask, options in cases:
        ours, stats = run("cpu", layer, asked, mask, **options)
        theirs, _ = run("reference", layer, asked, mask, **options)
        assert torch.equal(ours, theirs)
        assert stats["impl_fallbacks"] == {reason: 1}
    half = layer_of(config, 1, 2, (16, 16), (140, 1), torch.float16)
    assert run("cpu", half, query.half())[1]["impl_fallbacks"] == {"torch.float16 cache": 1}


def test_the_number_of_threads_stays_what_the_user_chose() -> None:
    """Numba's first parallel call asks OpenMP, which torch shares, for all cores."""
    code = "import torch; from oval_core.kernels import cpu; cpu.warm_up(torch.float32); print(torch.get_num_threads())"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split()[-1] == "1"
