"""`handle.trace()`: which pages each step read."""

from __future__ import annotations

import pytest
import torch

from oval_core import OvalConfig, attach
from tests.core.tiny_models import gemma2, generate, llama, prompt

CONFIG = OvalConfig(page_size=8, budget_pages=5)


def test_one_entry_a_layer_and_step() -> None:
    model = llama()
    with attach(model, CONFIG) as handle, handle.trace() as entries:
        generate(model, prompt(80, rows=2))
    assert [(entry.step, entry.layer_idx) for entry in entries] == [(s, i) for s in range(2, 9) for i in range(2)]
    for entry in entries:
        assert entry.read.shape == (2, 2, 10)  # the sealed pages of 80 tokens; the open tokens are always read
        assert entry.read.dtype == torch.bool
        assert entry.read.device.type == "cpu"
        assert (entry.read.sum(-1) == 4).all()  # the fifth page is the open one
        assert entry.read[..., [0, -1]].all()  # sink and window


def test_entries_agree_with_the_stats() -> None:
    model = llama()
    with attach(model, CONFIG) as handle, handle.trace() as entries:
        generate(model, prompt(80))
        stats = handle.stats()
    ever_read = [
        torch.stack([entry.read for entry in entries if entry.layer_idx == layer]).any(0).float().mean().item()
        for layer in range(2)
    ]
    assert stats["page_utilization"] == pytest.approx(sum(ever_read) / 2)
    assert stats["pages_read_mean"] == 5


def test_layers_that_are_not_paged_leave_no_entry() -> None:
    model = gemma2()
    with attach(model, CONFIG) as handle, handle.trace() as entries:
        generate(model, prompt(80))
    assert {entry.layer_idx for entry in entries} == {1}


def test_nothing_is_kept_outside_of_the_block() -> None:
    model = llama()
    with attach(model, CONFIG) as handle:
        with handle.trace() as entries:
            pass
        generate(model, prompt(80))
        assert entries == []
        with handle.trace() as first:
            generate(model, prompt(80))
        with handle.trace() as second:
            generate(model, prompt(80))
    assert len(first) == len(second) == 14


def test_a_trace_inside_a_trace_takes_nothing_from_it() -> None:
    model = llama()
    with attach(model, CONFIG) as handle, handle.trace() as outer:
        with handle.trace() as inner:
            generate(model, prompt(80))
        assert 0 < len(inner) == len(outer)
        generate(model, prompt(80))
    assert len(outer) == 2 * len(inner)
