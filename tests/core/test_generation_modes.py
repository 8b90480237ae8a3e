"""Ways to call `generate` on a left-padded batch, alone and combined: the same with OVAL as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

from oval_core import OvalConfig, attach
from tests.core.tiny_models import PAD, generate, llama, prompt, read

FULL = OvalConfig(page_size=8, seal_tokens=1, budget_ratio=1.0, always_paged=True)
SPARSE = OvalConfig(page_size=8, seal_tokens=1, budget_pages=4)
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}
PADDING = 27  # tokens, no whole number of pages


@pytest.fixture
def model() -> PreTrainedModel:
    return llama()


def padded_batch() -> tuple[Tensor, Tensor]:
    """Text `[2, 100]` and its mask; the first row is shorter."""
    text = prompt(100, rows=2)
    mask = torch.ones_like(text)
    text[0, :PADDING] = mask[0, :PADDING] = PAD
    return text, mask


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_chunk_size": 8},  # whole chunks of padding
        {"prefill_chunk_size": 40},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"do_sample": True, "num_beams": 2},
        {"eos_token_id": list(range(5, 25)), "max_new_tokens": 24},  # rows end at different steps
        {"repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_options_of_generate(model: PreTrainedModel, options: dict[str, Any]) -> None:
    text, mask = padded_batch()
    torch.manual_seed(0)
    plain = generate(model, text, attention_mask=mask, **options)
    with attach(model, FULL) as handle:
        torch.manual_seed(0)
        paged = generate(model, text, attention_mask=mask, **options)
        stats = handle.stats()
    assert paged.sequences.tolist() == plain.sequences.tolist()
    assert_close(torch.stack(paged.logits), torch.stack(plain.logits), **EXACT)
    assert stats["dense_steps"] == {"empty cache": 1}
    assert stats["pages_read_mean"] is not None


@pytest.mark.parametrize("gap", [0, 9], ids=["same length", "a shorter first turn"])
def test_two_turns(model: PreTrainedModel, gap: int) -> None:
    def talk() -> Tensor:
        text, mask = padded_batch()
        first = generate(model, text, attention_mask=mask)
        blank = torch.full((2, gap), PAD)
        answer = first.sequences[:, text.shape[1] :]
        visible = [mask, torch.ones_like(answer), torch.tensor([[0], [1]]).expand(-1, gap), torch.ones(2, 30)]
        longer = torch.cat([first.sequences, blank, prompt(30, rows=2, seed=1)], dim=1)
        second = generate(model, longer, attention_mask=torch.cat(visible, dim=1).long(), cache=first.cache)
        return torch.stack(second.logits)

    plain = talk()
    with attach(model, FULL) as handle:
        assert_close(talk(), plain, **EXACT)
        assert handle.stats()["dense_steps"] == {"empty cache": 1}


def test_an_attached_assistant(model: PreTrainedModel) -> None:
    assistant, text = llama(seed=1), prompt(100)
    plain = generate(model, text)
    with attach(model, FULL), attach(assistant, SPARSE) as drafts:
        paged = generate(model, text, assistant_model=assistant)
        assert drafts.stats()["read_ratio"] < 1
    assert paged.sequences.tolist() == plain.sequences.tolist()


def test_stats_begin_anew_with_each_generation(model: PreTrainedModel) -> None:
    with attach(model, SPARSE) as handle:
        generate(model, prompt(100))
        first = handle.stats()
        generate(model, prompt(100))
        second = handle.stats()
    same = ("steps", "context_tokens", "pages", "pages_read_mean", "bytes_read", "bytes_dense", "dense_steps")
    assert {key: second[key] for key in same} == {key: first[key] for key in same}


def test_rows_of_beams_stay_apart_at_a_small_budget(model: PreTrainedModel) -> None:
    text, order = prompt(100, rows=3), [2, 0, 0]
    more, last = prompt(1, rows=3, seed=1), prompt(1, seed=2)
    with attach(model, SPARSE), torch.no_grad():
        cache = model(more, cache=model(text).cache).cache  # now the pages are sealed
        cache.reorder_cache(torch.tensor(order))
        batch = model(last.expand(3, -1), cache=cache).logits[:, -1:]
        alone = [read(model, [text[row : row + 1], more[row : row + 1], last]) for row in order]
    assert_close(batch, torch.cat(alone)[:, -1:], **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_errs_no_more_than_the_model_itself(dtype: torch.dtype) -> None:
    text = prompt(100)
    exact = torch.stack(generate(llama(), text, max_new_tokens=1).logits)
    model: Any = llama()
    model.to(dtype)
    own_error = (torch.stack(generate(model, text, max_new_tokens=1).logits) - exact).abs().max()
    with attach(model, FULL) as handle:
        halves = generate(model, text, max_new_tokens=1, prefill_chunk_size=60)  # the second chunk is paged
        assert handle.stats()["pages_read_mean"] is not None
    assert (torch.stack(halves.logits) - exact).abs().max() < 2 * own_error
