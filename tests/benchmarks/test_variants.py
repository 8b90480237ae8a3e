"""Routers that are made to be measured do what their names say."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from benchmarks.settings import SHARES, equal_bytes
from benchmarks.variants import CoverageRouter, ReusingRouter, make_variant
from oval_core.routers import Pages, Router, Selection
from tests.core.scenes import Attention, random_tokens, small_config


def selections(router: Router, steps: int) -> list[Selection]:
    """What `router` selects at each of `steps` steps over a cache of 200 tokens."""
    seen: list[Selection] = []
    select = router.select

    def remember(query: Tensor, pages: Pages) -> Selection:
        seen.append(select(query, pages))
        return seen[-1]

    router.select = remember  # type: ignore[method-assign]
    attention, tokens = Attention(small_config(router=router, budget_pages=6)), random_tokens(1, 200 + steps)
    attention(tokens.part(0, 200))
    attention.decode(tokens.part(200))
    return seen


def test_a_selection_is_kept_until_its_time_is_up_or_a_page_is_sealed() -> None:
    seen = selections(ReusingRouter(3), 10)  # at the ninth a page was sealed
    kept = [torch.equal(before.pages, after.pages) for before, after in pairwise(seen)]
    assert kept == [True, True, False, True, True, False, True, False, True]


@pytest.mark.parametrize("target", [0.5, 0.99])
def test_coverage_reads_as_few_pages_as_reach_the_target(target: float) -> None:
    for selection in selections(CoverageRouter(target), 4):
        counts = selection.valid.sum(-1)
        assert (counts >= 2).all()  # sink and window
        assert (selection.valid.long().diff(dim=-1) <= 0).all()
    assert selections(CoverageRouter(0.99), 1)[0].valid.sum() > selections(CoverageRouter(0.5), 1)[0].valid.sum()


def test_names_stand_for_variants_or_routers() -> None:
    assert make_variant("box") == "box"
    assert isinstance(make_variant("box every 4"), ReusingRouter)


@pytest.mark.parametrize("context", [1024, 6144])
def test_equal_bytes_are_equal(context: int) -> None:
    for share, setting in equal_bytes(context, 64):
        page = setting.page_size * 2 * 64 * 2
        dense = context * 2 * 64 * 2
        read = setting.budget_pages * page + setting.metadata_bytes(context, 64)
        assert share in SHARES
        assert read <= share * dense < read + page + setting.metadata_bytes(context, 64) or setting.budget_pages == 3
