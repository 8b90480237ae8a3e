"""Every router keeps the rules of selection; each one's own score is what its paper says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oval_core.attention import paged_attention
from oval_core.routers import ROUTERS, Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.oracle import exact_log_mass
from tests.core.scenes import (
    DIM,
    GROUP,
    HEADS,
    VALUE_DIM,
    Attention,
    filled,
    left_padding,
    random_tokens,
    small_config,
)

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAMES = [kind.name for kind in ROUTERS]
PADDING = [0, 37, 73]  # 80 tokens and one: 10, 5 and 0 sealed pages


def scene(router: Any, padding: list[int] | None = None, queries: int = 1, **changes: Any) -> tuple[Tensor, Pages, Any]:
    """Grouped query, pages and the router itself."""
    padding = PADDING if padding is None else padding
    attention = filled(small_config(router=router, **changes), random_tokens(len(padding), 81), padding)
    query = torch.randn(len(padding), HEADS * GROUP, queries, DIM)
    return *attention.pages(query), attention.layer.router


def chosen(selection: Selection, row: int, head: int = 0) -> list[int]:
    """The pages that count, in order of choice."""
    return selection.pages[row, head][selection.valid[row, head]].tolist()


@pytest.mark.parametrize("router", NAMES)
@pytest.mark.parametrize("queries", [1, 3])
def test_the_rules_of_selection(router: str, queries: int) -> None:
    query, pages, chooser = scene(router, queries=queries, budget_pages=5, sink_pages=1, window_pages=2)
    selection = chooser.select(query, pages)
    assert pages.counts.tolist() == [10, 5, 0]
    assert selection.pages.shape == selection.valid.shape == (3, HEADS, 4)
    assert (selection.pages.dtype, selection.valid.dtype) == (torch.int64, torch.bool)
    for row, count in enumerate((10, 5, 0)):
        for head in range(HEADS):
            read = chosen(selection, row, head)
            assert len(read) == len(set(read)) == min(4, count)
            assert set(read) <= set(range(count))
            assert {0, count - 2, count - 1} <= set(read) or not count


@pytest.mark.parametrize("router", NAMES)
def test_each_row_has_its_own_budget(router: str) -> None:
    query, pages, chooser = scene(router, budget_pages=None, budget_ratio=0.75)
    selection = chooser.select(query, pages)
    assert [len(chosen(selection, row)) for row in range(3)] == [7, 3, 0]  # 0.75 of 11 and of 6, less the open tokens


@pytest.mark.parametrize("router", NAMES)
def test_a_budget_above_the_context_selects_everything(router: str) -> None:
    query, pages, chooser = scene(router, budget_pages=99)
    selection = chooser.select(query, pages)
    assert [sorted(chosen(selection, row)) for row in range(3)] == [[*range(10)], [*range(5)], []]
    if selection.tail is not None:
        assert (selection.tail.lse == -torch.inf).all()
        assert selection.tail.out.isfinite().all()


@settings(max_examples=25)
@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 80), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(0, 9),
)
def test_any_rows_and_budgets(router: str, padding: list[int], sinks: int, window: int, spare: int) -> None:
    changes = {"sink_pages": sinks, "window_pages": window, "budget_pages": sinks + window + 1 + spare}
    query, pages, chooser = scene(router, padding, **changes)
    if not pages.most[1]:
        return  # no row has a page: attention would be dense
    selection = chooser.select(query, pages)
    for row, hidden in enumerate(padding):
        count, read = (80 - hidden) // 8, chosen(selection, row)
        assert len(read) == len(set(read)) == min(sinks + window + spare, count)
        assert {*range(min(sinks, count)), *range(max(count - window, 0), count)} <= set(read) <= set(range(count))


def page_logits(query: Tensor, pages: Pages) -> list[list[Tensor]]:
    """By row and page: the logits of its tokens, `[H, G, Q, n]`."""
    logits = pages.scaling * query @ pages.keys[:, :, None].mT
    return [
        [logits[row, ..., start : start + length] for start, length in zip(starts[:count], lengths, strict=False)]
        for row, (starts, lengths, count) in enumerate(
            zip(pages.starts.tolist(), pages.lengths.tolist(), pages.counts.tolist(), strict=True)
        )
    ]


def test_the_oracle_takes_the_heaviest_pages() -> None:
    query, pages, router = scene("oracle", sink_pages=0, window_pages=0, budget_pages=4)
    selection = router.select(query, pages)
    for row, by_page in enumerate(page_logits(query, pages)[:2]):
        mass = torch.stack([logits.exp().sum(-1) for logits in by_page], -1)  # [H, G, Q, P]
        share = (mass / mass.sum(-1, keepdim=True)).mean((1, 2))
        for head in range(HEADS):
            assert chosen(selection, row, head) == share[head].topk(3).indices.tolist()


def test_the_oracle_knows_the_softcap() -> None:
    attention = filled(small_config(), random_tokens(1, 81))
    query, pages = attention.pages(4 * torch.randn(1, HEADS * GROUP, 1, DIM), softcap=0.5)
    expected = torch.stack([(0.5 * (x / 0.5).tanh()).logsumexp(-1) for x in page_logits(query, pages)[0]], -1)
    torch.testing.assert_close(exact_log_mass(query, pages)[0], expected)


def test_hidden_tokens_have_no_mass() -> None:
    attention, tokens = Attention(small_config()), random_tokens(1, 17)
    mask = left_padding([0], 16, 16)
    mask[..., 3:6] = False
    attention(tokens.part(0, 16), mask)
    attention(tokens.part(16), torch.cat([mask[:, :, -1:], mask[:, :, -1:, :1]], -1))
    query, pages = attention.pages(tokens.part(16).query)
    logits = page_logits(query, pages)[0][0][..., [0, 1, 2, 6, 7]]
    torch.testing.assert_close(exact_log_mass(query, pages)[0, ..., 0], logits.logsumexp(-1))


def test_quest_bounds_every_token() -> None:
    query, pages, router = scene("quest", queries=2)
    bound = router.score(query, pages)
    for row, by_page in enumerate(page_logits(query, pages)):
        for page, logits in enumerate(by_page):
            assert (logits <= bound[row, ..., page, None] + 1e-5).all()


def test_box_and_mean_by_formula() -> None:
    for name, share_of_radius in (("box", 1.0), ("mean", 0.0)):
        query, pages, router = scene(name, [0])
        basis, score = pages.basis, router.score(query, pages)
        mu, radius = basis.coarse()
        logits = torch.einsum("bhgqd,bhpd->bhgqp", query, mu)
        logits += share_of_radius * torch.einsum("bhgqd,bhpd->bhgqp", query.abs(), radius)
        torch.testing.assert_close(score, pages.scaling * logits + basis.tokens.log()[:, :, None, None])


def test_the_window_is_the_most_recent() -> None:
    query, pages, router = scene("window", budget_pages=6)
    selection = router.select(query, pages)
    assert [sorted(chosen(selection, row)) for row in range(3)] == [[0, 6, 7, 8, 9], [0, 1, 2, 3, 4], []]


def test_random_pages_follow_the_seed_and_change() -> None:
    picks = []
    for seed in (1, 1, 2):
        query, pages, router = scene("random", [0], seed=seed, budget_pages=5)
        picks.append([sorted(chosen(router.select(query, pages), 0)) for _ in range(8)])
    assert picks[0] == picks[1] != picks[2]
    assert len({tuple(pick) for pick in picks[0]}) > 1


class EvenPages(Router):
    """A router of one's own."""

    name = "even"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        return (pages.index % 2 == 0).float().expand(*query.shape[:4], -1)


def test_a_router_of_ones_own() -> None:
    query, pages, router = scene(EvenPages(), [0], budget_pages=7)
    assert sorted(chosen(router.select(query, pages), 0)) == [0, 2, 4, 6, 8, 9]
    assert router.metadata_bytes(10, 5, pages.basis, pages.features) == 0


def test_a_router_without_a_score_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Router must override score or select"):
        scene(Router(), [0])


def test_quest_needs_its_features() -> None:
    attention = filled(small_config(), random_tokens(1, 81))
    query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
    quest = next(kind for kind in ROUTERS if kind.name == "quest")()
    with pytest.raises(ValueError, match="quest router needs a cache that was filled under it"):
        quest.select(query, pages)


def test_metadata_bytes() -> None:
    per_page = {
        "box": DIM + 4 + DIM // 2 + 4 + 4,
        "mean": DIM + 4 + 4,
        "quest": 2 * DIM * 4,
        "window": 0,
        "random": 0,
        "oracle": 0,
    }
    for name, expected in per_page.items():
        _, pages, router = scene(name, [0])
        assert router.metadata_bytes(10, 5, pages.basis, pages.features) == 10 * expected
    _, pages, router = scene("basis", [0])
    vectors = (DIM // 2, 8 // 2, VALUE_DIM // 2)  # of a page of 8 tokens, two entries a byte
    basis_bytes = sum(2 * (bytes_ + 4) for bytes_ in vectors) + VALUE_DIM + 4 + 3 * 4
    assert pages.basis.basis_bytes == basis_bytes
    assert router.metadata_bytes(10, 5, pages.basis, pages.features) == 10 * per_page["box"] + 5 * basis_bytes


def test_basis_ranks_by_impact() -> None:
    """`mean over g of p_g (rho_v / mean||V|| + s ||q_g|| rho_k / sqrt(D))`, with every page on the shortlist."""
    query, pages, router = scene("basis", [0], shortlist_ratio=1, sink_pages=0, window_pages=0, budget_pages=4)
    basis, everything = pages.basis, torch.arange(10).expand(1, HEADS, 10)
    share = pages.kernels.evaluate_bases(query, basis, everything, pages.scaling, None).lse.softmax(-1)
    mean_norm = basis.value_norm.sum() / basis.tokens.sum()
    reach = pages.scaling * query.norm(dim=-1)[..., None] * basis.key_error[:, :, None, None] / DIM**0.5
    impact = (share * (basis.value_error[:, :, None, None] / mean_norm + reach)).mean((2, 3))
    selection = router.select(query, pages)
    for head in range(HEADS):
        assert chosen(selection, 0, head) == impact[0, head].topk(3).indices.tolist()


def test_the_tail_is_what_is_shortlisted_but_not_read() -> None:
    query, pages, router = scene("basis", [0], shortlist_ratio=0.7, budget_pages=4)
    selection = router.select(query, pages)
    coarse = pages.weights(pages.kernels.coarse_scores(query, pages.basis, pages.scaling, None))
    listed, valid = pages.top(coarse, pages.shortlist, pages.most[1])
    assert valid.sum(-1).tolist() == [[7] * HEADS]
    page = pages.kernels.evaluate_bases(query, pages.basis, listed, pages.scaling, None)
    for head in range(HEADS):
        tail = [i for i, p in enumerate(listed[0, head].tolist()) if p not in chosen(selection, 0, head)]
        lse = page.lse[0, head][..., tail]
        torch.testing.assert_close(selection.tail.lse[0, head], lse.logsumexp(-1))
        expected = (lse.softmax(-1)[..., None] * page.out[0, head][..., tail, :]).sum(-2)
        torch.testing.assert_close(selection.tail.out[0, head], expected)


def test_no_tail_on_request() -> None:
    query, pages, router = scene("basis", estimate_tail="none")
    with_tail = scene("basis")[2]
    assert router.select(query, pages).tail is None
    assert torch.equal(router.select(query, pages).pages, with_tail.select(query, pages).pages)


def test_a_page_that_a_query_sees_in_part_is_not_estimated() -> None:
    """A tree mask may hide some tokens of a page from one query: a basis cannot speak for the rest."""
    attention = filled(small_config(shortlist_ratio=1, budget_pages=3), random_tokens(1, 81))
    query, mask = torch.randn(1, HEADS * GROUP, 2, DIM), torch.ones(1, 1, 2, 81, dtype=torch.bool)
    mask[0, 0, 0, 8:79] = mask[0, 0, 1, 8] = False  # query 0: nothing from pages 1..8; query 1: part of page 1
    grouped, pages = attention.pages(query, mask)
    selection = attention.layer.router.select(grouped, pages)
    assert pages.seen is not None
    assert pages.seen[0].tolist() == [[8, *[0] * 8, 1], [8, 7, *[8] * 8]]
    assert [{*chosen(selection, 0, head)} for head in range(HEADS)] == [{0, 9}] * HEADS
    assert selection.tail is not None
    assert (selection.tail.lse[:, :, :, 0] == -torch.inf).all()
    page = pages.kernels.evaluate_bases(
        grouped, pages.basis, torch.arange(2, 9).expand(1, HEADS, 7), pages.scaling, None
    )
    torch.testing.assert_close(selection.tail.lse[:, :, :, 1], page.lse[:, :, :, 1].logsumexp(-1))


def test_hidden_tokens_have_no_influence_on_paged_attention() -> None:
    """Also not through a basis: what a query must not see may hold anything."""
    attention = filled(small_config(shortlist_ratio=1, budget_pages=3), random_tokens(1, 81))
    query, mask = torch.randn(1, HEADS * GROUP, 1, DIM), torch.ones(1, 1, 1, 81, dtype=torch.bool)
    mask[..., 10:30] = False
    outputs = []
    for extreme in (0.0, 50.0):
        attention.layer.store.dense()[1][:, :, 10:30] = extreme
        outputs.append(paged_attention(attention.binding, attention.layer, query, mask, DIM**-0.5))
    assert torch.equal(*outputs)


def test_a_chunk_shares_one_selection() -> None:
    tokens = random_tokens(1, 84)
    attention = filled(small_config(), tokens.part(0, 81))
    query, pages = attention.pages(tokens.part(81).query)
    selection = BasisRouter().select(query, pages)
    assert selection.pages.shape == (1, HEADS, 3)
    assert selection.tail is not None
    assert selection.tail.lse.shape == (1, HEADS, GROUP, 3)


def test_routers_see_tags_and_positions() -> None:
    attention = Attention(small_config())
    tokens = random_tokens(2, 42)
    attention(tokens.part(0, 40), left_padding([0, 8], 40, 40))
    attention.layer.mark(0, 8, 20, tag=3)
    attention.decode(tokens.part(40), [0, 8])
    _, pages = attention.pages(tokens.part(40).query)
    assert pages.tags[0].tolist() == [-1, 3, 3, -1, -1]
    assert pages.lengths[0].tolist() == [8, 8, 4, 8, 8]
    assert pages.starts[1, :4].tolist() == [8, 16, 24, 32]
    assert pages.positions.tolist() == [[40, 41], [32, 33]]
