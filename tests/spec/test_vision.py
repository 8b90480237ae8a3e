"""Drafts for vision-language models, whose prompts hold pictures."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from oval_mm import attach
from oval_spec import ModelDrafter, PromptLookupDrafter, SparseSelfDrafter
from tests.mm.tiny_vlms import batch, photo, tiny, words
from tests.spec.drafts import SMALL, TreeDrafter, plain, speculative, state

NAMES = ("llava", "qwen2_vl")
every_model = pytest.mark.parametrize("name", NAMES)
NEW_TOKENS = 14


@every_model
def test_same_text(name: str) -> None:
    """A left-padded batch whose rows have different numbers of pictures."""
    vlm = tiny(name)
    expected = plain(vlm.model, batch(vlm), max_new_tokens=NEW_TOKENS)
    before = state(vlm.model)
    other = plain(vlm.model, batch(vlm, last=5), max_new_tokens=NEW_TOKENS)
    assert expected[1].tolist() != other[1].tolist()  # the picture matters
    for drafter in (
        PromptLookupDrafter(ngram_tokens=1),
        TreeDrafter(expected),
        SparseSelfDrafter(budget_pages=3, most_tokens=4, min_confidence=0.0),
    ):
        out = speculative(vlm.model, batch(vlm), drafter, max_new_tokens=NEW_TOKENS)
        assert out.sequences.tolist() == expected.tolist()
    assert state(vlm.model) == before


@every_model
def test_an_identical_draft_model_sees_the_pictures(name: str) -> None:
    vlm = tiny(name)
    drafter = ModelDrafter(vlm.model, most_tokens=5, min_confidence=0.0)
    options = {"max_new_tokens": NEW_TOKENS, "suppress_tokens": []}  # a draft model says what it likes
    out = speculative(vlm.model, batch(vlm), drafter, adapt=False, **options)
    assert out.sequences.tolist() == plain(vlm.model, batch(vlm), **options).tolist()
    assert out.stats.accept_rate == dict.fromkeys(range(1, 6), 1.0)
    assert out.stats.accepted == {5: 4}
    assert out.stats.steps == 3


@every_model
def test_a_model_whose_pictures_have_pages_of_their_own(name: str) -> None:
    vlm = tiny(name)
    expected = plain(vlm.model, batch(vlm), max_new_tokens=NEW_TOKENS)
    with attach(vlm.model, vlm.processor, SMALL):
        for drafter in (TreeDrafter(expected), ModelDrafter(vlm.model, min_confidence=0.0)):
            out = speculative(vlm.model, batch(vlm), drafter, max_new_tokens=NEW_TOKENS, config=SMALL)
            assert out.sequences.tolist() == expected.tolist()
            assert out.stats.accepted_mean > 0.5


@every_model
def test_a_second_turn_with_another_picture(name: str) -> None:
    vlm = tiny(name)

    def talk(say: Any) -> list[list[int]]:
        inputs = batch(vlm)
        first = say(inputs, return_dict_in_generate=True)
        turn = vlm.inputs((f"{words(3)} * {words(9)}", [photo(2)]), (words(4), []))
        answer = torch.ones_like(first.sequences[:, inputs["input_ids"].shape[1] :])
        ids = torch.cat([first.sequences, turn.pop("input_ids")], dim=1)
        mask = torch.cat([inputs["attention_mask"], answer, turn.pop("attention_mask")], dim=1)
        second = say(
            {**turn, "input_ids": ids, "attention_mask": mask}, cache=first.cache, return_dict_in_generate=True
        )
        text: list[list[int]] = second.sequences.tolist()
        return text

    expected = talk(lambda inputs, **options: plain(vlm.model, inputs, max_new_tokens=6, **options))
    for make in (PromptLookupDrafter, lambda: ModelDrafter(vlm.model, min_confidence=0.0)):
        drafter = make()
        got = talk(lambda inputs, d=drafter, **o: speculative(vlm.model, inputs, d, max_new_tokens=6, **o))
        assert got == expected


def test_a_draft_model_that_knows_no_pictures() -> None:
    vlm = tiny("llava")
    text_config = copy.deepcopy(vlm.model.config.text_config)
    text_model = transformers.LlamaForCausalLM(text_config).eval()
    before = state(text_model)
    out = speculative(vlm.model, batch(vlm), ModelDrafter(text_model, min_confidence=0.0), max_new_tokens=NEW_TOKENS)
    assert out.sequences.tolist() == plain(vlm.model, batch(vlm), max_new_tokens=NEW_TOKENS).tolist()
    assert state(text_model) == before
