"""OVAL on SmolLM2-135M-Instruct and real text: `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.teacher_forcing import Prefix, compare, prefill
from demos.smollm2 import load_smollm2
from demos.texts import load_text
from oval_core import OvalConfig, attach

pytestmark = pytest.mark.slow
CONTEXT = 2048


@pytest.fixture(scope="module")
def loaded() -> tuple[Any, Tensor]:
    model, tokenizer = load_smollm2()
    return model, tokenizer(load_text("novel"), return_tensors="pt", verbose=False).input_ids[:, :CONTEXT]


@pytest.fixture(scope="module")
def prefix(loaded: tuple[Any, Tensor]) -> Prefix:
    return prefill(*loaded, positions=24, advance=lambda tokens: None)


@pytest.mark.parametrize("router", ["basis", "box"])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_reading_every_page_gives_the_models_own_text(loaded: tuple[Any, Tensor], impl: str, router: str) -> None:
    model, tokens = loaded
    options = {"do_sample": False, "max_new_tokens": 24, "attention_mask": torch.ones_like(tokens[:, :700])}
    plain = model.generate(tokens[:, :700], **options)
    with attach(model, OvalConfig(budget_ratio=1.0, always_paged=True, impl=impl, router=router)) as handle:
        paged = model.generate(tokens[:, :700], **options)
        assert handle.stats()["pages_read_mean"] > 40
    assert paged.tolist() == plain.tolist()


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_a_few_pages_are_enough(loaded: tuple[Any, Tensor], prefix: Prefix, impl: str) -> None:
    """12 of 128 pages: close to dense, and much closer than the same number of pages without an estimated tail."""
    basis = compare(loaded[0], prefix, OvalConfig(budget_pages=12, impl=impl, router="basis"), lambda tokens: None)
    box = compare(loaded[0], prefix, OvalConfig(budget_pages=12, router="box"), lambda tokens: None)
    assert basis.kl[0] < 0.05
    assert basis.kl[0] < 0.7 * box.kl[0]
