"""`PageStore` against plain Python lists of tokens, in memory that is poisoned with NaN."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.cache_utils import DynamicLayer

from oval_core.layer import OvalLayer
from oval_core.page_store import PageStore
from tests.core.scenes import small_config

pytestmark = pytest.mark.usefixtures("poisoned_memory")

HEADS, DIM, VALUE_DIM = 2, 3, 5


@dataclass
class Row:
    """One row in the model of the store."""

    keys: Tensor  # [n, H, D]
    values: Tensor  # [n, H, D_v]
    visible: list[bool]

    def __len__(self) -> int:
        return len(self.visible)

    def pick(self, tokens: Iterable[int]) -> Row:
        """The tokens at these positions, in this order."""
        index = torch.tensor([*tokens], dtype=torch.long)
        return Row(self.keys[index], self.values[index], [self.visible[token] for token in index.tolist()])


def random_pair(batch: int, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(batch, HEADS, count, DIM), torch.randn(batch, HEADS, count, VALUE_DIM)
    return keys.to(dtype), values.to(dtype)


class PageStoreMachine(RuleBasedStateMachine):
    """The store beside a list of rows."""

    @initialize(batch=st.integers(1, 3), dtype=st.sampled_from((torch.float32, torch.bfloat16)))
    def begin(self, batch: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        keys, values = random_pair(batch, 0, dtype)
        self.store = PageStore(keys, values)
        self.rows = [Row(k.transpose(0, 1), v.transpose(0, 1), []) for k, v in zip(keys, values, strict=True)]
        self.hides = False
        self.append(6)

    @property
    def lengths(self) -> list[int]:
        return [len(row) for row in self.rows]

    @rule(count=st.sampled_from((0, 1, 2, 7, 20)))
    def append(self, count: int) -> None:
        new = random_pair(len(self.rows), count, self.dtype)
        self.store.append(*new)
        keys, values = (x.transpose(1, 2) for x in new)
        self.rows = [
            Row(torch.cat([row.keys, k]), torch.cat([row.values, v]), row.visible + [True] * count)
            for row, k, v in zip(self.rows, keys, values, strict=True)
        ]

    @rule(pattern=st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=4, max_size=4))
    def hide(self, pattern: list[list[bool]]) -> None:
        count = min(4, *self.lengths, 4)
        seen = [flags[:count] for flags in pattern[: len(self.rows)]] + [[True] * count] * (len(self.rows) - 4)
        self.store.hide(torch.tensor(seen, dtype=torch.bool).view(len(self.rows), count))
        self.hides = True
        for row, flags in zip(self.rows, seen, strict=True):
            row.visible[len(row) - count :] = flags

    @rule(data=st.data(), alike=st.booleans())
    def crop(self, data: st.DataObject, alike: bool) -> None:
        least = data.draw(st.integers(0, min(self.lengths)))
        lengths = [least if alike else data.draw(st.integers(least, length)) for length in self.lengths]
        self.store.crop(lengths)
        self.rows = [row.pick(range(length)) for row, length in zip(self.rows, lengths, strict=True)]

    @rule(tail=st.integers(0, 5), wanted=st.sets(st.integers(0, 4)))
    def keep(self, tail: int, wanted: set[int]) -> None:
        start = [max(length - tail, 0) for length in self.lengths]
        kept = [
            [first + i for i in sorted(wanted) if first + i < length]
            for first, length in zip(start, self.lengths, strict=True)
        ]
        self.store.keep(kept, start)
        self.rows = [row.pick([*range(first), *k]) for row, first, k in zip(self.rows, start, kept, strict=True)]

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.rows) - 1))
        start = data.draw(st.integers(0, len(self.rows[at])))
        order = data.draw(st.permutations(range(min(len(self.rows[at]) - start, 9))))
        self.store.reorder(at, start, order)
        moved = [start + offset for offset in order]
        tokens = range(len(self.rows[at]))
        self.rows[at] = self.rows[at].pick([*tokens[:start], *moved, *tokens[start + len(order) :]])

    @rule(rows=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def select_rows(self, rows: list[int]) -> None:
        rows = [row % len(self.rows) for row in rows]
        self.store.select_rows(torch.tensor(rows))
        self.rows = [self.rows[row].pick(range(len(self.rows[row]))) for row in rows]

    @rule(bad=st.sampled_from(("batch", "dim", "dtype", "count", "crop", "keep", "reorder")))
    def fail(self, bad: str) -> None:
        """The invariants show that an error changed nothing."""
        batch, longest = len(self.rows), max(self.lengths)
        keys, values = random_pair(batch, 3, self.dtype)
        calls: Mapping[str, Any] = {
            "batch": lambda: self.store.append(*random_pair(batch + 1, 3, self.dtype)),
            "dim": lambda: self.store.append(values, keys),
            "dtype": lambda: self.store.append(keys.half(), values.half()),
            "count": lambda: self.store.append(keys, values[:, :, :1]),
            "crop": lambda: self.store.crop([0] * (batch - 1) + [longest + 1]),
            "keep": lambda: self.store.keep([[]] * (batch - 1) + [[longest]], [0] * batch),
            "reorder": lambda: self.store.reorder(0, self.lengths[0] - 1, [1, 0]),
        }
        with pytest.raises(ValueError, match=r"must|cannot|are not all in row"):
            calls[bad]()

    @invariant()
    def same_tokens(self) -> None:
        assert self.store.lengths == self.lengths
        assert self.store.num_tokens == max(self.lengths) <= self.store.capacity_tokens
        assert self.store.is_ragged == (len(set(self.lengths)) > 1)
        keys, values = self.store.dense()
        assert keys.dtype == values.dtype == self.dtype
        for row, k, v in zip(self.rows, keys, values, strict=True):
            assert torch.equal(k[:, : len(row)].transpose(0, 1), row.keys)
            assert torch.equal(v[:, : len(row)].transpose(0, 1), row.values)

    @invariant()
    def nothing_that_can_be_seen_is_poisoned(self) -> None:
        """Also beyond the end of a short row: attention gives those tokens weight zero, and 0 * NaN is NaN."""
        assert not any(tensor.isnan().any() for tensor in self.store.dense())

    @invariant()
    def same_visibility(self) -> None:
        assert (self.store.visible is None) == (not self.hides)
        for index, row in enumerate(self.rows):
            if self.store.visible is not None:
                assert self.store.visible[index, : len(row)].tolist() == row.visible


PageStoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=25)
TestPageStore = pytest.mark.usefixtures("little_spare")(PageStoreMachine.TestCase)


class AllocatedBytes(TorchDispatchMode):
    """Counts the bytes of every result that does not share its storage with an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in _tensors((args, kwargs or {}))}
        fresh = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(result)}
        self.total += sum(size for pointer, size in fresh.items() if pointer not in known)
        return result


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def test_visibility_moves_with_its_tokens_and_is_not_inherited() -> None:
    store = PageStore(*random_pair(1, 0))
    store.append(*random_pair(1, 6))
    store.hide(torch.tensor([[True, False, True, False]]))
    store.keep([[3, 4]], [1])
    assert store.visible is not None
    assert store.visible[0, :3].tolist() == [True, False, True]
    store.crop([1])
    store.append(*random_pair(1, 2))
    assert store.visible[0, :3].tolist() == [True, True, True]


STEPS, CONTEXT = 300, 4096  # the spare capacity after a prompt of that length holds fewer steps: it grows on the way


def allocated_by_decoding(layer: DynamicLayer | OvalLayer) -> int:
    """Bytes allocated by `STEPS` steps after `CONTEXT` tokens."""
    prompt, step = (tuple(torch.zeros(1, 2, count, 16) for _ in range(2)) for count in (CONTEXT, 1))
    layer.update(*prompt)
    if isinstance(layer, OvalLayer):
        layer.attended(None)
        layer.update(*step)  # seals the prompt, once
    with AllocatedBytes() as allocated:
        for _ in range(STEPS):
            layer.update(*step)
            if isinstance(layer, OvalLayer):
                layer.attended(None)
    return allocated.total


def test_decoding_does_not_copy_the_cache() -> None:
    cache_bytes = CONTEXT * 2 * 2 * 16 * 4
    layer = OvalLayer(small_config(page_size=16), None, 0)
    assert allocated_by_decoding(layer) < 4 * cache_bytes  # growth, once, and 19 bases
    assert allocated_by_decoding(DynamicLayer()) > STEPS * cache_bytes  # the yardstick works: this one copies


def test_steps_within_the_capacity_allocate_nothing() -> None:
    store, step = PageStore(*random_pair(1, 0)), random_pair(1, 1)
    store.append(*random_pair(1, CONTEXT))
    with AllocatedBytes() as allocated:
        for _ in range(200):
            store.append(*step)
    assert allocated.total == 0


def test_growth_is_amortised() -> None:
    store, step, growths = PageStore(*random_pair(1, 0)), random_pair(1, 50), set()
    for _ in range(200):
        store.append(*step)
        growths.add(store.capacity_tokens)
    assert len(growths) < 12
    assert store.capacity_tokens < 2 * store.num_tokens
    assert store.resident_bytes == store.capacity_tokens * HEADS * (DIM + VALUE_DIM) * 4


def test_the_dense_view_shares_the_storage() -> None:
    store = PageStore(*random_pair(2, 0))
    store.append(*random_pair(2, 9))
    for first, second in zip(store.dense(), store.dense(), strict=True):
        assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    store.dense()[0][0, 0, 3] = 7.0
    assert (store.storage[0][0, 0, 3] == 7.0).all()


def test_errors_say_what_was_expected() -> None:
    store = PageStore(*random_pair(2, 0))
    store.append(*random_pair(2, 9))
    with pytest.raises(ValueError, match=r"keys \[batch, kv_heads, head_dim\] must be \(2, 2, 3\) .*, got \(1, 2, 3\)"):
        store.append(*random_pair(1, 1))
    with pytest.raises(ValueError, match=r"keys must be torch.float32 on cpu .*, got torch.float16 on meta"):
        store.append(*(x.half().to("meta") for x in random_pair(2, 1)))
    with pytest.raises(ValueError, match=r"lengths must name 2 rows, got 1"):
        store.crop([3])
    with pytest.raises(ValueError, match=r"a row of 9 tokens cannot be cropped to 10"):
        store.crop([3, 10])
    for indices, start in ([[3, 3], []], [0, 0]), ([[3, 2], []], [0, 0]), ([[1], []], [2, 0]), ([[9], []], [0, 0]):
        with pytest.raises(ValueError, match=r"positions must ascend strictly within"):
            store.keep(indices, start)
    with pytest.raises(ValueError, match=r"indices and start must name 2 rows, got 1, 2"):
        store.keep([[1]], [0, 0])
    with pytest.raises(ValueError, match=r"row must be in \[0, 2\), got 2"):
        store.reorder(2, 0, [1, 0])
    for first, tokens in ((8, r"\[8, 10\)"), (-1, r"\[-1, 1\)")):
        with pytest.raises(ValueError, match=rf"tokens {tokens} are not all in row 1, which has 9"):
            store.reorder(1, first, [1, 0])
    for order in ([0, 0], [1, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"order must be a permutation of 0 to 1, got \["):
            store.reorder(1, 3, order)
