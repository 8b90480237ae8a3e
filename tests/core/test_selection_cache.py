"""The selection cache asks its router exactly when it must, and estimates for the query at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oval_core import OvalConfig
from oval_core.routers import Pages, Selection, make_router
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter
from oval_core.routers.selection_cache import HITS, MISSES, SelectionCacheRouter
from tests.core.scenes import DIM, GROUP, HEADS, Attention, filled, random_tokens, small_config
from tests.tolerance import assert_dense

pytestmark = pytest.mark.usefixtures("poisoned_memory")


class Asked(BasisRouter):
    """Remembers for which token it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []

    def select(self, query: Tensor, pages: Pages) -> Selection:
        self.tokens.append(pages.tables[0].length - 1)
        return super().select(query, pages)


def caching(inner: Any = None, prompt: int = 81, batch: int = 1, **arguments: Any) -> Attention:
    router = SelectionCacheRouter(inner, **{"min_cosine": -1, **arguments})
    return filled(small_config(router=router, budget_pages=6), random_tokens(batch, prompt))


def decode(attention: Attention, tokens: int = 1) -> None:
    attention.decode(random_tokens(len(attention.layer.tables), tokens))


def test_a_selection_serves_so_many_steps_or_until_a_page_is_sealed() -> None:
    attention = caching(asked := Asked(), steps=3)  # at token 80; 80 to 87 fill a page, sealed at 88
    decode(attention, 12)
    assert asked.tokens == [80, 83, 86, 88, 91]
    assert attention.recorder.report()["router_counts"] == {HITS: 8, MISSES: 5}
    assert attention.layer.tables[0].num_pages == 11


def test_what_is_read_stays_the_same_and_what_is_estimated_follows_the_query() -> None:
    attention = caching()
    query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
    router = attention.layer.router
    attention.layer.tables[0].extend(1)
    reused, own = router.select(query, pages), BasisRouter().select(query, pages)
    assert reused.counts == {HITS: 1, MISSES: 0}
    coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, None)
    assert reused.tail is not None
    expected = BasisRouter().estimate(query, pages, coarse, reused.mask(10))
    torch.testing.assert_close(reused.tail, expected)
    assert not torch.equal(reused.mask(10), own.mask(10))


def test_one_head_whose_query_drifted_is_enough() -> None:
    attention = caching(min_cosine=0.9)
    router, table = attention.layer.router, attention.layer.tables[0]
    query, pages = attention.pages(torch.randn(1, HEADS * GROUP, 1, DIM))
    router.select(query, pages)
    table.extend(1)
    assert router.select(2 * query, pages).counts == {HITS: 1, MISSES: 0}  # the direction counts
    turned = torch.cat([query[:, :1], -query[:, 1:]], 1)
    assert router.select(turned, pages).counts == {HITS: 0, MISSES: 1}
    table.extend(1)
    assert router.select(turned, pages).counts == {HITS: 1, MISSES: 0}


def served(attention: Attention, signs: str, entries: int) -> str:
    """Which queries of a sequence, alike where the sign is, are served by what is kept (h), and which not (m)."""
    router = SelectionCacheRouter(steps=100, min_cosine=0.9, entries=entries)
    queries = {sign: torch.randn(1, HEADS * GROUP, 1, DIM) for sign in set(signs)}
    found = ""
    for sign in signs:
        query, pages = attention.pages(queries[sign])
        counts = router.select(query, pages).counts or {}
        found += "h" if counts[HITS] else "m"
        attention.layer.tables[0].extend(1)
    return found


@pytest.mark.parametrize(("entries", "expected"), [(1, "mmmmmmmh"), (2, "mmhmhmhh"), (3, "mmhmhhhh")])
def test_the_selection_used_least_recently_goes_first(entries: int, expected: str) -> None:
    """With two, c takes the place of b, which was made after a, but used before it."""
    assert served(caching(), "abacabaa", entries) == expected


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(("step", "chunk", "crop")), st.integers(1, 9)), max_size=8))
def test_it_is_asked_exactly_when_it_must(moves: list[tuple[str, int]]) -> None:
    attention = caching(asked := Asked(), prompt=41, steps=4)
    made: list[tuple[int, int]] = []  # tokens, and how many pages there were
    asked.tokens.clear()
    attention.layer.tables[0].memory.crop(0)
    for move, count in moves:
        if move == "crop":
            length = max(attention.layer.get_seq_length() - count, 25)
            attention.layer.crop(length - attention.layer.get_seq_length())
            made = [entry for entry in made if entry[0] < length]
            continue
        for size in [count] if move == "chunk" else [1] * count:
            attention(random_tokens(1, size))
            token, pages = attention.layer.get_seq_length() - 1, attention.layer.tables[0].num_pages
            must = not any(sealed == pages and 0 < token - at < 4 for at, sealed in made)
            assert (asked.tokens.pop() if asked.tokens else None) == (token if must else None)
            made += [(token, pages)] * must


def test_another_budget_asks_anew() -> None:
    attention = caching(asked := Asked())
    decode(attention)
    attention.layer.config = small_config(budget_pages=5)
    decode(attention, 2)
    assert asked.tokens == [80, 82]


def test_a_row_is_as_if_read_alone() -> None:
    """Also where another row of its batch needs a selection and it does not."""
    tokens = random_tokens(2, 100)
    config = small_config(router=SelectionCacheRouter(steps=5, min_cosine=0.0), budget_pages=6)
    together = filled(config, tokens.part(0, 70), [0, 11])
    outputs = together.decode(tokens.part(70), [0, 11])
    for row, padding in enumerate((0, 11)):
        alone = filled(config, tokens.part(padding, 70, row))
        assert_dense(outputs[row], alone.decode(tokens.part(70, row=row))[0])
    counts = together.recorder.report()["router_counts"]
    assert min(counts.values()) > 5


def test_rows_that_change_places_keep_their_selections() -> None:
    attention = caching(asked := Asked(), batch=2)
    decode(attention)
    before = attention.layer.tables[1].memory.last(attention.layer.router)
    attention.layer.reorder_cache(torch.tensor([1, 1, 0]))
    assert [table.memory.last(attention.layer.router) for table in attention.layer.tables[:2]] == [before] * 2
    decode(attention)
    attention.layer.batch_select_indices(torch.tensor([2]))
    decode(attention)
    assert asked.tokens == [80]


def test_one_router_serves_two_caches() -> None:
    router = SelectionCacheRouter(BoxRouter(), steps=100, min_cosine=-1)
    tokens = [random_tokens(1, 86) for _ in range(2)]
    alone, mixed = ([filled(small_config(router=router), text.part(0, 81)) for text in tokens] for _ in range(2))
    expected = [attention.decode(text.part(81)) for attention, text in zip(alone, tokens, strict=True)]
    steps = [
        [run.decode(text.part(at, at + 1)) for run, text in zip(mixed, tokens, strict=True)] for at in range(81, 86)
    ]
    for outputs, wanted in zip(zip(*steps, strict=True), expected, strict=True):
        torch.testing.assert_close(torch.cat(outputs, 1), wanted)


def test_a_reset_forgets() -> None:
    attention = caching(asked := Asked(), steps=100)
    attention.layer.reset()
    attention(random_tokens(1, 80))
    decode(attention)
    assert asked.tokens == [80, 80]


def test_it_is_made_by_name() -> None:
    router = make_router(OvalConfig(router="selection_cache", estimate_tail="none"))
    assert isinstance(router, SelectionCacheRouter)
    assert isinstance(router.inner, BasisRouter)
    assert not router.inner.estimate_tail


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"inner": "basis"}, TypeError, r"inner must be a Router, got 'basis' \(str\)"),
        ({"steps": 0}, ValueError, "steps must be an integer >= 1, got 0"),
        ({"entries": 0}, ValueError, "entries must be an integer >= 1, got 0"),
        ({"min_cosine": "x"}, ValueError, r"min_cosine must be a number in \[-1, 1\], got 'x'"),
        ({"min_cosine": 1.5}, ValueError, r"min_cosine must be a number in \[-1, 1\], got 1.5"),
    ],
)
def test_what_is_refused_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        SelectionCacheRouter(**arguments)
