"""A model over a paged cache against the same model without a cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel

from oval_core import attach
from oval_spec import Tree
from oval_spec.cached_model import CachedModel, dense
from tests.core.tiny_models import PAD, deepseek_v3, llama, prompt
from tests.spec.drafts import FULL, PADDING, token_path, trees
from tests.tolerance import INT8_STEP

CONFIG = dense(FULL)
ROOT_TOKEN = 7
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}
few = settings(max_examples=10)


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    model = llama()
    with torch.no_grad(), attach(model, CONFIG):
        yield model


@torch.no_grad()
def fresh_logits(model: Any, texts: Sequence[Sequence[int]]) -> Tensor:
    """After the last token of each text, without a cache; what is filled up on the right is not seen."""
    longest = max(map(len, texts))
    filled = torch.tensor([[*text, *[PAD] * (longest - len(text))] for text in texts])
    logits = model(filled, use_cache=False).logits
    return logits[torch.arange(len(texts)), torch.tensor(list(map(len, texts))) - 1]


class Rows:
    """Rows in a cache beside lists of the tokens that they should hold."""

    def __init__(self, model: PreTrainedModel, padding: Sequence[int], tokens: int = 21) -> None:
        text, mask = prompt(tokens, len(padding)), torch.ones(len(padding), tokens, dtype=torch.long)
        for row, hidden in enumerate(padding):
            text[row, :hidden] = mask[row, :hidden] = PAD
        self.model, self.padding = model, padding
        self.cached = CachedModel(model, CONFIG)
        positions = (mask.cumsum(-1) - 1).clamp_min(0)
        inputs = {"input_ids": text, "attention_mask": mask if any(padding) else None, "position_ids": positions}
        self.first = self.cached.prefill(inputs)
        self.texts = [row.tolist()[hidden:] for row, hidden in zip(text, padding, strict=True)]

    @torch.no_grad()
    def read(self, drafts: Sequence[Tree]) -> None:
        """Compare the logits of root and nodes with those of their paths alone."""
        logits = self.cached.read([ROOT_TOKEN] * len(drafts), drafts)
        assert logits.shape[:2] == (len(drafts), 1 + max(map(len, drafts)))
        expected = fresh_logits(
            self.model,
            [
                [*text, ROOT_TOKEN, *token_path(tree, node)]
                for tree, text in zip(drafts, self.texts, strict=True)
                for node in range(-1, len(tree))
            ],
        )
        assert_close(
            torch.cat([row[: 1 + len(tree)] for row, tree in zip(logits, drafts, strict=True)]), expected, **EXACT
        )

    def keep(self, drafts: Sequence[Tree], ends: Sequence[int | None]) -> None:
        """Accept the paths down to these nodes; None: not even the root."""
        paths = [None if end is None else tree.path(end) for tree, end in zip(drafts, ends, strict=True)]
        self.cached.keep(max(map(len, drafts)), paths)
        for text, tree, end in zip(self.texts, drafts, ends, strict=True):
            text += [] if end is None else [ROOT_TOKEN, *token_path(tree, end)]
        self.check_lengths()

    def crop(self, removed: Sequence[int]) -> None:
        self.cached.crop([length - gone for length, gone in zip(self.cached.lengths, removed, strict=True)])
        self.texts = [text[: len(text) - gone] for text, gone in zip(self.texts, removed, strict=True)]
        self.check_lengths()

    def check_lengths(self) -> None:
        for layer in self.cached.layers:
            have = [length - hidden for length, hidden in zip(layer.store.lengths, self.padding, strict=True)]
            assert have == list(map(len, self.texts))

    @torch.no_grad()
    def check_pages(self) -> None:
        """Every page holds what a row that never saw a draft has in it."""
        self.cached.read([ROOT_TOKEN] * len(self.texts), [Tree()] * len(self.texts))  # seals what is full
        for row, text in enumerate(self.texts):
            alone = CachedModel(self.model, CONFIG)
            alone.prefill({"input_ids": torch.tensor([text])})
            alone.read([ROOT_TOKEN], [Tree()])
            for layer, fresh in zip(self.cached.layers, alone.layers, strict=True):
                table, pages = layer.tables[row], fresh.tables[0].num_pages
                assert (table.num_pages, table.length) == (pages, self.padding[row] + len(text) + 1)
                assert table.starts == [start + self.padding[row] for start in fresh.tables[0].starts]
                assert_close(_tokens(layer, row), _tokens(fresh, 0), **EXACT)
                mean, fresh_mean = (x.pages.basis.coarse()[0][at, :, :pages] for x, at in ((layer, row), (fresh, 0)))
                step = 2 * INT8_STEP * fresh_mean.abs().amax(-1, keepdim=True) + 1e-5
                assert ((mean - fresh_mean).abs() <= 2 * step).all()
        self.cached.keep(0, [None] * len(self.texts))


def _tokens(layer: Any, row: int) -> Tensor:
    """Keys and values of the real tokens of a row."""
    real = slice(layer.tables[row].first, layer.store.lengths[row])
    return torch.cat([x[row, :, real] for x in layer.store.dense()], -1)


@pytest.mark.parametrize("padding", [[0], [5], [0, 0], [3, 0, 20]], ids=str)
def test_prefill(model: PreTrainedModel, padding: list[int]) -> None:
    rows = Rows(model, padding)
    assert_close(rows.first, fresh_logits(model, rows.texts), **EXACT)


@few
@given(st.data())
def test_trees_after_trees(model: PreTrainedModel, data: st.DataObject) -> None:
    """Logits, lengths and pages are those of a cache that only ever saw what was accepted."""
    rows = Rows(model, data.draw(st.sampled_from([[0], [4], [0, 0], [0, PADDING], [2, 11, 0]])))
    for _ in range(data.draw(st.integers(1, 3))):
        drafts = [data.draw(trees()) for _ in rows.texts]
        rows.read(drafts)
        rows.keep(drafts, [data.draw(st.one_of(st.none(), st.integers(-1, len(tree) - 1))) for tree in drafts])
        if data.draw(st.booleans()):
            rows.crop([data.draw(st.integers(0, 3)) for _ in rows.texts])
    rows.check_pages()
    rows.read([data.draw(trees(most=3)) for _ in rows.texts])


def test_a_long_text_of_accepted_paths(model: PreTrainedModel) -> None:
    """Pages are sealed while wrong branches come and go; rows drift apart."""
    rows = Rows(model, [PADDING, 0])
    fork = Tree((11, 12, 13, 14, 15, 16), (-1, -1, 1, 0, 2, 4))
    for step in range(6):
        drafts = [fork, Tree.chain([5, 6, 8]) if step % 2 else fork]
        rows.cached.read([ROOT_TOKEN, ROOT_TOKEN], drafts)
        rows.keep(drafts, [3, 2 if step % 2 else 5])
    assert rows.cached.layers[0].tables[1].num_pages > 4
    rows.check_pages()
    rows.read([fork, fork])


def test_a_chain_needs_no_mask_and_a_tree_does(model: PreTrainedModel) -> None:
    rows = Rows(model, [0, 0])
    assert rows.cached._mask([Tree.chain([1, 2])] * 2, 2) is None
    mask = rows.cached._mask([Tree((1, 2), (-1, -1)), Tree.chain([1])], 2)
    assert mask is not None
    assert mask[:, 0, :, :21].all()
    assert mask[0, 0, :, 21:].tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert mask[1, 0, :2, 21:].tolist() == [[True, False, False], [True, True, False]]


@few
@given(st.lists(st.integers(0, 8), min_size=2, max_size=2), trees(most=5))
def test_crop_equals_fresh(model: PreTrainedModel, removed: list[int], tree: Tree) -> None:
    rows = Rows(model, [PADDING, 0])
    rows.crop(removed)
    rows.read([tree, tree])
    rows.keep([tree, tree], [len(tree) - 1, -1])
    rows.check_pages()


@pytest.mark.parametrize("given_padding", [0, PADDING])
def test_a_filled_dynamic_cache_is_taken_over(model: Any, given_padding: int) -> None:
    other: Any = llama()  # the same weights, not attached
    text, mask = prompt(30, 2), torch.ones(2, 30, dtype=torch.long)
    text[0, :given_padding] = mask[0, :given_padding] = 0
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = DynamicCache(config=other.config)
    with torch.no_grad():
        other(text[:, :20], attention_mask=mask[:, :20], position_ids=positions[:, :20], cache=cache)
    rows = Rows.__new__(Rows)
    rows.model, rows.padding, rows.cached = model, [given_padding, 0], CachedModel(model, CONFIG, cache)
    rest = {"input_ids": text[:, 20:], "attention_mask": mask, "position_ids": positions[:, 20:]}
    logits = rows.cached.prefill(rest)
    rows.texts = [text[0, given_padding:].tolist(), text[1].tolist()]
    assert_close(logits, fresh_logits(model, rows.texts), **EXACT)
    drafts = [Tree((3, 4, 5), (-1, -1, 0)), Tree.chain([6])]
    rows.read(drafts)
    rows.keep(drafts, [2, -1])
    rows.check_pages()


def test_padding_is_hidden_from_layers_that_cannot_be_paged() -> None:
    """Latent attention never tells the cache what its mask hides."""
    model = deepseek_v3()
    with torch.no_grad(), attach(model, CONFIG):
        rows = Rows(model, [PADDING, 0])
        drafts = [Tree((3, 4, 5), (-1, -1, 0)), Tree.chain([6])]
        rows.read(drafts)
        rows.keep(drafts, [2, -1])
        rows.read(drafts)


def test_reading_is_undone(model: PreTrainedModel) -> None:
    rows = Rows(model, [0])
    sparse = replace(CONFIG, budget_ratio=None, budget_pages=3, min_context_tokens=0)
    rows.cached.layers[0].config = other = replace(CONFIG, sink_pages=2)

    def fail_inside() -> None:
        with rows.cached.reading(sparse):
            assert {layer.config for layer in rows.cached.layers} == {sparse}
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert [layer.config for layer in rows.cached.layers] == [other, CONFIG]


def test_hidden_states_are_those_of_the_head(model: Any) -> None:
    rows = Rows(model, [PADDING, 0])
    tree = Tree((3, 4, 5), (-1, -1, 0))
    with torch.no_grad(), rows.cached.watch_hidden():
        logits = rows.cached.read([ROOT_TOKEN] * 2, [tree, tree])
        assert rows.cached.hidden is not None
        assert_close(model.lm_head(rows.cached.hidden), logits, **EXACT)
        kept = rows.cached.hidden
    rows.cached.keep(3, [[], []])
    with torch.no_grad():
        rows.cached.read([ROOT_TOKEN] * 2, [tree, tree])
    assert rows.cached.hidden is kept
