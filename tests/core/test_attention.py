"""Paged attention that reads every page is dense attention, whatever transformers asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core.attention import oval_attention
from oval_core.dense import dense_attention
from tests.core.scenes import (
    DIM,
    GROUP,
    HEADS,
    Attention,
    Tokens,
    filled,
    left_padding,
    random_tokens,
    small_config,
)
from tests.tolerance import assert_dense

pytestmark = pytest.mark.usefixtures("poisoned_memory", "little_spare")


def dense(attention: Attention, query: Tensor, mask: Tensor, **kwargs: Any) -> Tensor:
    keys, values = attention.layer.store.dense()
    return dense_attention("sdpa", attention, query, keys, values, mask, DIM**-0.5, 0.0, **kwargs)


@pytest.mark.parametrize("router", ["basis", "quest", "oracle", "random"])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("extra", [{}, {"softcap": 0.8}, {"s_aux": torch.linspace(-2, 2, HEADS * GROUP)}])
def test_a_full_budget_is_dense(router: str, queries: int, extra: dict[str, Any]) -> None:
    tokens, padding = random_tokens(3, 83 + queries), [0, 21, 80]
    attention = filled(small_config(router=router, budget_pages=99), tokens.part(0, 83), padding)
    mask, new = left_padding(padding, queries, 83 + queries), tokens.part(83)
    outputs = attention(new, mask, **extra)
    assert attention.recorder.dense_steps == {"empty cache": 1}
    assert_dense(outputs, dense(attention, new.query, mask, **extra))


def test_a_tree_mask() -> None:
    """Two branches that must not see each other."""
    tokens, tree = random_tokens(1, 60), random_tokens(1, 4)
    attention = filled(small_config(budget_pages=99), tokens)
    mask = left_padding([0], 4, 64)
    mask[..., 2, 61] = mask[..., 3, 61] = False
    assert_dense(attention(tree, mask), dense(attention, tree.query, mask))


@pytest.mark.parametrize("extra", [{}, {"softcap": 0.8}])
def test_pages_of_low_rank_need_not_be_read(extra: dict[str, Any]) -> None:
    """Keys and values of a page on one line: the estimated tail is exact up to int8, dropping it is not."""
    line = torch.randn(1, HEADS, 96, 1)
    keys, values = (torch.randn(1, HEADS, 12, 1, x).repeat_interleave(8, 2).flatten(2, 3) for x in (DIM, 6))
    tokens = Tokens(random_tokens(1, 96).query, keys + line * keys.roll(8, 2), values + line * values.roll(8, 2))
    errors = {}
    for tail in ("shortlist", "none"):
        attention = filled(small_config(shortlist_ratio=1, estimate_tail=tail), tokens)
        new = random_tokens(1, 1)
        got = attention(new, **extra)
        expected = dense(attention, new.query, left_padding([0], 1, 97), **extra)
        errors[tail] = ((got - expected).norm() / expected.norm()).item()
    assert errors["shortlist"] < 0.03 < 5 * 0.03 < errors["none"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_outputs_have_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    tokens = Tokens(*(x.to(dtype) for x in random_tokens(1, 42)))
    attention = filled(small_config(), tokens.part(0, 41))
    outputs = attention(tokens.part(41))
    assert outputs.dtype == dtype
    assert outputs.shape == (1, 1, HEADS * GROUP, 6)
    assert outputs.isfinite().all()


def test_an_additive_mask_is_dense_and_counted() -> None:
    tokens = random_tokens(1, 42)
    attention = filled(small_config(), tokens.part(0, 41))
    outputs = attention(tokens.part(41), torch.zeros(1, 1, 1, 42))
    assert attention.recorder.dense_steps["additive attention mask"] == 1
    assert_dense(outputs, dense(attention, tokens.part(41).query, torch.ones(1, 1, 1, 42, dtype=torch.bool)))


def test_keys_that_are_not_those_of_the_cache_are_dense_and_counted() -> None:
    """Latent attention expands what the cache returns: the pages would be those of other keys."""
    tokens, handed = random_tokens(1, 42), dict[str, Any]()
    attention = filled(small_config(), tokens.part(0, 41))
    new = tokens.part(41)
    keys, values = attention.layer.update(new.keys, new.values, kwargs=handed)
    oval_attention(attention, new.query, keys.clone(), values, None, **handed)
    assert attention.recorder.dense_steps["keys are not the cached ones (latent attention)"] == 1
