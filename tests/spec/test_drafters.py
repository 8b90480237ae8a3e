"""What the drafters propose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oval_core import attach
from oval_spec import Drafter, ModelDrafter, PromptLookupDrafter, SparseSelfDrafter, Tree
from oval_spec.cached_model import CachedModel, dense
from oval_spec.drafters import Seen
from oval_spec.text import Text
from tests.core.tiny_models import PAD, llama, prompt
from tests.spec.drafts import FULL, SMALL, TreeDrafter, padded_batch, plain, speculative
from tests.tolerance import assert_dense


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return llama()


def seen(*rows: Sequence[int], running: Sequence[bool] | None = None) -> Seen:
    texts = [Text(torch.tensor(row, dtype=torch.long)) for row in rows]
    return Seen(texts, running or [True] * len(rows), None)


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup(tokens: list[int], ngram: int, most: int) -> None:
    """Against a search from the end for a whole draft, longest n-gram first."""
    expected: list[int] = []
    for length in range(min(ngram, len(tokens) - 1), 0, -1):
        starts = [at for at in range(len(tokens) - length) if tokens[at : at + length] == tokens[-length:]]
        if starts:
            drafts = [tokens[start + length :][:most] for start in starts]
            expected = next((draft for draft in reversed(drafts) if len(draft) == most), drafts[0])
            break
    [tree] = PromptLookupDrafter(ngram_tokens=ngram).draft(seen(tokens), most)
    assert [*tree.tokens] == expected
    assert tree.is_chain


def test_a_text_that_repeats_itself_is_drafted_as_far_as_wanted() -> None:
    assert PromptLookupDrafter().draft(seen([7, 8, 9] * 4), 5) == [Tree.chain([7, 8, 9, 7, 8])]


def test_prompt_lookup_leaves_finished_rows() -> None:
    trees = PromptLookupDrafter().draft(seen([1, 2, 1], [1, 2, 1], running=[False, True]), 5)
    assert trees == [Tree(), Tree.chain([2, 1])]


@given(st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(-3, 9), max_size=700))
def test_text(first: list[int], operations: list[int]) -> None:
    """Grow, and shrink where negative, beside a list."""
    text, expected = Text(torch.tensor(first, dtype=torch.long)), first.copy()
    for operation in operations:
        if operation >= 0:
            text.append(operation)
            expected.append(operation)
        else:
            expected = expected[: max(0, len(expected) + operation)]
            text.crop(len(expected))
        assert len(text) == len(expected)
    assert text.tokens == expected
    assert text.ids.tolist() == [expected]


class TestModelDrafter:
    """Its own greedy text, whatever the target made of its drafts before."""

    @pytest.fixture
    def other(self) -> PreTrainedModel:
        return llama(seed=1)

    def begin(self, drafter: ModelDrafter, target: PreTrainedModel, texts: list[Text], mask: Tensor) -> Any:
        inputs = {
            "input_ids": torch.cat([text.ids for text in texts]),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp_min(0),
        }
        return drafter.begin(CachedModel(target, dense(FULL)), inputs, texts)

    @torch.no_grad()
    def test_drafts_are_its_text(self, model: PreTrainedModel, other: PreTrainedModel) -> None:
        inputs = padded_batch()
        texts = [Text(row) for row in inputs["input_ids"]]
        drafter = ModelDrafter(other, min_confidence=0.0)
        changes: list[list[Any]] = [  # of each row: tokens of its draft to accept, and what comes then; or None: ended
            [(3, 7), (0, 9), (5, 2)],
            [(5, 1), (2, 4), None],
            [(0, 3), None, None],
            [(4, 3), None, None],
        ]
        running = [True] * 3
        with attach(model, dense(FULL)), self.begin(drafter, model, texts, inputs["attention_mask"]):
            for text in texts:
                text.append(5)
            for change in changes:
                trees = drafter.draft(Seen(texts, running, None), 5)
                expected = [
                    self.says(other, text, 5) if more else [] for text, more in zip(texts, running, strict=True)
                ]
                assert [[*tree.tokens] for tree in trees] == expected
                for text, tree, row_change in zip(texts, trees, change, strict=True):
                    if row_change is not None:
                        for token in [*tree.tokens[: row_change[0]], row_change[1]]:
                            text.append(token)
                running = [row_change is not None for row_change in change]

    def says(self, model: Any, text: Text, count: int) -> list[int]:
        real = [token for at, token in enumerate(text.tokens) if at >= 40 or token != PAD]
        said: list[int] = model.generate(torch.tensor([real]), max_new_tokens=count, do_sample=False)[0].tolist()
        return said[len(real) :]

    @torch.no_grad()
    def test_a_text_that_ends_in_what_it_has_read(self, model: PreTrainedModel, other: PreTrainedModel) -> None:
        """A dense check may take a text back to a token of an earlier draft."""
        texts = [Text(prompt(20)[0])]
        drafter = ModelDrafter(other, min_confidence=0.0)
        with attach(model, dense(FULL)), self.begin(drafter, model, texts, torch.ones(1, 20, dtype=torch.long)):
            texts[0].append(5)
            [tree] = drafter.draft(Seen(texts, [True], None), 6)
            for token in tree.tokens[:3]:
                texts[0].append(token)
            [again] = drafter.draft(Seen(texts, [True], None), 3)
        assert again.tokens == tree.tokens[3:]

    def test_confidence(self, model: PreTrainedModel) -> None:
        """A draft ends where the draft model is not sure."""
        text = prompt(20)
        answer = plain(model, text)
        with torch.no_grad():
            shares = model(answer).logits.softmax(-1)[0].max(-1).values[19:43].tolist()
        threshold = sorted(shares)[8]
        drafter = ModelDrafter(model, min_confidence=threshold + 1e-4)
        out = speculative(model, text, drafter, adapt=False)
        assert out.sequences.tolist() == answer.tolist()
        assert out.stats.accept_rate == dict.fromkeys(out.stats.accept_rate, 1.0)
        sure = [share > threshold + 1e-4 for share in shares]
        at, drafted = 1, []
        while at < 24:
            count = next((n for n in range(8) if at + n >= 23 or not sure[at + n]), 8)
            drafted.append(count)
            at += count + 1
        assert sorted(out.stats.accepted.elements()) == sorted(count for count in drafted if count)

    def test_never_sure(self, model: PreTrainedModel) -> None:
        out = speculative(model, prompt(20), ModelDrafter(llama(seed=1), min_confidence=1.0))
        assert out.sequences.tolist() == plain(model, prompt(20)).tolist()
        assert out.stats.drafted_steps == 0
        assert out.stats.steps == 23

    def test_it_may_read_few_pages_itself(self, model: PreTrainedModel, other: PreTrainedModel) -> None:
        drafter = ModelDrafter(other, min_confidence=0.0, config=SMALL)
        out = speculative(model, prompt(80), drafter)
        assert out.sequences.tolist() == plain(model, prompt(80)).tolist()


class TestSparseSelfDrafter:
    @pytest.mark.parametrize("budget", [3, 90])
    def test_it_leaves_the_cache_as_it_was(self, model: PreTrainedModel, budget: int) -> None:
        text = prompt(60, rows=2)
        drafter = SparseSelfDrafter(budget_pages=budget, most_tokens=6, min_confidence=0.0)
        with torch.no_grad(), attach(model, SMALL):
            target = CachedModel(model, SMALL)
            target.prefill({"input_ids": text})
            texts = [Text(row) for row in text]
            for row in texts:
                row.append(5)
            before = [layer.keys.clone() for layer in target.layers if layer.keys is not None]
            with drafter.begin(target, {}, texts):
                trees = drafter.draft(Seen(texts, [True, False], None), 6)
            assert [len(tree) for tree in trees] == [6, 0]
            assert target.lengths == [60, 60]
            assert {layer.config for layer in target.layers} == {SMALL}
            for layer, keys in zip(target.layers, before, strict=True):
                assert layer.keys is not None
                assert_dense(layer.keys, keys)
            assert target._next_position.tolist() == [60, 60]

    def test_few_pages_draft_worse_than_all(self, model: PreTrainedModel) -> None:
        means = []
        for budget in (3, 90):
            drafter = SparseSelfDrafter(budget_pages=budget, most_tokens=4, min_confidence=0.0)
            out = speculative(model, prompt(100), drafter, config=SMALL, adapt=False)
            means.append(out.stats.accepted_mean)
        assert means[0] < means[1]
        assert means[1] > 3  # all of four, but at the end of the text


class TestADrafterOfOnesOwn:
    def test_hidden_states(self, model: Any) -> None:
        """`Seen.hidden` is what the head made the root from, in every row and at every step."""
        answers = plain(model, padded_batch())
        asked = []

        class Watching(TreeDrafter):
            needs_hidden = True

            def draft(self, seen: Seen, most: int) -> list[Tree]:
                assert seen.hidden is not None
                roots = model.lm_head(seen.hidden).argmax(-1).tolist()
                assert [root for root, more in zip(roots, seen.running, strict=True) if more] == [
                    text.tokens[-1] for text, more in zip(seen.texts, seen.running, strict=True) if more
                ]
                asked.append(seen.hidden.shape)
                return super().draft(seen, most)

        for options in ({}, {"logits_to_keep": 0}):
            asked.clear()
            out = speculative(model, padded_batch(), Watching(answers), **options)
            assert out.sequences.tolist() == answers.tolist()
            assert set(asked) == {(3, 64)}
        assert not model.lm_head._forward_pre_hooks

    def test_trees_larger_than_asked_for(self, model: PreTrainedModel) -> None:
        answer = plain(model, prompt(20))

        class Greedy(Drafter):
            most_tokens = 3

            def draft(self, seen: Seen, most: int) -> list[Tree]:
                return [Tree.chain(answer[0, len(text) :].tolist()) for text in seen.texts]

        out = speculative(model, prompt(20), Greedy(), adapt=False)
        assert out.sequences.tolist() == answer.tolist()
        assert max(out.stats.accepted) == 3

    def test_it_must_draft(self, model: PreTrainedModel) -> None:
        with pytest.raises(NotImplementedError, match="Drafter must override draft"):
            speculative(model, prompt(20), Drafter())
