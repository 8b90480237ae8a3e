"""A model set to FlashAttention prefills with it under OVAL too; the package is a stand-in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as transformers_flash

from oval_core import OvalConfig, attach, dense_flash
from tests.core import flash_packages, tiny_models
from tests.core.tiny_models import prompt

SPARSE = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4, impl="reference")
assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[flash_packages.Calls]:
    """What the stand-in of `flash_attn` was asked."""
    asked: flash_packages.Calls = []
    flash_packages.install(monkeypatch, flash_packages.flash_attn_2(asked))
    monkeypatch.setattr(transformers_flash, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(transformers_flash, "_loaded_implementation", None)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
    with torch.no_grad():
        yield asked
    transformers_flash._loaded_implementation = None


@pytest.fixture
def model(calls: flash_packages.Calls) -> PreTrainedModel:
    model = tiny_models.llama()
    model.set_attn_implementation("flash_attention_2")
    return model


def names(calls: flash_packages.Calls) -> list[str]:
    return [call["function"] for call in calls]


def padded(rows: int, tokens: int) -> Tensor:
    """Row i begins with 3 i hidden tokens."""
    return (torch.arange(tokens) >= 3 * torch.arange(rows)[:, None]).long()


def test_prefill_calls_flash_attention(model: PreTrainedModel, calls: flash_packages.Calls) -> None:
    plain = model(prompt(40)).logits
    asked = names(calls)
    with attach(model, SPARSE) as handle:
        assert_close(model(prompt(40)).logits, plain)
        assert handle.stats()["dense_steps"] == {"empty cache": 1}
    assert asked == ["flash_attn_func"] * 2
    assert names(calls) == asked * 2


def test_a_chunk_without_padding_goes_there_without_a_mask(model: PreTrainedModel, calls: flash_packages.Calls) -> None:
    config = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4, max_sparse_query_tokens=4, impl="reference")
    plain = tiny_models.read(model, [prompt(40), prompt(20, seed=1)])
    asked = names(calls)
    with attach(model, config):
        assert_close(tiny_models.read(model, [prompt(40), prompt(20, seed=1)]), plain)
    assert names(calls) == asked * 2 == ["flash_attn_func"] * 8


def test_padding_goes_there_as_one_mask_for_all_queries(model: PreTrainedModel, calls: flash_packages.Calls) -> None:
    text, mask = prompt(40, rows=3), padded(3, 40)
    plain = model(text, attention_mask=mask).logits
    asked = list(calls)
    with attach(model, SPARSE):
        got = model(text, attention_mask=mask).logits
    ours = calls[len(asked) :]
    assert names(ours) == names(asked) == ["flash_attn_varlen_func"] * 2
    for mine, theirs in zip(ours, asked, strict=True):
        assert mine["cu_seqlens_k"].tolist() == theirs["cu_seqlens_k"].tolist() == [0, 40, 77, 111]
    assert_close(got[mask.bool()], plain[mask.bool()])


@pytest.mark.parametrize("make", [tiny_models.llama, tiny_models.mistral])
def test_padding_is_found_out_once_for_all_layers(
    calls: flash_packages.Calls, monkeypatch: pytest.MonkeyPatch, make: Callable[[], PreTrainedModel]
) -> None:
    model = make()
    model.set_attn_implementation("flash_attention_2")
    derived = dense_flash._derived_padding
    looks: list[int | None] = []

    def noted(mask: Tensor, window: int | None) -> Any:
        looks.append(window)
        return derived(mask, window)

    monkeypatch.setattr(dense_flash, "_derived_padding", noted)
    monkeypatch.setattr(dense_flash, "QUERIES_AT_ONCE", 7)
    with attach(model, SPARSE):
        model(prompt(40, rows=3), attention_mask=padded(3, 40))
        assert len(looks) == 1
        model(prompt(40, rows=3), attention_mask=padded(3, 40))  # a new mask
    assert len(looks) == 2
    assert names(calls) == ["flash_attn_varlen_func"] * 4


def test_greedy_text_of_padded_rows(model: PreTrainedModel, calls: flash_packages.Calls) -> None:
    everything = OvalConfig(page_size=8, seal_tokens=1, budget_ratio=1.0, impl="reference")  # dense at every step
    text, mask = prompt(40, rows=3), padded(3, 40)
    plain = tiny_models.generate(model, text, attention_mask=mask)
    asked = names(calls)
    with attach(model, everything):
        got = tiny_models.generate(model, text, attention_mask=mask)
    assert got.sequences.tolist() == plain.sequences.tolist()
    assert names(calls) == asked * 2


@pytest.mark.parametrize("hidden", [(30, 12), (7, 3)])
def test_what_a_padding_mask_cannot_say_goes_to_sdpa(
    model: PreTrainedModel, calls: flash_packages.Calls, hidden: tuple[int, int]
) -> None:
    tree: Any = torch.ones(1, 1, 40, 40, dtype=torch.bool).tril()
    tree[0, 0][hidden] = False  # one query may not read one token
    model.set_attn_implementation("sdpa")
    plain = model(prompt(40), attention_mask=tree).logits
    model.set_attn_implementation("flash_attention_2")
    with attach(model, SPARSE):
        assert_close(model(prompt(40), attention_mask=tree).logits, plain)
    assert calls == []


def test_sliding_layers_keep_their_window(calls: flash_packages.Calls) -> None:
    model = tiny_models.mistral()
    text, mask = prompt(70, rows=2), padded(2, 70)
    plain = model(text, attention_mask=mask).logits
    model.set_attn_implementation("flash_attention_2")
    with attach(model, SPARSE):
        got = model(text, attention_mask=mask).logits
    assert names(calls) == ["flash_attn_varlen_func"] * 2
    assert_close(got[mask.bool()], plain[mask.bool()])


def test_detaching_gives_the_model_its_flash_attention_back(
    model: PreTrainedModel, calls: flash_packages.Calls
) -> None:
    with attach(model, SPARSE):
        assert model.config._attn_implementation == "oval"
    assert model.config._attn_implementation == "flash_attention_2"
    model(prompt(8))
    assert names(calls) == ["flash_attn_func"] * 2
