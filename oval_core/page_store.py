"""Keys and values of one layer: contiguous token storage that grows without copying itself at every step.

Rows may have different lengths (batched speculation crops them differently). Tokens that the attention mask hides
(padding) stay where they are and are marked in `visible`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oval_core.memory import lasting

GROWTH = 1.5
SPARE_TOKENS = 256


class PageStore:
    """Token storage `[B, H, capacity, D]` of one layer, keys and values, in the dtype and on the device of the model.

    Args:
        keys, values: templates (any number of tokens, also none) `[B, H, n, D]` and `[B, H, n, D_v]`; not stored.

    Attributes:
        lengths: tokens of each row.
        visible: bool `[B, capacity]`, False for padding; None as long as no token was hidden.
        derived: what kernels make of the tensors; dropped when those are replaced.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys = keys.new_empty(keys.shape[0], keys.shape[1], 0, keys.shape[3])
        self._values = values.new_empty(values.shape[0], values.shape[1], 0, values.shape[3])
        self.lengths = [0] * keys.shape[0]
        self.visible: Tensor | None = None
        self.derived: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without what was derived from tensors that are not its own."""
        return {**self.__dict__, "derived": {}}

    @property
    def num_tokens(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def is_ragged(self) -> bool:
        """Whether rows have different lengths."""
        return min(self.lengths, default=0) != self.num_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit before the storage grows."""
        return self._keys.shape[2]

    @property
    def resident_bytes(self) -> int:
        """Bytes held, spare capacity included."""
        return self._keys.nbytes + self._values.nbytes

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row and one KV head, key and value."""
        return (self._keys.shape[3] + self._values.shape[3]) * self._keys.element_size()

    def dense(self) -> tuple[Tensor, Tensor]:
        """All tokens, without a copy: `[B, H, num_tokens, D]` and `[B, H, num_tokens, D_v]`."""
        tokens = self.num_tokens
        return self._keys.narrow(2, 0, tokens), self._values.narrow(2, 0, tokens)

    @property
    def storage(self) -> tuple[Tensor, Tensor]:
        """Keys and values with their spare capacity, which holds anything: `[B, H, capacity_tokens, ...]`."""
        return self._keys, self._values

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add the same number of tokens to every row.

        Args:
            keys, values: `[B, H, n, D]` and `[B, H, n, D_v]`.

        Raises:
            ValueError: a shape, dtype or device differs from what is stored.
        """
        self._check(keys, self._keys, "keys")
        self._check(values, self._values, "values")
        added = keys.shape[2]
        if values.shape[2] != added:
            raise ValueError(f"keys and values must have as many tokens, got {added} and {values.shape[2]}")
        if self.num_tokens + added > self.capacity_tokens:
            self._grow(self.num_tokens + added)
        if not self.is_ragged:
            self._put(slice(None), self.num_tokens, keys, values)
        else:
            for row, length in enumerate(self.lengths):
                self._put(row, length, keys[row], values[row])
        self.lengths = [length + added for length in self.lengths]

    def _put(self, rows: slice | int, start: int, keys: Tensor, values: Tensor) -> None:
        tokens = slice(start, start + keys.shape[-2])
        self._keys[rows, :, tokens] = keys
        self._values[rows, :, tokens] = values
        if self.visible is not None:
            self.visible[rows, tokens] = True

    @lasting
    def hide(self, visible: Tensor) -> None:
        """Record which of the last tokens of each row are real: bool `[B, n]`, True where a token may be read."""
        if self.visible is None:
            self.derived = {}
            self.visible = torch.ones(
                len(self.lengths), self.capacity_tokens, dtype=torch.bool, device=self._keys.device
            )
        for row, length in self._row_slices():
            self.visible[row, length - visible.shape[1] : length] = visible[row]

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from `lengths[row]` on. Raises ValueError, see `check_crop`."""
        self.check_crop(lengths)
        self.lengths = list(lengths)

    def check_crop(self, lengths: Sequence[int]) -> None:
        """Raise ValueError if rows cannot be cropped to these lengths."""
        if len(lengths) != len(self.lengths):
            raise ValueError(f"lengths must name {len(self.lengths)} rows, got {len(lengths)}")
        bad = [(want, have) for want, have in zip(lengths, self.lengths, strict=True) if not 0 <= want <= have]
        if bad:
            raise ValueError(f"a row of {bad[0][1]} tokens cannot be cropped to {bad[0][0]}")

    def keep(self, indices: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        """Of the tokens from `start[row]` on keep only those at positions `indices[row]`, moved together.

        Args:
            indices: strictly ascending positions of each row, all >= `start[row]`.
            start: tokens of each row that stay untouched.

        Raises:
            ValueError: rows or positions do not fit; nothing is changed.
        """
        self.check_keep(indices, start)
        for row, kept in enumerate(indices):
            self._move(row, start[row], kept)
        self.lengths = [first + len(kept) for first, kept in zip(start, indices, strict=True)]

    def check_keep(self, indices: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        """Raise ValueError if these are not tokens to keep, see `keep`."""
        if not len(indices) == len(start) == len(self.lengths):
            raise ValueError(f"indices and start must name {len(self.lengths)} rows, got {len(indices)}, {len(start)}")
        for kept, first, length in zip(indices, start, self.lengths, strict=True):
            bounds = [first - 1, *kept, length]
            if first < 0 or any(a >= b for a, b in pairwise(bounds)):
                raise ValueError(f"positions must ascend strictly within [{first}, {length}), got {list(kept)}")

    def reorder(self, row: int, start: int, order: Sequence[int]) -> None:
        """Let token `start + i` of a row be what token `start + order[i]` was.

        Args:
            order: a permutation of `range(n)`; the row has `start + n` tokens or more.

        Raises:
            ValueError: no such row or tokens, or no permutation; nothing is changed.
        """
        if not 0 <= row < len(self.lengths):
            raise ValueError(f"row must be in [0, {len(self.lengths)}), got {row}")
        stop = start + len(order)
        if not 0 <= start <= stop <= self.lengths[row]:
            raise ValueError(f"tokens [{start}, {stop}) are not all in row {row}, which has {self.lengths[row]}")
        if sorted(order) != [*range(len(order))]:
            raise ValueError(f"order must be a permutation of 0 to {len(order) - 1}, got {list(order)}")
        self._move(row, start, [start + offset for offset in order])

    def shows_all(self, row: int, start: int, stop: int) -> bool:
        """Whether no token of [start, stop) of a row is hidden."""
        return self.visible is None or bool(self.visible[row, start:stop].all())

    def _move(self, row: int, start: int, tokens: Sequence[int]) -> None:
        """Copy `tokens` of a row to where `start` is, one after the other."""
        stop, moved = start + len(tokens), torch.as_tensor(tokens, dtype=torch.long, device=self._keys.device)
        for storage in (self._keys, self._values):
            storage[row, :, start:stop] = storage[row, :, moved]
        if self.visible is not None:
            self.visible[row, start:stop] = self.visible[row, moved]

    @lasting
    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row `rows[i]` was; rows may repeat or vanish (beam search, batch repeat, batch select)."""
        rows = rows.to(self._keys.device)
        self.derived = {}
        self._keys, self._values = self._keys.index_select(0, rows), self._values.index_select(0, rows)
        if self.visible is not None:
            self.visible = self.visible.index_select(0, rows)
        self.lengths = [self.lengths[row] for row in rows.tolist()]

    def _row_slices(self) -> list[tuple[slice, int]]:
        """Slices of rows that share a length: one slice in the usual case."""
        if not self.is_ragged:
            return [(slice(None), self.num_tokens)]
        return [(slice(row, row + 1), length) for row, length in enumerate(self.lengths)]

    @lasting
    def _grow(self, tokens: int) -> None:
        """Grow the capacity to `tokens` or more by a constant factor, so that growth costs O(1) copies a token."""
        self.derived = {}
        capacity = max(tokens + SPARE_TOKENS, int(self.capacity_tokens * GROWTH))
        self._keys, self._values = self._grown(self._keys, capacity), self._grown(self._values, capacity)
        if self.visible is not None:
            spare = self.visible.new_ones(self.visible.shape[0], capacity - self.visible.shape[1])
            self.visible = torch.cat([self.visible, spare], dim=1)

    def _grown(self, old: Tensor, capacity: int) -> Tensor:
        grown = old.new_empty(*old.shape[:2], capacity, old.shape[3])
        grown[:, :, : self.num_tokens] = old[:, :, : self.num_tokens]
        grown[:, :, self.num_tokens :] = 0  # a view of ragged rows shows it: weight zero times NaN would be NaN
        return grown

    def _check(self, new: Tensor, stored: Tensor, name: str) -> None:
        expected = (stored.shape[0], stored.shape[1], stored.shape[3])
        got = (new.shape[0], new.shape[1], new.shape[3])
        if expected != got:
            raise ValueError(
                f"{name} [batch, kv_heads, head_dim] must be {expected} as in the cache, got {got}; "
                "was this cache filled by another model or batch?"
            )
        if new.dtype != stored.dtype or new.device != stored.device:
            raise ValueError(
                f"{name} must be {stored.dtype} on {stored.device} as in the cache, got {new.dtype} on {new.device}"
            )
