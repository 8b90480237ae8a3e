"""Input that cannot work: a clear error, and the model as it was."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from oval_core import OvalConfig
from oval_spec import ModelDrafter, PromptLookupDrafter, SparseSelfDrafter
from tests.core.tiny_models import bart, gemma3, llama, prompt
from tests.spec.drafts import padded_batch, speculative, state


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafter": None}, TypeError, "drafter must be an oval_spec Drafter, got NoneType"),
        ({"drafter": PromptLookupDrafter}, TypeError, "drafter must be an oval_spec Drafter, got type"),
        ({"mode": "fast"}, ValueError, r"mode must be one of \('exact', 'pages'\), got 'fast'"),
        ({"mode": None}, ValueError, "mode must be one of .* got None"),
        ({"config": {"budget_pages": 8}}, TypeError, "config must be an OvalConfig or None, got dict"),
        ({"check_every": 4}, ValueError, "check_every is for mode 'pages': .* got 4"),
        ({"check_every": 4, "mode": "pages", "do_sample": True}, ValueError, "greedy texts, got do_sample=True"),
        ({"reads": "union"}, ValueError, "reads is for mode 'pages': .* got 'union'"),
        ({"mode": "pages", "reads": "most"}, ValueError, "reads must be one of .* got 'most'"),
        ({"mode": "pages", "look_every": 4}, ValueError, "look_every needs reads='agreed' or 'union'"),
        ({"look_every": 0}, ValueError, "look_every must be an integer >= 1, got 0"),
        ({"check_every": 0, "mode": "pages"}, ValueError, "check_every must be an integer >= 1, got 0"),
        ({"check_every": True, "mode": "pages"}, TypeError, r"check_every must be an integer >= 1, got True \(bool\)"),
        ({"check_every": 2.0, "mode": "pages"}, TypeError, r"check_every .* got 2.0 \(float\)"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "drafts with its drafter: leave out prompt_lookup_num_tokens"),
        ({"num_beams": 2}, ValueError, "num_beams=1, got 2"),
        ({"use_cache": False}, ValueError, "use_cache=True, got False"),
        ({"output_scores": True}, ValueError, "does not return output_scores"),
        ({"output_logits": True, "output_attentions": True}, ValueError, "return output_logits, output_attentions"),
        ({"output_hidden_states": True}, ValueError, "does not return output_hidden_states"),
        ({"synced_gpus": True}, ValueError, "cannot run with synced_gpus"),
        ({"stop_strings": ["x"]}, ValueError, r"stop_strings needs tokenizer=\.\.\., got None"),
        ({"cache_implementation": "static"}, ValueError, "DynamicCache or an OvalCache; got StaticCache"),
        ({"drafter": ModelDrafter(llama(vocab_size=50))}, ValueError, "vocabulary of 50, LlamaForCausalLM of 96"),
        ({"drafter": ModelDrafter(bart())}, ValueError, "the draft model must be a decoder, got BartFor"),
        ({"drafter": ModelDrafter(gemma3())}, ValueError, "Gemma3ForCausalLM: DynamicSlidingWindowLayer cannot"),
    ],
)
def test_refused(model: PreTrainedModel, options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = state(model)
    options = {"drafter": PromptLookupDrafter(), **options}
    with pytest.raises(error, match=message):
        speculative(model, padded_batch(), **options)
    assert state(model) == before


@pytest.mark.parametrize("inputs", ["a text", None, [[1, 2, 3]]], ids=str)
def test_inputs_of_another_kind(model: PreTrainedModel, inputs: Any) -> None:
    with pytest.raises(TypeError, match=f"inputs must be a tensor .* or a mapping .*, got {type(inputs).__name__}"):
        speculative(model, inputs, PromptLookupDrafter())


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda value: PromptLookupDrafter(most_tokens=value), "most_tokens"),
        (lambda value: PromptLookupDrafter(ngram_tokens=value), "ngram_tokens"),
        (lambda value: ModelDrafter(llama(layers=1), most_tokens=value), "most_tokens"),
        (lambda value: SparseSelfDrafter(most_tokens=value), "most_tokens"),
    ],
)
@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-3, ValueError), (True, TypeError), (2.5, TypeError)])
def test_counts(make: Any, name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} must be an integer >= 1, got {value}"):
        make(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda value: ModelDrafter(llama(layers=1), min_confidence=value),
        lambda value: SparseSelfDrafter(min_confidence=value),
    ],
    ids=["draft model", "sparse self"],
)
@pytest.mark.parametrize(
    ("value", "error"),
    [(-0.1, ValueError), (1.01, ValueError), (float("nan"), ValueError), (True, TypeError), ("0.5", TypeError)],
)
def test_shares(make: Any, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"min_confidence must be a number in \[0, 1\], got "):
        make(value)


def test_the_budget_of_a_sparse_self_draft() -> None:
    with pytest.raises(ValueError, match=r"budget_pages must be an integer >= 3 .* got 2"):
        SparseSelfDrafter(budget_pages=2)


def test_a_budget_smaller_than_what_the_config_always_reads(model: PreTrainedModel) -> None:
    before = state(model)
    config = OvalConfig(sink_pages=3, window_pages=3, budget_pages=9)
    with pytest.raises(ValueError, match=r"budget_pages must be an integer >= 7 .* got 4"):
        speculative(model, prompt(80), SparseSelfDrafter(budget_pages=4), config=config)
    assert state(model) == before


def test_the_arguments_of_a_draft_model() -> None:
    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel, got str"):
        ModelDrafter("a name")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="config must be an OvalConfig or None, got dict"):
        ModelDrafter(llama(layers=1), config={})  # type: ignore[arg-type]
