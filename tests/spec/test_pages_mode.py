"""Verification that reads few pages, and the dense checks that take text back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from oval_core import attach
from oval_spec import Drafter, ModelDrafter, PromptLookupDrafter, SparseSelfDrafter
from tests.core.tiny_models import llama, prompt
from tests.spec.drafts import FULL, SMALL, Streamer, TreeDrafter, longer, padded_batch, plain, speculative

TEXT = prompt(100)
NEW_TOKENS = 14
SHORT = {"max_new_tokens": NEW_TOKENS}
DRAFTERS: dict[str, Callable[[PreTrainedModel], Drafter]] = {
    "prompt lookup": lambda model: PromptLookupDrafter(ngram_tokens=1),
    "itself": lambda model: ModelDrafter(model, most_tokens=5, min_confidence=0.0),
    "sparse self": lambda model: SparseSelfDrafter(budget_pages=3, most_tokens=4, min_confidence=0.0),
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


@pytest.fixture(scope="module")
def answer(model: PreTrainedModel) -> Tensor:
    return plain(model, TEXT, max_new_tokens=NEW_TOKENS)


@pytest.fixture(scope="module")
def answers(model: PreTrainedModel) -> Tensor:
    return plain(model, padded_batch(90), max_new_tokens=NEW_TOKENS)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_budget_that_covers_everything_is_exact(model: PreTrainedModel, answers: Tensor, drafter: str) -> None:
    with attach(model, FULL) as handle:
        out = speculative(model, padded_batch(90), DRAFTERS[drafter](model), mode="pages", **SHORT, config=FULL)
        stats = handle.stats()
    assert out.sequences.tolist() == answers.tolist()
    stats["dense_steps"].pop("context below min_context_tokens", None)  # the draft model, if it is the same
    assert stats["dense_steps"] == {"empty cache": 1}
    assert stats["pages_read_mean"] > (5 if drafter == "sparse self" else 9), "drafting passes count, too"


def test_trees_over_pages(model: PreTrainedModel, answers: Tensor) -> None:
    out = speculative(model, padded_batch(90), TreeDrafter(answers), mode="pages", **SHORT, config=FULL)
    assert out.sequences.tolist() == answers.tolist()
    assert out.stats.accepted_mean > 0.5


def test_few_pages_give_the_text_of_few_pages(model: PreTrainedModel, answer: Tensor) -> None:
    """Without drafts that are right, step by step, it is the text of an attached `generate`."""
    with attach(model, SMALL):
        expected = plain(model, TEXT, **SHORT)
    wrong = TreeDrafter((answer + 1) % 90, right=0.0)
    out = speculative(model, TEXT, wrong, mode="pages", **SHORT, config=SMALL, adapt=False)
    none = speculative(model, TEXT, PromptLookupDrafter(ngram_tokens=50), mode="pages", **SHORT, config=SMALL)
    assert expected.tolist() != answer.tolist()
    assert none.sequences[:, :103].tolist() == expected[:, :103].tolist()
    assert out.sequences.tolist() != answer.tolist()
    assert (out.stats.checked, out.stats.retracted) == (0, 0)


@pytest.mark.parametrize("check_every", [1, 3, 16])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_checks_make_it_exact(model: PreTrainedModel, answer: Tensor, drafter: str, check_every: int) -> None:
    streamer = Streamer()
    out = speculative(
        model,
        TEXT,
        DRAFTERS[drafter](model),
        mode="pages",
        **SHORT,
        config=SMALL,
        check_every=check_every,
        streamer=streamer,
    )
    assert out.sequences.tolist() == answer.tolist()
    assert streamer.put_tokens == answer[0].tolist()
    assert streamer.ends == 1
    assert out.stats.tokens == NEW_TOKENS
    # a check settles what it agrees with, and one token of its own unless that was the last
    assert out.stats.checked - out.stats.retracted <= NEW_TOKENS - 1
    assert 0 < out.stats.retracted <= out.stats.checked


def test_checks_of_a_text_that_is_right_take_nothing_back(model: PreTrainedModel, answer: Tensor) -> None:
    drafter = ModelDrafter(model, most_tokens=5, min_confidence=0.0)
    out = speculative(model, TEXT, drafter, mode="pages", **SHORT, config=FULL, check_every=4, adapt=False)
    assert out.sequences.tolist() == answer.tolist()
    assert out.stats.retracted == 0
    assert out.stats.checked == 12  # of 14: the prompt says one, and the first check one more


@pytest.mark.parametrize("check_every", [3, 16])
def test_rows_that_end_at_different_times(model: PreTrainedModel, answers: Tensor, check_every: int) -> None:
    end = int(answers[0, 90 + 9])
    expected = plain(model, padded_batch(90), **SHORT, eos_token_id=end)
    for drafter in (TreeDrafter(expected), ModelDrafter(llama(seed=1), min_confidence=0.0)):
        out = speculative(
            model,
            padded_batch(90),
            drafter,
            mode="pages",
            **SHORT,
            config=SMALL,
            check_every=check_every,
            eos_token_id=end,
        )
        assert out.sequences.tolist() == expected.tolist()
        assert out.stats.tokens == sum(_new_tokens(row, end) for row in expected[:, 90:].tolist())


def _new_tokens(row: list[int], end: int) -> int:
    return row.index(end) + 1 if end in row else len(row)


@pytest.mark.parametrize("new_tokens", [1, 2, 7])
def test_short_texts(model: PreTrainedModel, answer: Tensor, new_tokens: int) -> None:
    streamer = Streamer()
    out = speculative(
        model,
        TEXT,
        PromptLookupDrafter(),
        mode="pages",
        config=SMALL,
        check_every=4,
        max_new_tokens=new_tokens,
        streamer=streamer,
    )
    assert out.sequences.tolist() == answer[:, : 100 + new_tokens].tolist()
    assert streamer.put_tokens == out.sequences[0].tolist()


def test_only_settled_tokens_are_streamed(model: PreTrainedModel, answer: Tensor) -> None:
    """Never one that differs from the exact text, at any time."""

    class Careful(Streamer):
        def put(self, value: Tensor) -> None:
            super().put(value)
            assert self.put_tokens == answer[0, : len(self.put_tokens)].tolist()

    speculative(
        model, TEXT, PromptLookupDrafter(), mode="pages", **SHORT, config=SMALL, check_every=5, streamer=Careful()
    )


def test_a_second_turn(model: PreTrainedModel) -> None:
    """Its first token is checked as well: a short prompt over a filled cache is read with few pages."""
    options = {"mode": "pages", "config": SMALL, "check_every": 3, **SHORT}
    first = speculative(model, TEXT, PromptLookupDrafter(), **options)
    turn = longer(first.sequences, 9)
    second = speculative(model, turn, PromptLookupDrafter(), **options, cache=first.cache)
    assert second.sequences.tolist() == plain(model, turn, **SHORT).tolist()
