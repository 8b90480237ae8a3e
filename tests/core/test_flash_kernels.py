"""Exact reading by FlashAttention against the reference; stand-ins for the packages and for torch's CUDA operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import kernels
from oval_core.attention import paged_attention
from oval_core.binding import Binding
from oval_core.kernels import Reads, reference
from oval_core.layer import OvalLayer
from oval_core.stats import Recorder
from tests.core import flash_packages
from tests.core.scenes import small_config
from tests.tolerance import assert_as_accurate_as

BATCH, HEADS, GROUP, DIM, TOKENS, SCALING = 2, 2, 3, 8, 900, 0.4
SIZES = [(8, 12), (256, 3)]  # page size, runs

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, without any FlashAttention package and with torch's operator working on a CPU."""
    module: Any = kernels.load("flash")
    flash_packages.install(monkeypatch)
    operator = torch.library.Library("aten", "IMPL", "CPU")
    operator.impl("_flash_attention_forward", sequences_by_sdpa)
    for function in (module._flash_2, module._flash_3):
        function.cache_clear()
    yield module
    operator._destroy()
    for function in (module._flash_2, module._flash_3):
        function.cache_clear()


def sequences_by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    seqused_k: Tensor,
    **_: Any,
) -> tuple[Tensor, ...]:
    """What `aten::_flash_attention_forward` does on a GPU, sequence by sequence with torch's own for CPUs."""
    assert cum_seq_q.dtype == cum_seq_k.dtype == seqused_k.dtype == torch.int32
    flash_packages.check(query, key)
    outs, masses = [], []
    for i, used in enumerate(seqused_k.tolist()):
        q = query[cum_seq_q[i] : cum_seq_q[i + 1]].transpose(0, 1)[None]
        k, v = (x[cum_seq_k[i] : cum_seq_k[i] + used].transpose(0, 1)[None] for x in (key, value))
        if used:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, dropout_p, is_causal, scale=scale
            )
        else:
            out, lse = torch.zeros_like(q), torch.full(q.shape[:3], torch.inf)
        outs.append(out[0].transpose(0, 1))
        masses.append(lse[0])
    nothing = torch.zeros(0)
    return torch.cat(outs), torch.cat(masses, 1), nothing, nothing, nothing


def stored(queries: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """A query, and keys and values that are the filled part of a storage with NaN behind it."""
    query = torch.randn(BATCH, HEADS, GROUP, queries, DIM).to(dtype).float()
    room = torch.full((2, BATCH, HEADS, TOKENS + 40, DIM), torch.nan, dtype=dtype)
    room[..., :TOKENS, :] = torch.randn(2, BATCH, HEADS, TOKENS, DIM).to(dtype)
    keys, values = room[..., :TOKENS, :].unbind(0)
    return query, keys, values


def runs(page_size: int, count: int, queries: int) -> Reads:
    """Runs that do not overlap, in any order: full, short and empty ones, some beyond the last position."""
    room = TOKENS // count
    order = torch.stack([torch.randperm(count) for _ in range(BATCH * HEADS)]).view(BATCH, HEADS, count)
    starts = order * room + torch.randint(0, room - page_size, order.shape)
    lengths = torch.randint(0, page_size + 1, order.shape)
    lengths[..., 0] = page_size
    last = torch.tensor([[TOKENS - queries], [TOKENS - room // 2 - queries]]) + torch.arange(queries)
    return Reads(starts, lengths, page_size, last, None)


def check(flash: Any, page_size: int, count: int, queries: int) -> None:
    query, keys, values = stored(queries)
    reads = runs(page_size, count, queries)

    def logits(query: Tensor, keys: Tensor) -> Tensor:
        """In the precision of the inputs; -inf where nothing is to be read."""
        position = torch.arange(TOKENS)
        inside = (position >= reads.starts[..., None]) & (position < (reads.starts + reads.lengths)[..., None])
        readable = inside.any(2)[:, :, None] & (position <= reads.last[:, None, :, None])
        return (SCALING * query @ keys[:, :, None].mT).masked_fill(~readable[:, :, None], -torch.inf)

    got = flash.attend_pages(query, keys, values, reads, SCALING, None)
    inputs = (query.to(keys.dtype), keys, values)
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert_as_accurate_as(lambda q, k, v: logits(q, k).softmax(-1) @ v[:, :, None], inputs, got.out)
    assert_as_accurate_as(lambda q, k, v: logits(q, k).logsumexp(-1), inputs, got.lse)
    expected = reference.attend_pages(query, keys, values, reads, SCALING, None)
    torch.testing.assert_close(got.lse, expected.lse, atol=0.02, rtol=0)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("page_size", "count"), SIZES)
def test_torchs_own_reads_a_copy(flash: Any, page_size: int, count: int, queries: int) -> None:
    check(flash, page_size, count, queries)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("page_size", "count"), SIZES)
def test_version_3_reads_runs_as_pages_of_one_token(
    flash: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, count: int, queries: int
) -> None:
    calls: flash_packages.Calls = []
    flash_packages.install(monkeypatch, flash_packages.flash_attn_3(calls), flash_packages.flash_attn_2(calls))
    check(flash, page_size, count, queries)
    (call,) = calls
    assert call["k_cache"].shape[1:] == (1, 1, DIM)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("page_size", "count"), SIZES)
def test_version_2_reads_full_runs_of_256(
    flash: Any, monkeypatch: pytest.MonkeyPatch, page_size: int, count: int, queries: int
) -> None:
    """Smaller pages go to torch's own."""
    calls: flash_packages.Calls = []
    flash_packages.install(monkeypatch, flash_packages.flash_attn_2(calls))
    check(flash, page_size, count, queries)
    assert len(calls) == (page_size == 256)
    for call in calls:
        assert call["k_cache"].shape[1:] == (256, 1, DIM)
        assert call["cache_seqlens"].sum() > 0


@pytest.mark.parametrize("package", ["none", "2", "3"])
def test_nothing_to_read(flash: Any, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    made = {"none": [], "2": [flash_packages.flash_attn_2([])], "3": [flash_packages.flash_attn_3([])]}
    flash_packages.install(monkeypatch, *made[package])
    query, keys, values = stored(1)
    reads = runs(256, 2, 1)
    reads.lengths[1, 0] = 0
    got = flash.attend_pages(query, keys, values, reads, SCALING, None)
    assert not got.out[1, 0].any()
    assert (got.lse[1, 0] == -torch.inf).all()
    assert got.out.isfinite().all()
    assert got.lse[0].isfinite().all()


LEFT = {
    "torch.float32 cache": {"dtype": torch.float32},
    "softcap": {"softcap": 5.0},
    "attention mask": {"masked": True},
    "head dimensions 12 and 12": {"dim": 12},
    "gradients": {"gradients": True},
}


@pytest.mark.parametrize(("reason", "case"), LEFT.items(), ids=list(LEFT))
def test_what_it_cannot_do_is_left_to_another(flash: Any, reason: str, case: dict[str, Any]) -> None:
    dim = case.get("dim", DIM)
    query = torch.randn(1, 1, 2, 3, dim, requires_grad="gradients" in case)
    keys, values = torch.randn(2, 1, 1, 40, dim).to(case.get("dtype", torch.bfloat16)).unbind(0)
    mask = torch.rand(1, 1, 3, 40) < 0.7 if "masked" in case else None
    reads = Reads(torch.tensor([[[3, 20]]]), torch.tensor([[[8, 5]]]), 8, torch.tensor([[37, 38, 39]]), mask)
    arguments = (query, keys, values, reads)
    assert flash.unsupported_reads(*arguments, case.get("softcap")) == reason
    got = flash.attend_pages(*arguments, SCALING, case.get("softcap"))
    expected = reference.attend_pages(*arguments, SCALING, case.get("softcap"))
    assert torch.equal(got.out, expected.out)
    assert torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize(("dtype", "fallbacks"), [(torch.bfloat16, {}), (torch.float32, {"torch.float32 cache": 1})])
def test_statistics_count_what_was_left(flash: Any, dtype: torch.dtype, fallbacks: dict[str, int]) -> None:
    config = small_config(stats_every=0)
    layer = OvalLayer(config, None, 0)
    for tokens in (60, 1):
        layer.update(*torch.randn(2, 1, HEADS, tokens, DIM).to(dtype).unbind(0))
        layer.attended(None)
    recorder, query = Recorder(config), torch.randn(1, HEADS * GROUP, 1, DIM).to(dtype)
    out, expected = (
        paged_attention(Binding(impl, "sdpa", recorder), layer, query, None, SCALING) for impl in ("flash", "reference")
    )
    assert recorder.report()["impl_fallbacks"] == fallbacks
    torch.testing.assert_close(out, expected, atol=0.02, rtol=0)


def test_a_gpu_is_needed() -> None:
    with pytest.raises(
        ValueError, match=r"impl must be 'auto' or one of \['reference'.*\] \(available on cpu\), got 'flash'"
    ):
        kernels.resolve("flash", torch.device("cpu"))
    assert "flash" in kernels.available(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("page_size", "count"), SIZES)
def test_on_a_gpu(page_size: int, count: int, queries: int) -> None:
    """With whatever is installed."""
    module = kernels.load("flash")
    query, keys, values = (x.cuda() for x in stored(queries))
    reads = runs(page_size, count, queries)
    moved = reads._replace(starts=reads.starts.cuda(), lengths=reads.lengths.cuda(), last=reads.last.cuda())
    assert module.unsupported_reads(query, keys, values, moved, None) is None
    got = module.attend_pages(query, keys, values, moved, SCALING, None)
    expected = reference.attend_pages(query, keys, values, moved, SCALING, None)
    torch.testing.assert_close(got.out, expected.out, atol=0.02, rtol=0.02)
    torch.testing.assert_close(got.lse, expected.lse, atol=0.02, rtol=0)
