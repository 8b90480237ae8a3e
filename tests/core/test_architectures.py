"""Every architecture: nothing changes when the budget covers the context, less is read when it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from oval_core import OvalConfig, attach
from tests.core.tiny_models import ARCHITECTURES, Architecture, empty_cache, generate, one_by_one, prompt, read

FULL = OvalConfig(page_size=8, seal_tokens=16, budget_ratio=1.0, always_paged=True)
QUARTER = OvalConfig(page_size=8, seal_tokens=16, budget_ratio=0.25)
PROMPT_TOKENS = 125
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}  # of logits between -10 and 10
# Padding moves the keys by rounding errors of 1e-5; an int8 entry that rounds the other way then moves an estimate.
ROUNDED: dict[str, Any] = {"atol": 5e-3, "rtol": 1e-3}

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)


@pytest.fixture
def model(architecture: Architecture) -> PreTrainedModel:
    return architecture.build()


def skip_if_stock_refuses(architecture: Architecture, what: str) -> None:
    if what in architecture.refuses:
        pytest.skip(f"stock {architecture}: {architecture.refuses[what]}")


def assert_same_with_oval(model: PreTrainedModel, text: Tensor | None, **options: Any) -> dict[str, Any]:
    """`generate` gives the same text and logits with OVAL as without; returns the stats."""
    plain = generate(model, text, **options)
    with attach(model, FULL) as handle:
        paged = generate(model, text, **options)
        stats = handle.stats()
    assert paged.sequences.tolist() == plain.sequences.tolist()
    for ours, theirs in zip(paged.logits, plain.logits, strict=True):
        assert_close(ours, theirs, **EXACT)
    return stats


def assert_says_what_is_paged(architecture: Architecture, stats: dict[str, Any]) -> None:
    """The stats name what could not be paged; where all could, nothing was dense but what has no page yet."""
    assert stats["layers"] == architecture.layers
    assert (stats["pages_read_mean"] is not None) == architecture.is_paged
    if architecture.dense_because:
        assert set(stats["dense_steps"]) == {architecture.dense_because}
        assert stats["dense_steps"][architecture.dense_because] == stats["steps"]
    elif architecture.is_paged:
        assert set(stats["dense_steps"]) <= {"empty cache", "no sealed page yet"}


@every_architecture
def test_a_budget_that_covers_the_context_changes_nothing(architecture: Architecture, model: PreTrainedModel) -> None:
    stats = assert_same_with_oval(model, prompt(PROMPT_TOKENS))
    assert_says_what_is_paged(architecture, stats)


@every_architecture
def test_a_quarter_of_the_pages_is_less_to_read(architecture: Architecture, model: PreTrainedModel) -> None:
    plain = generate(model, prompt(PROMPT_TOKENS))
    with attach(model, QUARTER) as handle:
        sparse = generate(model, prompt(PROMPT_TOKENS))
        stats = handle.stats()
    assert_says_what_is_paged(architecture, stats)
    assert sparse.sequences.shape == plain.sequences.shape
    assert all(logits.isfinite().all() for logits in sparse.logits)
    if architecture.is_paged:
        assert stats["read_ratio"] < 0.5
        assert stats["pages_read_mean"] < 0.4 * stats["pages"]
    else:
        assert stats["read_ratio"] in (None, 1.0)
        assert sparse.sequences.tolist() == plain.sequences.tolist()


@every_architecture
@pytest.mark.parametrize("config", [FULL, QUARTER], ids=["full", "quarter"])
def test_left_padded_rows_equal_the_rows_alone(
    architecture: Architecture, model: PreTrainedModel, config: OvalConfig
) -> None:
    skip_if_stock_refuses(architecture, "left padding")
    new, padding = 8, 27  # the padding is no whole number of pages
    text = prompt(PROMPT_TOKENS + new, rows=2)
    mask = torch.ones_like(text)
    text[0, :padding] = mask[0, :padding] = 0
    with attach(model, config):
        batch = read(model, one_by_one(text, PROMPT_TOKENS), mask)
        short = read(model, one_by_one(text[:1, padding:], PROMPT_TOKENS - padding))
        long = read(model, one_by_one(text[1:], PROMPT_TOKENS))
    assert_close(batch, torch.cat([short, long]), **(EXACT if config is FULL else ROUNDED))


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.name in ("t5", "bart")], ids=str)
@pytest.mark.parametrize("config", [FULL, QUARTER], ids=["full", "quarter"])
def test_rows_with_padded_sources_equal_the_rows_alone(
    architecture: Architecture, model: PreTrainedModel, config: OvalConfig
) -> None:
    text, sources = prompt(PROMPT_TOKENS, rows=2), prompt(24, rows=2, seed=1)
    mask = torch.ones_like(sources)
    mask[0, 17:] = sources[0, 17:] = 0
    with attach(model, config):
        batch = generate(model, text, input_ids=sources, attention_mask=mask)
        short = generate(model, text[:1], input_ids=sources[:1, :17])
        long = generate(model, text[1:], input_ids=sources[1:])
    assert batch.sequences.tolist() == [*short.sequences.tolist(), *long.sequences.tolist()]
    alone = torch.cat([torch.stack(short.logits), torch.stack(long.logits)], dim=1)
    assert_close(torch.stack(batch.logits), alone, **EXACT)


@every_architecture
def test_beam_search(architecture: Architecture, model: PreTrainedModel) -> None:
    stats = assert_same_with_oval(model, prompt(PROMPT_TOKENS), num_beams=3)
    assert_says_what_is_paged(architecture, stats)


@every_architecture
def test_prompt_lookup(architecture: Architecture, model: PreTrainedModel) -> None:
    skip_if_stock_refuses(architecture, "assisted")
    text = prompt(40).repeat(1, 3)  # something to be found
    stats = assert_same_with_oval(model, text, prompt_lookup_num_tokens=5)
    assert_says_what_is_paged(architecture, stats)


@every_architecture
def test_assisted_decoding(architecture: Architecture, model: PreTrainedModel) -> None:
    skip_if_stock_refuses(architecture, "assisted")
    assistant = architecture.build()  # the same weights, slightly off: some drafts are right, some are wrong
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))
    text = None if architecture.name == "whisper" else prompt(PROMPT_TOKENS)  # it takes no text beside an assistant
    stats = assert_same_with_oval(model, text, assistant_model=assistant, max_new_tokens=24)
    assert_says_what_is_paged(architecture, stats)


@every_architecture
def test_the_returned_cache_continues_a_conversation(architecture: Architecture, model: PreTrainedModel) -> None:
    def talk() -> tuple[Tensor, Tensor]:
        first = generate(model, prompt(PROMPT_TOKENS))
        longer = torch.cat([first.sequences, prompt(20, seed=1)], dim=1)
        second = generate(model, longer, cache=first.cache)
        return second.sequences, torch.stack(second.logits)

    plain = talk()
    with attach(model, FULL) as handle:
        paged = talk()
        pages_read = handle.stats()["pages_read_mean"]
    assert paged[0].tolist() == plain[0].tolist()
    assert_close(paged[1], plain[1], **EXACT)
    assert (pages_read is not None) == architecture.is_paged


@every_architecture
@pytest.mark.parametrize("chunk", [40, 100], ids=["paged chunks", "dense chunks"])
def test_chunked_prefill_equals_one_prefill(architecture: Architecture, model: PreTrainedModel, chunk: int) -> None:
    skip_if_stock_refuses(architecture, "chunked prefill")
    plain = generate(model, prompt(PROMPT_TOKENS))
    with attach(model, FULL) as handle:
        chunked = generate(model, prompt(PROMPT_TOKENS), prefill_chunk_size=chunk)
        pages_read = handle.stats()["pages_read_mean"]
    assert chunked.sequences.tolist() == plain.sequences.tolist()
    assert_close(torch.stack(chunked.logits), torch.stack(plain.logits), **EXACT)
    assert (pages_read is not None) == architecture.is_paged


@every_architecture
@pytest.mark.parametrize("config", [FULL, QUARTER], ids=["full", "quarter"])
def test_crop_then_replay_equals_a_fresh_run(
    architecture: Architecture, model: PreTrainedModel, config: OvalConfig
) -> None:
    skip_if_stock_refuses(architecture, "crop")
    start, rejected, right = prompt(PROMPT_TOKENS), prompt(9, seed=1), prompt(9, seed=2)
    with attach(model, config):
        fresh = read(model, [start, *one_by_one(right, 1)])
        cache = empty_cache(model)
        cache.activate_past_recording()
        read(model, [start, rejected], cache=cache)
        cache.crop(-rejected.shape[1])
        replayed = read(model, one_by_one(right, 1), cache=cache)
    assert_close(replayed, fresh[:, 1:], **EXACT)
