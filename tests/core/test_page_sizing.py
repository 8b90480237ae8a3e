"""Pages that size themselves: what they are cut into, what they depend on, and how a cache keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.testing import assert_close

from oval_core import OvalConfig, attach
from oval_core.page_sizing import self_sized
from oval_core.page_sizing.head import SizingHead
from oval_core.page_sizing.self_sized import (
    CHUNK_TOKENS,
    OVERLAP_TOKENS,
    ByScore,
    SelfSizedPages,
    assign,
    chunks,
    entropy,
    sinkhorn,
    spread,
)
from oval_core.page_sizing.token_scores import NAMES, token_scores
from oval_core.page_table import TEXT, PageTable
from tests.core.scenes import DIM, HEADS, VALUE_DIM, Attention, assert_same_pages, filled, random_tokens, small_config
from tests.core.tiny_models import generate, llama, prompt

TOKEN_BYTES = HEADS * (DIM + VALUE_DIM) * 4
STEP = CHUNK_TOKENS - OVERLAP_TOKENS


class Cuts:
    """A policy that cuts 3, 5, 3, 5, ... tokens."""

    def lengths(self, keys: Tensor, page_size: int) -> list[int]:
        whole = [3, 5] * (keys.shape[1] // 8)
        return [*whole, *[1] * (keys.shape[1] % 8)]


def sized(**changes: Any) -> OvalConfig:
    """Decoding leaves at most 8 + 8 tokens open: more were prefilled."""
    return small_config(**{"page_policy": Cuts(), "max_sparse_query_tokens": 8, **changes})


def few_keys(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(2, tokens, 4, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30)
@given(
    st.integers(1, 1400), st.sampled_from((8, 16, 32)), st.integers(1, 8), st.sampled_from((spread, entropy)),
    st.booleans(),
)  # fmt: skip
@example(CHUNK_TOKENS + 1, 32, 8, spread, False)
@example(STEP + OVERLAP_TOKENS + 1, 32, 8, spread, True)
def test_pages_partition_any_length(tokens: int, page_size: int, mean_tokens: int, weigh: Any, alike: bool) -> None:
    keys = torch.ones(2, tokens, 4) if alike else few_keys(tokens)
    lengths = SelfSizedPages(weigh, mean_tokens).lengths(keys, page_size)
    assert sum(lengths) == tokens
    assert all(1 <= length <= page_size for length in lengths)


@given(st.integers(1, 3000))
def test_chunks_say_once_where_each_token_belongs(tokens: int) -> None:
    parts = [*chunks(tokens)]
    said = [token for part in parts for token in range(part.first, part.last)]
    assert said == [*range(1, tokens)]
    assert all(part.start <= part.first and part.last <= part.stop <= part.start + CHUNK_TOKENS for part in parts)
    inner = [part for part in parts if part.stop < tokens]
    assert all(part.stop - part.last == OVERLAP_TOKENS // 2 for part in inner)


def test_memory_for_plans_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def watched(keys: Tensor, weights: Tensor, mean_tokens: int) -> Tensor:
        shares = assign(keys, weights, mean_tokens)
        shapes.append(tuple(shares.shape))
        return shares

    monkeypatch.setattr(self_sized, "assign", watched)
    SelfSizedPages().lengths(few_keys(4 * CHUNK_TOKENS), 32)
    assert max(shapes) == (CHUNK_TOKENS, CHUNK_TOKENS // 16)
    assert len(shapes) == -(-(4 * CHUNK_TOKENS - OVERLAP_TOKENS) // STEP)


@settings(max_examples=9)
@given(st.integers(0, 2), st.integers(0, 99))
def test_far_tokens_do_not_matter(chunk: int, seed: int) -> None:
    """Cuts that one chunk decides are those of its tokens alone: others come in only where a page was too long."""
    keys, other = few_keys(3 * STEP + OVERLAP_TOKENS), few_keys(3 * STEP + OVERLAP_TOKENS, seed + 1)
    own = slice(chunk * STEP, chunk * STEP + CHUNK_TOKENS)
    other[:, own] = keys[:, own]
    policy, found = SelfSizedPages(), []
    for each in (keys, other, keys[:, own]):
        ends = torch.tensor(policy.lengths(each, 512)).cumsum(0)
        ends = ends if each.shape[1] == keys.shape[1] else ends + own.start
        half = OVERLAP_TOKENS // 2
        found.append([end for end in ends.tolist() if own.start + half <= end < own.stop - half])
    assert found[0] == found[1] == found[2]


def test_pages_are_short_where_keys_differ() -> None:
    calm, busy = 0.05 * few_keys(200) + 3, few_keys(100, 1)
    lengths = SelfSizedPages(spread, 16).lengths(torch.cat([calm, busy], 1), 64)
    page_of = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    per_token = [len(page_of[part].unique()) / (part.stop - part.start) for part in (slice(0, 180), slice(220, 300))]
    assert per_token[1] > 3 * per_token[0]


@pytest.mark.parametrize("weigh", [spread, entropy])
def test_sizes_follow_the_content_and_are_alike_without_any(weigh: ByScore) -> None:
    """Tokens that wander at a pace that comes and goes; then at one pace, in as many dimensions as a model has."""
    chance = torch.Generator().manual_seed(0)
    noise = torch.randn(3, 512, 64, generator=chance)
    lengths = [
        torch.tensor(SelfSizedPages(weigh).lengths(keys, 32)).float()
        for keys in (noise * (0.2 + torch.arange(512).div(40).sin().square())[:, None], noise, torch.ones_like(noise))
    ]
    assert lengths[0].std() > 5
    assert lengths[0].min() <= 10
    assert lengths[0].max() >= 24
    for alike in lengths[1:]:
        assert float(alike.mean()) == pytest.approx(16, abs=0.5)
        assert alike.std() < 3


@pytest.mark.parametrize("value", [torch.nan, 1e18])
def test_keys_that_are_no_numbers_or_huge_do_no_harm(value: float) -> None:
    keys = torch.randn(2, 300, 16)
    keys[:, 7] = value
    for sharpness in (0.5, 50.0):
        lengths = SelfSizedPages(ByScore("spread", sharpness)).lengths(keys, 32)
        assert sum(lengths) == 300
        assert max(lengths) <= 32


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weigh must return weights \[100\], got \[100, 4\]"):
        SelfSizedPages(lambda scores: scores).lengths(torch.randn(2, 100, 16), 32)


def test_more_sharpness_makes_sizes_differ_more() -> None:
    keys = torch.randn(3, 512, 64, generator=torch.Generator().manual_seed(0))
    spreads = [
        float(torch.tensor(SelfSizedPages(ByScore("spread", sharpness)).lengths(keys, 32)).float().std())
        for sharpness in (0.0, 0.5, 1.0, 2.0)
    ]
    assert spreads == sorted(spreads)
    assert spreads[0] < 2
    assert spreads[-1] > 4


def test_what_cannot_weigh_is_refused() -> None:
    with pytest.raises(ValueError, match="one of change, contrast, spread, entropy, got 'size'"):
        ByScore("size")
    with pytest.raises(ValueError, match="sharpness must be a finite number >= 0, got -1"):
        ByScore("spread", -1.0)
    assert torch.equal(ByScore("change")(torch.ones(1, 4)), torch.ones(1))


def test_a_page_ends_where_the_keys_change() -> None:
    """Tokens of the same weight: without keys pages would end at multiples of 16."""
    keys = torch.zeros(2, 64, 4)
    keys[:, :20], keys[:, 20:] = 1.0, -1.0
    shares = assign(keys, torch.ones(64), 16)
    assert 20 in self_sized.page_ends(shares).tolist()
    assert self_sized.page_ends(assign(torch.ones(2, 64, 4), torch.ones(64), 16)).tolist() == [16, 32, 48]


def test_sinkhorn_hands_out_all_weight_and_fills_pages_alike() -> None:
    cost, weights = torch.rand(40, 5), torch.rand(40)
    plan = sinkhorn(cost, weights / weights.sum())
    assert_close(plan.sum(1), weights / weights.sum())
    assert_close(plan.sum(0), torch.full((5,), 0.2), atol=1e-3, rtol=0)
    assert torch.equal(plan.topk(5, 0).indices[0].sort().values, plan.argmax(0).sort().values)


def test_scores_by_hand() -> None:
    """Two runs of equal keys: nothing changes but once, where everything does."""
    keys = torch.ones(1, 40, 4)
    keys[:, 20:] = -1
    scores = dict(zip(NAMES, token_scores(keys).unbind(-1), strict=True))
    assert scores["change"].nonzero().tolist() == [[20]]
    assert float(scores["change"][20]) == pytest.approx(2)
    assert int(scores["contrast"].argmax()) == 20
    assert float(scores["contrast"][20]) == pytest.approx(2)
    assert float(scores["spread"][20]) == pytest.approx(1)
    assert float(scores["spread"][5]) == pytest.approx(0, abs=1e-3)
    assert float(scores["entropy"].max()) <= 1
    assert scores["entropy"][10] > scores["entropy"][20]
    assert float(scores["entropy"][0]) == pytest.approx(1)


def test_marked_spans_keep_their_pages() -> None:
    table = PageTable(8)
    table.extend(60)
    table.mark(10, 31, tag=5)
    assert table.unmarked(60) == [range(0, 10), range(31, 60)]
    assert table.unmarked(20) == [range(0, 10)]
    table.seal(40, ends=[3, 7, 15, 33])
    assert table.lengths == [3, 4, 3, 8, 8, 5, 2]
    assert table.tags == [TEXT] * 3 + [5] * 3 + [TEXT]
    assert table.unmarked(60) == [range(33, 60)]


def test_a_prefill_is_cut_and_decoding_fills_whole_pages() -> None:
    attention = filled(sized(), random_tokens(1, 41))
    assert attention.layer.tables[0].lengths == [3, 5] * 4 + [3]
    attention.decode(random_tokens(1, 20))
    assert attention.layer.tables[0].lengths == [3, 5] * 4 + [3, 8, 8, 8]


def test_spans_lie_between_pages_of_the_policy() -> None:
    attention, tokens = Attention(sized()), random_tokens(1, 41)
    attention(tokens.part(0, 40))
    attention.layer.mark(0, 9, 20, tag=1)
    attention.decode(tokens.part(40))
    assert attention.layer.tables[0].lengths == [3, 5, 1, 8, 3, 3, 5, 3, 5, 1, 1, 1]


def test_rows_are_cut_apart_and_padding_is_left_out() -> None:
    tokens = random_tokens(2, 300)
    config = sized(page_policy=SelfSizedPages(mean_tokens=4))
    both, alone = filled(config, tokens, [0, 50]), filled(config, tokens.part(50, row=1))
    lengths = [table.lengths for table in both.layer.tables]
    assert lengths[0] != lengths[1] == alone.layer.tables[0].lengths
    assert sum(lengths[1]) <= 249


def test_cropping_opens_pages_and_reset_starts_anew() -> None:
    tokens = random_tokens(1, 60)
    attention = filled(sized(), tokens.part(0, 41))
    attention.layer.crop(-21)
    assert attention.layer.tables[0].lengths == [3, 5, 3, 5, 3]
    attention.decode(tokens.part(20, 36))
    assert attention.layer.tables[0].lengths == [3, 5, 3, 5, 3, 8, 8]
    attention.layer.keep([[19, 21, 22]], [19])
    assert attention.layer.tables[0].lengths == [3, 5, 3, 5, 3]
    attention.layer.reset()
    attention(tokens.part(0, 40))
    attention.decode(tokens.part(40, 41))
    assert_same_pages(attention.layer, filled(sized(), tokens.part(0, 41)).layer)


def test_bytes_count_the_tokens_that_were_read() -> None:
    """Sink of 3 tokens, window of 1, and 2 open ones."""
    report = filled(sized(router="window", budget_pages=3), random_tokens(1, 37)).recorder.report()
    assert report["bytes_read"] == (3 + 1 + 2) * TOKEN_BYTES
    assert report["pages_read_mean"] == 3


@pytest.mark.parametrize("router", ["basis", "box", "quest"])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_full_budget_is_dense(router: str, impl: str) -> None:
    model, text = llama(), prompt(200)
    policy = SelfSizedPages(mean_tokens=4)
    config = OvalConfig(
        page_size=8, page_policy=policy, budget_ratio=1.0, always_paged=True, router=router, impl=impl, rank=2
    )
    expected = generate(model, text).sequences
    with attach(model, config) as handle:
        assert torch.equal(generate(model, text).sequences, expected)
        assert handle.stats()["pages"] > 200 / 8 + 2


class Wrong:
    def __init__(self, lengths: Sequence[int]) -> None:
        self.found = lengths

    def lengths(self, keys: Tensor, page_size: int) -> Sequence[int]:
        return self.found


@pytest.mark.parametrize("lengths", [[8, 8], [9] * 4 + [4], [0, *[8] * 5], [8] * 6])
def test_what_is_no_partition_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="must cut 40 tokens into pages of 1 to 8"):
        filled(sized(page_policy=Wrong(lengths)), random_tokens(1, 41))


@pytest.mark.parametrize("policy", ["spread", 16, SelfSizedPages])
def test_what_is_no_policy_is_refused(policy: Any) -> None:
    with pytest.raises(TypeError, match="page_policy"):
        OvalConfig(page_policy=policy)


def test_mean_tokens_must_fit() -> None:
    with pytest.raises(ValueError, match="mean_tokens must be an integer >= 1, got 0"):
        SelfSizedPages(mean_tokens=0)
    with pytest.raises(ValueError, match="at most page_size = 8, got 16"):
        OvalConfig(page_size=8, page_policy=SelfSizedPages())
    with pytest.raises(ValueError, match="at most page_size = 8, got 16"):
        SelfSizedPages().lengths(few_keys(20), 8)


def test_a_head_is_what_it_was_when_saved(tmp_path: Path) -> None:
    head, scores = SizingHead(), token_scores(few_keys(30))
    head.save(tmp_path / "heads" / "sizing.safetensors")
    loaded = SizingHead.load(tmp_path / "heads" / "sizing.safetensors")
    assert torch.equal(loaded(scores), head(scores))
    assert bool((loaded(scores) > 0).all())
    assert not loaded(scores).requires_grad


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(FileNotFoundError, match="a sizing head"):
        SizingHead.load(path)
    path.write_bytes(b"no")
    with pytest.raises(ValueError, match="no safetensors file"):
        SizingHead.load(path)
    good = {name: tensor.clone() for name, tensor in SizingHead().state_dict().items()}
    about = {"format": "oval sizing head 1", "scores": " ".join(NAMES)}
    for tensors, metadata, message in (
        (good, {**about, "scores": "change"}, "metadata"),
        ({**good, "more": torch.zeros(1)}, about, "more"),
        ({**good, "out.bias": torch.zeros(2)}, about, "out.bias"),
        ({**good, "out.bias": torch.zeros(1).half()}, about, "out.bias"),
    ):
        save_file(tensors, path, metadata)
        with pytest.raises(ValueError, match=message):
            SizingHead.load(path)
