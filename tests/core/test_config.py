"""What `OvalConfig` refuses, and its arithmetic."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_core import OvalConfig
from oval_core.routers import ROUTERS, make_router
from oval_core.routers.box import BoxRouter

NAMES = r"\['auto', 'basis', 'quest', 'box', 'mean', 'window', 'random', 'oracle', 'locality', 'selection_cache'\]"
REJECTED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"page_size": 17}, ValueError, r"page_size must be one of \(8, 16, 32, 64, 128, 256\), got 17"),
    ({"page_size": 4}, ValueError, r"page_size must be one of .*, got 4"),
    ({"page_size": 512}, ValueError, r"page_size must be one of .*, got 512"),
    ({"page_size": 16.0}, TypeError, r"page_size must be one of .*, got 16\.0 \(float\)"),
    ({"page_size": None}, TypeError, r"page_size must be one of .*, got None \(NoneType\)"),
    ({"budget_pages": True}, TypeError, r"budget_pages must be an integer >= 3 .*, got True \(bool\)"),
    ({"budget_pages": 2}, ValueError, r"budget_pages must be an integer >= 3 \(sink_pages .*open tokens\), got 2"),
    ({"budget_pages": 9, "sink_pages": 4, "window_pages": 5}, ValueError, r"budget_pages must be .* >= 10 .*, got 9"),
    ({"budget_pages": -1}, ValueError, r"budget_pages must be an integer >= 3 .*, got -1"),
    ({"budget_pages": "many"}, TypeError, r"budget_pages must be .*, got 'many' \(str\)"),
    ({"sink_pages": 60}, ValueError, r"budget_pages must be an integer >= 62 .*, got 32"),
    ({"budget_ratio": 0.0}, ValueError, r"budget_ratio must be a number in \(0, 1\], got 0\.0"),
    ({"budget_ratio": 1.5}, ValueError, r"budget_ratio must be a number in \(0, 1\], got 1\.5"),
    ({"budget_ratio": math.nan}, ValueError, r"budget_ratio must be a number in \(0, 1\], got nan"),
    ({"budget_ratio": True}, TypeError, r"budget_ratio must be a number in \(0, 1\], got True \(bool\)"),
    ({"budget_ratio": 0.5, "budget_pages": 8}, ValueError, r"not both: got budget_pages=8, budget_ratio=0\.5"),
    ({"sink_pages": -1}, ValueError, r"sink_pages must be an integer >= 0, got -1"),
    ({"sink_pages": "1"}, TypeError, r"sink_pages must be an integer >= 0, got '1' \(str\)"),
    ({"window_pages": -2}, ValueError, r"window_pages must be an integer >= 0, got -2"),
    ({"window_pages": True}, TypeError, r"window_pages must be an integer >= 0, got True \(bool\)"),
    ({"rank": 0}, ValueError, r"rank must be an integer >= 1, got 0"),
    ({"rank": 2.0}, TypeError, r"rank must be an integer >= 1, got 2\.0 \(float\)"),
    ({"shortlist_ratio": 0}, ValueError, r"shortlist_ratio must be a number in \(0, 1\], got 0"),
    ({"shortlist_ratio": "0.5"}, TypeError, r"shortlist_ratio must be a number in \(0, 1\], got '0\.5' \(str\)"),
    ({"shortlist_pages": 0}, ValueError, r"shortlist_pages must be an integer >= 1 or None, got 0"),
    ({"estimate_tail": "all"}, ValueError, r"estimate_tail must be one of \('shortlist', 'none'\), got 'all'"),
    ({"estimate_tail": None}, TypeError, r"estimate_tail must be one of .*, got None \(NoneType\)"),
    ({"max_sparse_query_tokens": 0}, ValueError, r"max_sparse_query_tokens must be an integer >= 1, got 0"),
    ({"seal_tokens": 0}, ValueError, r"seal_tokens must be an integer >= 1, got 0"),
    ({"min_context_tokens": -1}, ValueError, r"min_context_tokens must be an integer >= 0, got -1"),
    ({"stats_every": -1}, ValueError, r"stats_every must be an integer >= 0, got -1"),
    ({"seed": 1.5}, TypeError, r"seed must be an integer >= 0, got 1\.5 \(float\)"),
    ({"always_paged": 1}, TypeError, r"always_paged must be True or False, got 1 \(int\)"),
    ({"router": "best"}, ValueError, rf"router must be a Router or one of {NAMES}, got 'best'"),
    ({"router": BoxRouter}, TypeError, rf"router must be a Router or one of {NAMES}, got .*BoxRouter.* \(type\)"),
    ({"impl": "cuda"}, ValueError, r"impl must be 'auto' or one of \['reference'.*\] \(available here\), got 'cuda'"),
    ({"impl": None}, TypeError, r"impl must be 'auto' or one of .*, got None"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REJECTED, ids=[str(case[0]) for case in REJECTED])
def test_what_is_refused_is_named(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        OvalConfig(**arguments)


def test_defaults() -> None:
    config = OvalConfig()
    assert (config.page_size, config.sink_pages, config.window_pages) == (16, 1, 1)
    assert (config.rank, config.shortlist_ratio, config.estimate_tail) == (8, 0.35, "shortlist")
    assert (config.router, config.budget_pages, config.impl, config.always_paged) == ("auto", None, "auto", False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(("device", "router", "budget"), [("cpu", "box", 96), ("cuda", "basis", 32)])
def test_the_device_decides_what_is_left_open(device: str, router: str, budget: int) -> None:
    config = OvalConfig(rank=2).for_device(torch.device(device))
    assert (config.router, config.budget_pages, config.rank) == (router, budget, 2)
    assert OvalConfig(budget_pages=20).for_device(torch.device(device)).budget_pages == 20
    assert OvalConfig(router="quest").for_device(torch.device(device)).router == "quest"


def test_what_the_device_decides_cannot_be_asked_before() -> None:
    with pytest.raises(ValueError, match="for_device"):
        OvalConfig().budget_for(100)
    with pytest.raises(ValueError, match="for_device"):
        make_router(OvalConfig())


@pytest.mark.parametrize("router", [*(kind.name for kind in ROUTERS), BoxRouter()])
def test_routers_are_named_or_given(router: Any) -> None:
    assert OvalConfig(router=router).router is router


@pytest.mark.parametrize(
    ("arguments", "sealed_pages", "budget", "shortlist"),
    [
        ({}, 400, 32, 140),
        ({}, 80, 32, 31),  # never fewer than the budget reads
        ({}, 20, 21, 20),  # never more than there are
        ({}, 0, 1, 0),  # the open tokens alone
        ({}, 4000, 32, 512),  # shortlist_pages
        ({"shortlist_pages": None}, 4000, 32, 1400),
        ({"shortlist_pages": 10}, 400, 32, 31),
        ({"budget_ratio": 0.25}, 399, 100, 140),
        ({"budget_ratio": 0.25, "shortlist_ratio": 1}, 399, 100, 399),
        ({"budget_ratio": 0.01}, 99, 3, 35),  # sinks, window and the open tokens
        ({"budget_ratio": 0.01, "sink_pages": 3, "window_pages": 4}, 99, 8, 35),
        ({"budget_ratio": 1}, 99, 100, 99),
    ],
)
def test_budget_and_shortlist(arguments: dict[str, Any], sealed_pages: int, budget: int, shortlist: int) -> None:
    config = OvalConfig(**{"router": "basis", **arguments})
    assert (config.budget_for(sealed_pages), config.shortlist_for(sealed_pages)) == (budget, shortlist)


@given(
    st.one_of(st.integers(3, 99), st.floats(0.01, 1.0)),
    st.floats(0.01, 1.0),
    st.one_of(st.none(), st.integers(1, 99)),
    st.integers(0, 500),
)
def test_the_shortlist_covers_the_budget(budget: float, ratio: float, most: int | None, pages: int) -> None:
    name = "budget_pages" if isinstance(budget, int) else "budget_ratio"
    config = OvalConfig(shortlist_ratio=ratio, shortlist_pages=most, **{name: budget})  # type: ignore[arg-type]
    read = config.budget_for(pages) - 1
    assert min(config.least_pages - 1, pages) <= read <= config.shortlist_for(pages) <= pages
