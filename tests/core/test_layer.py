"""When `OvalLayer` seals, what it unseals, and that rows keep what is theirs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from oval_core.cache import page_layers
from oval_core.layer import OvalLayer
from tests.core.scenes import (
    HEADS,
    Attention,
    Tokens,
    assert_same_pages,
    filled,
    left_padding,
    random_tokens,
    small_config,
)
from tests.core.test_page_table import Blocks, blocks_of
from tests.tolerance import assert_dense

pytestmark = pytest.mark.usefixtures("poisoned_memory", "little_spare")


def empty_layer(**changes: Any) -> OvalLayer:
    config = small_config(**changes)
    return OvalLayer(config, None, 0)


def starts(attention: Attention, row: int = 0) -> list[int]:
    return attention.layer.tables[row].starts


def test_a_page_is_sealed_at_the_update_after_it_was_attended() -> None:
    attention, tokens = Attention(small_config()), random_tokens(1, 20)
    attention(tokens.part(0, 16))
    assert starts(attention) == []
    attention.decode(tokens.part(16, 17))
    assert starts(attention) == [0, 8]


def test_full_pages_are_sealed_together_once_enough_tokens_are_open() -> None:
    attention, tokens = Attention(small_config(seal_tokens=24)), random_tokens(1, 62)
    attention(tokens.part(0, 20))
    pages = []
    for token in range(20, 62):
        attention.decode(tokens.part(token, token + 1))
        pages.append(len(starts(attention)))
    assert pages == [0] * 4 + [3] * 24 + [6] * 14  # 24 tokens were attended before token 24 came, 48 before token 48
    assert attention.recorder.report()["dense_steps"] == {"empty cache": 1, "no sealed page yet": 4}


def test_tokens_that_no_attention_has_seen_enter_no_basis() -> None:
    layer, tokens = empty_layer(), random_tokens(1, 48)
    for start in (0, 16, 32):
        layer.update(*tokens.part(start, start + 16)[1:])
        assert layer.unattended_tokens == start + 16
        assert layer.pages.num_pages == 0
    layer.attended(None)
    layer.update(*random_tokens(1, 1)[1:])
    assert layer.pages.num_pages == 6


def test_crop_forgets_what_was_attended() -> None:
    attention, tokens = filled(small_config(), random_tokens(1, 17)), random_tokens(1, 20)
    attention.layer.crop(-14)
    attention.layer.update(*tokens[1:])
    attention.layer.update(*random_tokens(1, 1)[1:])
    assert (attention.layer.unattended_tokens, starts(attention)) == (21, [])


def test_what_was_attended_is_known_of_every_row() -> None:
    layer, tokens = empty_layer(), random_tokens(2, 30)
    layer.update(*tokens.part(0, 10)[1:])
    layer.attended(None)
    layer.crop_rows([10, 4])
    for start in (10, 16):
        layer.update(*tokens.part(start, start + 6)[1:])
    assert [table.num_pages for table in layer.tables] == [1, 0]
    assert layer.unattended_tokens == 12


def test_a_mark_needs_tokens() -> None:
    with pytest.raises(RuntimeError, match="the cache layer is empty"):
        empty_layer().mark(0, 0, 8, tag=0)


def test_padding_enters_no_basis() -> None:
    tokens, padding = random_tokens(2, 42), [0, 11]
    for x in tokens[1:]:
        x[1, :, :11] = 1e4
    padded, alone = filled(small_config(), tokens, padding), filled(small_config(), tokens.part(11, row=1))
    assert starts(padded, 1) == [11, 19, 27]
    pages, fresh = padded.layer.pages, alone.layer.pages
    assert fresh.starts[0, :3].tolist() == [0, 8, 16]
    for name, tensor in pages.basis.tensors().items():
        torch.testing.assert_close(tensor[1, :, :3], getattr(fresh.basis, name)[0, :, :3])


def test_tokens_hidden_inside_a_page_enter_no_basis() -> None:
    """A prompt may have holes in its mask; they stay in their page and do not count."""
    attention, tokens = Attention(small_config()), random_tokens(1, 17)
    mask = left_padding([0], 16, 16)
    mask[..., 3:6] = False
    tokens.keys[:, :, 3:6] = torch.inf
    attention.layer.update(*tokens.part(0, 16)[1:])
    attention.layer.attended(mask[:, 0].any(1))
    attention.layer.update(*tokens.part(16)[1:])
    assert attention.layer.pages.basis.tokens[0, 0, :2].tolist() == [5, 8]
    assert attention.layer.pages.basis.centroid_scale[..., :2].isfinite().all()


def test_a_rejected_draft_enters_no_basis() -> None:
    tokens, draft = random_tokens(1, 40), random_tokens(1, 6)
    attention = filled(small_config(), tokens.part(0, 21))
    attention(draft)  # would fill page 2
    attention.layer.crop(-5)
    assert starts(attention) == [0, 8]
    attention.layer.crop(-1)
    attention.decode(tokens.part(21))
    assert_same_pages(attention.layer, filled(small_config(), tokens).layer)


@settings(max_examples=20)
@given(
    st.integers(9, 60),
    st.lists(st.tuples(st.sampled_from(("step", "chunk", "crop")), st.integers(1, 12)), max_size=8),
    st.sampled_from((0, 5)),
)
def test_crop_then_replay_is_fresh(prompt: int, moves: list[tuple[str, int]], padding: int) -> None:
    """Outputs and bases are those of a run that never took a step back."""
    tokens = random_tokens(1, 160)
    attention = filled(small_config(), tokens.part(0, prompt), [padding])
    fresh = filled(small_config(), tokens.part(0, prompt), [padding])
    for move, count in moves:
        length = attention.layer.get_seq_length()
        if move == "crop":
            attention.layer.crop(-min(count, length - padding - 1))
        elif move == "chunk":
            attention(tokens.part(length, length + count), left_padding([padding], count, length + count))
        else:
            attention.decode(tokens.part(length, length + count), [padding])
    length = attention.layer.get_seq_length()
    if length > prompt:
        fresh.decode(tokens.part(prompt, length), [padding])
    else:
        fresh = filled(small_config(), tokens.part(0, length), [padding])
    last = tokens.part(length, length + 2)
    assert_dense(attention.decode(last, [padding]), fresh.decode(last, [padding]))
    assert_same_pages(attention.layer, fresh.layer)


def test_crop_opens_pages_again() -> None:
    attention = filled(small_config(), random_tokens(2, 41))
    attention.layer.crop_rows([41, 20])
    assert [starts(attention, row) for row in (0, 1)] == [[0, 8, 16, 24, 32], [0, 8]]
    attention.layer.crop(-1)
    assert attention.layer.store.lengths == [40, 19]
    attention.layer.crop(-1)
    assert [len(starts(attention, row)) for row in (0, 1)] == [4, 2]
    attention.layer.crop(-100)
    assert attention.layer.store.lengths == [0, 0]


def test_the_accepted_path_of_a_tree_is_as_if_read_alone() -> None:
    """Draft tokens 24..29 are a tree; the path 25, 27, 28 is accepted."""
    tokens, tree, rest = random_tokens(1, 24), random_tokens(1, 6), random_tokens(1, 20)
    path = [1, 3, 4]
    mask = torch.ones(1, 1, 6, 30, dtype=torch.bool).tril(24)
    attention, fresh = (filled(small_config(), tokens) for _ in range(2))
    attention(tree, mask)
    attention.layer.keep([[24 + token for token in path]], [24])
    fresh.decode(Tokens(*(x[:, :, path] for x in tree)))
    assert_dense(attention.decode(rest), fresh.decode(rest))
    assert_same_pages(attention.layer, fresh.layer)


def test_keep_opens_the_pages_whose_tokens_move() -> None:
    attention = filled(small_config(), random_tokens(1, 41))
    attention.layer.keep([[18, *range(20, 41)]], [18])
    assert starts(attention) == [0, 8]
    assert attention.layer.store.lengths == [40]
    untouched = filled(small_config(), random_tokens(1, 41))
    untouched.layer.keep([[*range(18, 41)]], [18])
    assert starts(untouched) == [0, 8, 16, 24, 32]


def test_keep_may_take_other_paths_in_other_rows() -> None:
    tokens, tree, rest = random_tokens(2, 24), random_tokens(2, 6), random_tokens(2, 20)
    paths = [[0, 1, 5], [2]]
    attention = filled(small_config(), tokens)
    attention(tree, torch.ones(2, 1, 6, 30, dtype=torch.bool).tril(24))
    attention.layer.keep([[24 + token for token in path] for path in paths], [24, 24])
    outputs = attention.decode(rest)
    for row, path in enumerate(paths):
        alone = filled(small_config(), tokens.part(0, row=row))
        alone.decode(Tokens(*(x[row : row + 1, :, path] for x in tree)))
        assert_dense(outputs[row], alone.decode(rest.part(0, row=row))[0])
        assert_same_pages(attention.layer, alone.layer, row)


@pytest.mark.parametrize("estimate_tail", ["shortlist", "none"])
@pytest.mark.parametrize("padding", [None, [0, 9]])
def test_ragged_rows_equal_rows_alone(estimate_tail: str, padding: list[int] | None) -> None:
    """Rows are cropped differently (batched speculation) and go on, token by token and in chunks."""
    config = small_config(estimate_tail=estimate_tail)
    tokens, more = random_tokens(2, 60), random_tokens(2, 50)
    attention = filled(config, tokens, padding)
    attention.layer.crop_rows([60, 41])
    outputs = [attention.decode(more.part(0, 30)), attention(more.part(30, 35)), attention.decode(more.part(35))]
    for row, length in enumerate((60, 41)):
        hidden = 0 if padding is None else padding[row]
        alone = filled(config, tokens.part(hidden, length, row))
        mine = more.part(0, row=row)
        expected = [alone.decode(mine.part(0, 30)), alone(mine.part(30, 35)), alone.decode(mine.part(35))]
        assert_dense(torch.cat(outputs, 1)[row], torch.cat(expected, 1)[0])


@pytest.mark.parametrize("padding", [[0, 0], [0, 4]])
def test_ragged_rows_equal_rows_alone_where_the_context_is_dense(padding: list[int]) -> None:
    config = small_config(always_paged=False, budget_pages=99)
    tokens, more = random_tokens(2, 30), random_tokens(2, 50)
    attention = filled(config, tokens, padding)
    attention.layer.crop_rows([30, 11])
    outputs = attention.decode(more, padding)
    for row, length in enumerate((30, 11)):
        alone = filled(config, tokens.part(padding[row], length, row))
        assert_dense(outputs[row], alone.decode(more.part(0, row=row))[0])


def test_marked_tokens_have_pages_of_their_own() -> None:
    tokens, attention = random_tokens(1, 42), Attention(small_config())
    attention(tokens.part(0, 41))
    attention.layer.mark(0, 10, 29, tag=3)
    attention.decode(tokens.part(41))
    pages = attention.layer.pages
    assert pages.starts[0, :6].tolist() == [0, 8, 10, 18, 26, 29]
    assert pages.lengths[0, :6].tolist() == [8, 2, 8, 8, 3, 8]
    assert pages.tags[0, :6].tolist() == [-1, -1, 3, 3, 3, -1]
    assert pages.basis.tokens[0, 0, :6].tolist() == [8, 2, 8, 8, 3, 8]
    for page, (start, length) in enumerate(zip([0, 8, 10, 18, 26, 29], [8, 2, 8, 8, 3, 8], strict=True)):
        part = tokens.part(start, start + length)
        mu = pages.basis.centroid[0, :, page] * pages.basis.centroid_scale[0, :, page, None]
        torch.testing.assert_close(mu, part.keys[0].mean(1), rtol=0, atol=float(pages.basis.centroid_scale.max()))
        norms = part.values[0].norm(dim=-1).sum(-1)
        torch.testing.assert_close(pages.basis.value_norm[0, :, page], norms)


def places_and_positions(layer: OvalLayer, row: int) -> list[int]:
    """The position of the token at each place of the storage of a row, from the page table."""
    table = layer.tables[row]
    positions = [*range(table.length)]
    for page, (start, length) in enumerate(zip(table.starts, table.lengths, strict=True)):
        positions[start : start + length] = table.positions(page)
    return positions


class BlockMachine(RuleBasedStateMachine):
    """A layer with spans in blocks beside a list of the tokens of every row, which are numbers into `self.tokens`."""

    @initialize(batch=st.integers(1, 2))
    def begin(self, batch: int) -> None:
        torch.manual_seed(0)
        self.layer, self.tokens = empty_layer(), random_tokens(1, 0)
        self.shown: list[bool] = []
        self.rows: list[list[int]] = [[] for _ in range(batch)]
        self.append(9, None)

    @rule(count=st.sampled_from((1, 4, 9, 20)), hidden=st.one_of(st.none(), st.none(), st.integers(0, 19)))
    def append(self, count: int, hidden: int | None) -> None:
        batch, known = len(self.rows), len(self.shown)
        new = random_tokens(batch, count)
        self.layer.update(*new[1:])
        flat = (x.transpose(0, 1).flatten(1, 2)[None] for x in new)
        self.tokens = Tokens(*(torch.cat(pair, 2) for pair in zip(self.tokens, flat, strict=True)))
        visible = torch.arange(count).expand(batch, count) != (-1 if hidden is None else hidden)
        self.layer.attended(visible)
        self.shown += visible.flatten().tolist()
        for row, ids in enumerate(self.rows):
            ids += range(known + row * count, known + (row + 1) * count)

    @rule(data=st.data(), row=st.integers(0, 3), gap=st.integers(0, 4), count=st.integers(1, 20))
    def mark(self, data: st.DataObject, row: int, gap: int, count: int) -> None:
        table = self.layer.tables[row % len(self.rows)]
        begin = table.sealed_end + gap
        if not any(span.start < begin + count and begin < span.stop for span in table.spans):
            blocks: Blocks = data.draw(blocks_of(count, 8))
            self.layer.mark(row % len(self.rows), begin, begin + count, 7, blocks)

    @rule(row=st.integers(0, 3), token=st.integers(0, 60))
    def unblock(self, row: int, token: int) -> None:
        self.layer.unblock(row % len(self.rows), token)
        spans = self.layer.tables[row % len(self.rows)].spans
        assert not any(span.blocks for span in spans if span.start <= token < span.stop)

    @rule(data=st.data())
    def crop_rows(self, data: st.DataObject) -> None:
        lengths = [data.draw(st.integers(max(0, len(ids) - 30), len(ids))) for ids in self.rows]
        self.layer.crop_rows(lengths)
        self.rows = [ids[:length] for ids, length in zip(self.rows, lengths, strict=True)]

    @rule(tail=st.integers(0, 30), dropped=st.sets(st.integers(0, 29), max_size=3))
    def keep(self, tail: int, dropped: set[int]) -> None:
        start = [max(len(ids) - tail, 0) for ids in self.rows]
        kept = [
            [token for token in range(first, len(ids)) if token - first not in dropped]
            for ids, first in zip(self.rows, start, strict=True)
        ]
        self.layer.keep(kept, start)
        self.rows = [
            ids[:first] + [ids[token] for token in k] for ids, first, k in zip(self.rows, start, kept, strict=True)
        ]

    @rule(rows=st.lists(st.integers(0, 2), min_size=1, max_size=3), copies=st.booleans())
    def reorder_cache(self, rows: list[int], copies: bool) -> None:
        rows = [row % len(self.rows) for row in rows]
        self.layer = copy.deepcopy(self.layer) if copies else self.layer
        self.layer.reorder_cache(torch.tensor(rows))
        self.rows = [self.rows[row].copy() for row in rows]

    @invariant()
    def the_table_tells_where_every_token_is(self) -> None:
        for row, ids in enumerate(self.rows):
            positions = places_and_positions(self.layer, row)
            stored = [ids[position] for position in positions]
            assert sorted(stored) == sorted(ids)
            for have, known in zip(self.layer.store.dense(), self.tokens[1:], strict=True):
                assert torch.equal(have[row, :, : len(ids)], known[0, :, stored])
            visible = self.layer.store.visible
            if visible is not None:
                assert visible[row, : len(ids)].tolist() == [self.shown[token] for token in stored]

    @invariant()
    def bases_are_those_of_the_tokens_of_their_page(self) -> None:
        for row, ids in enumerate(self.rows):
            for page in range(self.layer.tables[row].num_pages):
                tokens = [ids[position] for position in self.layer.tables[row].positions(page)]
                shown = [token for token in tokens if self.shown[token]]
                norms = self.tokens.values[0, :, shown].norm(dim=-1).sum(-1)
                torch.testing.assert_close(self.layer.pages.basis.value_norm[row, :, page], norms)

    @invariant()
    def hidden_tokens_are_in_no_block(self) -> None:
        for row, ids in enumerate(self.rows):
            for span in self.layer.tables[row].spans:
                if span.blocks and span.stop <= self.layer.tables[row].sealed_end:
                    assert all(self.shown[token] for token in ids[span.start : span.stop])


BlockMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
TestBlocks = pytest.mark.usefixtures("poisoned_memory", "little_spare")(BlockMachine.TestCase)


@pytest.mark.parametrize("padding", [[0, 0], [0, 6]])
def test_attention_does_not_notice_blocks(padding: list[int]) -> None:
    """The span arrives in two passes; a crop cuts it; its end comes back."""
    tokens, config = random_tokens(2, 90), small_config(budget_pages=99)
    outputs = []
    for blocks in (None, [[*range(at, 30, 5)] for at in range(5)]):
        attention = Attention(config)

        def read(start: int, stop: int, attention: Attention = attention) -> Any:
            return attention(tokens.part(start, stop), left_padding(padding, stop - start, stop))

        read(0, 25)
        for row in (0, 1):
            attention.layer.mark(row, 10, 40, 0, blocks or ())
        run = [read(25, 45), read(45, 48), attention.decode(tokens.part(48, 60), padding)]
        has_moved = not torch.equal(attention.layer.store.dense()[0][1, :, 10:40], tokens.keys[1, :, 10:40])
        assert has_moved == (blocks is not None)
        attention.layer.crop(-25)
        assert torch.equal(attention.layer.store.dense()[0], tokens.keys[:, :, :35])
        run += [read(35, 55), attention.decode(tokens.part(55), padding)]
        assert attention.recorder.dense_steps.keys() <= {"empty cache", "tokens not paged yet"}
        outputs.append(torch.cat(run, 1))
    assert_dense(outputs[1], outputs[0])
    for row, skip in enumerate(padding):
        fresh = Attention(config)(tokens.part(skip, row=row))[0]
        assert_dense(outputs[1][row, -35:], fresh[-35:])


def test_a_span_with_a_hidden_token_stays_in_order() -> None:
    layer, tokens = empty_layer(), random_tokens(2, 20)
    visible = torch.ones(2, 20, dtype=torch.bool)
    visible[1, 9] = False
    layer.update(*tokens[1:])
    for row in (0, 1):
        layer.mark(row, 4, 16, 0, [[*range(0, 12, 2)], [*range(1, 12, 2)]])
    layer.attended(visible)
    layer.update(*random_tokens(2, 1)[1:])
    assert [table.lengths for table in layer.tables] == [[4, 6, 6], [4, 8, 4]]
    assert layer.tables[0].positions(2) == [*range(5, 16, 2)]
    assert torch.equal(layer.store.dense()[0][1, :, :20], tokens.keys[1])


def test_rows_with_the_same_borders_keep_their_own_tags() -> None:
    attention, tokens = Attention(small_config()), random_tokens(3, 41)
    attention(tokens.part(0, 40))
    attention.layer.mark(0, 8, 24, tag=5)
    attention.layer.mark(1, 8, 24, tag=6)
    attention.decode(tokens.part(40))
    assert attention.layer.pages.tags[:, :5].tolist() == [[-1, 5, 5, -1, -1], [-1, 6, 6, -1, -1], [-1] * 5]


@pytest.mark.parametrize("router", ["basis", "quest"])
@pytest.mark.parametrize("rows", [[1, 0], [0, 0], [1], [1, 1, 0, 0]])
def test_bases_move_with_their_rows(router: str, rows: list[int]) -> None:
    tokens, config = random_tokens(2, 41), small_config(router=router)
    attention = filled(config, tokens, [0, 9])
    attention.layer.reorder_cache(torch.tensor(rows))
    alone = [filled(config, tokens.part(skip, row=row)) for row, skip in enumerate((0, 9))]
    more = random_tokens(len(rows), 20)
    outputs = attention.decode(more, [[0, 9][row] for row in rows])
    for new, old in enumerate(rows):
        expected = filled(config, tokens.part([0, 9][old], row=old)).decode(more.part(0, row=new))
        assert_dense(outputs[new], expected[0])
        count = alone[old].layer.pages.num_pages
        assert torch.equal(
            attention.layer.pages.basis.coefficients[new, :, :count],
            alone[old].layer.pages.basis.coefficients[0, :, :count],
        )


def test_batch_operations() -> None:
    tokens = random_tokens(2, 41)
    attention, one, other = (filled(small_config(), tokens.part(0, row=row)) for row in (None, 0, 1))
    layer = attention.layer
    layer.batch_repeat_interleave(2)
    for row, alone in enumerate((one, one, other, other)):
        assert_same_pages(layer, alone.layer, row)
    layer.crop_rows([41, 30, 41, 20])  # copies are independent
    assert [table.num_pages for table in layer.tables] == [5, 3, 5, 2]
    layer.batch_select_indices(torch.tensor([False, True, True, False]))
    assert layer.store.lengths == [30, 41]
    layer.batch_select_indices(torch.tensor([1]))
    assert_same_pages(layer, other.layer)


def test_a_filled_dynamic_cache_is_taken_over() -> None:
    tokens, cache, config = random_tokens(1, 40), DynamicCache(), small_config()
    cache.update(tokens.keys, tokens.values, 0)
    attention, more = Attention(config), random_tokens(1, 20)
    page_layers(cache, config, attention.layer.router)
    (layer,) = cache.layers
    assert isinstance(layer, OvalLayer)
    assert (layer.get_seq_length(), layer.pages.num_pages) == (40, 0)
    attention.layer = layer
    attention.decode(more)
    assert attention.recorder.dense_steps == {"tokens not paged yet": 1}
    assert_same_pages(
        layer, filled(config, Tokens(*(torch.cat(pair, 2) for pair in zip(tokens, more, strict=True)))).layer
    )


def test_an_empty_dynamic_layer_is_replaced() -> None:
    cache = DynamicCache()
    cache.layers = [DynamicLayer()]
    page_layers(cache, small_config())
    (layer,) = cache.layers
    assert isinstance(layer, OvalLayer)
    assert not layer.is_initialized


def test_reset_forgets_even_the_shapes() -> None:
    attention = filled(small_config(), random_tokens(2, 41))
    attention.layer.reset()
    layer = attention.layer
    assert (layer.get_seq_length(), layer.keys, layer.values, layer.tables) == (0, None, None, [])
    assert not layer.is_initialized
    assert_same_pages(filled_again(attention, random_tokens(1, 41)), attention.layer)


def filled_again(attention: Attention, tokens: Tokens) -> OvalLayer:
    """Runs `tokens` through a module that was reset; returns a fresh layer with the same tokens."""
    attention(tokens.part(0, 40))
    attention.decode(tokens.part(40))
    return filled(small_config(), tokens).layer


def test_the_cache_contract() -> None:
    layer = empty_layer()
    assert (layer.is_croppable, layer.is_sliding, layer.is_initialized) == (True, False, False)
    assert (layer.get_max_length(), layer.get_mask_sizes(5)) == (-1, (5, 0))
    layer.crop(-3)
    layer.reorder_cache(torch.tensor([0]))  # nothing to do in an empty layer
    tokens = random_tokens(2, 9)
    keys, values = layer.update(*tokens[1:])
    assert keys is tokens.keys
    assert values is tokens.values
    keys, values = layer.update(*random_tokens(2, 1)[1:])
    assert (keys.shape[2], values.shape[2], layer.get_mask_sizes(1)) == (10, 10, (11, 0))
    assert torch.equal(keys[:, :, :9], tokens.keys)
    assert layer.keys is not None
    assert layer.keys.data_ptr() == keys.data_ptr()


def test_gradients_stop_at_the_cache() -> None:
    layer, tokens = empty_layer(), random_tokens(1, 9)
    keys = tokens.keys.requires_grad_()
    returned, _ = layer.update(keys, tokens.values)
    assert returned.requires_grad
    assert layer.keys is not None
    assert not layer.keys.requires_grad


def test_errors_change_nothing() -> None:
    attention = filled(small_config(), random_tokens(2, 41))
    layer = attention.layer
    good, other_batch = random_tokens(2, 1), random_tokens(3, 1)
    wrong: list[tuple[Any, str]] = [
        (
            lambda: layer.update(other_batch.keys, other_batch.values),
            r"must be \(2, 2, 8\) as in the cache, got \(3, 2, 8\)",
        ),
        (lambda: layer.update(good.values, good.keys), r"must be \(2, 2, 8\) as in the cache, got \(2, 2, 6\)"),
        (
            lambda: layer.update(good.keys[:, :1], good.values[:, :1]),
            r"must be \(2, 2, 8\) as in the cache, got \(2, 1, 8\)",
        ),
        (
            lambda: layer.update(good.keys.half(), good.values.half()),
            r"must be torch.float32 on cpu .*, got torch.float16",
        ),
        (lambda: layer.update(good.keys.to("meta"), good.values), r"must be torch.float32 on cpu .* on meta"),
        (lambda: layer.crop(3), r"crop takes the number of tokens to remove as a value <= 0, got 3"),
        (lambda: layer.crop_rows([41]), r"lengths must name 2 rows, got 1"),
        (lambda: layer.crop_rows([41, 42]), r"a row of 41 tokens cannot be cropped to 42"),
        (lambda: layer.keep([[41], []], [40, 41]), r"positions must ascend strictly within \[40, 41\)"),
        (lambda: layer.mark(0, 39, 41, 0), r"a span must lie after the sealed tokens \(40\), got \[39, 41\)"),
        (lambda: layer.mark(0, 40, 42, 0, [[0], [2]]), r"each of the offsets 0 to 1 once, got \(\(0,\), \(2,\)\)"),
    ]
    before = [table.copy() for table in layer.tables]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
        assert layer.tables == before
        assert layer.store.lengths == [41, 41]


def test_what_an_empty_or_small_layer_refuses() -> None:
    with pytest.raises(RuntimeError, match="the cache layer is empty"):
        _ = empty_layer().store
    with pytest.raises(RuntimeError, match="the cache layer is empty"):
        _ = empty_layer().pages
    layer = empty_layer(rank=9)
    with pytest.raises(ValueError, match=r"rank must be at most the head dimension 8, got 9"):
        layer.update(*random_tokens(1, 4)[1:])
    assert not layer.is_initialized
    for call in (layer.offload, layer.prefetch):
        with pytest.raises(NotImplementedError, match="cannot be offloaded"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype: torch.dtype) -> None:
    attention = filled(small_config(), Tokens(*(x.to(dtype) for x in random_tokens(1, 41))))
    layer = attention.layer
    assert layer.keys is not None
    assert layer.keys.dtype == dtype
    assert layer.pages.basis.key_error.dtype == torch.float32
    assert layer.pages.basis.tokens.shape[:2] == (1, HEADS)
