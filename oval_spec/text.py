"""The tokens of one row: integers for bookkeeping, a tensor for logits processors and stopping criteria."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE_TOKENS = 256


class Text:
    """Tokens that may grow, and shrink, at the end.

    Args:
        ids: int64 `[t]`, padding included, on the device where processors and criteria want them.

    Attributes:
        tokens: the same as Python integers; read only.
    """

    def __init__(self, ids: Tensor) -> None:
        self.tokens: list[int] = ids.tolist()
        self._ids = torch.cat([ids, ids.new_zeros(SPARE_TOKENS)])

    def __len__(self) -> int:
        """Tokens."""
        return len(self.tokens)

    @property
    def ids(self) -> Tensor:
        """int64 `[1, t]`, without a copy."""
        return self._ids[None, : len(self.tokens)]

    def append(self, token: int) -> None:
        """Add a token."""
        if len(self.tokens) == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
        self._ids[len(self.tokens)] = token
        self.tokens.append(token)

    def crop(self, length: int) -> None:
        """Forget the tokens from `length` on."""
        del self.tokens[length:]
