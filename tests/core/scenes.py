"""A cache layer under attention without a model: what the core tests decode with."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oval_core import OvalConfig
from oval_core.attention import oval_attention
from oval_core.binding import BINDING, Binding
from oval_core.layer import OvalLayer
from oval_core.page_view import view_pages
from oval_core.quantise import unpack_int4, unpack_uint4
from oval_core.routers import Pages
from oval_core.stats import Recorder

HEADS, GROUP, DIM, VALUE_DIM = 2, 3, 8, 6


def small_config(**changes: Any) -> OvalConfig:
    """Few and small pages, sealed as soon as they are full; always paged."""
    small = {"page_size": 8, "budget_pages": 4, "rank": 2, "seal_tokens": 1, "always_paged": True, "router": "basis"}
    return OvalConfig(**{**small, **changes})


class Tokens(NamedTuple):
    """Queries `[B, heads, n, D]`, keys and values `[B, H, n, D]` of the same tokens."""

    query: Tensor
    keys: Tensor
    values: Tensor

    def part(self, start: int, stop: int | None = None, row: int | None = None) -> Tokens:
        rows = slice(None) if row is None else slice(row, row + 1)
        return Tokens(*(x[rows, :, start:stop] for x in self))


def random_tokens(batch: int, count: int) -> Tokens:
    return Tokens(
        torch.randn(batch, HEADS * GROUP, count, DIM),
        torch.randn(batch, HEADS, count, DIM),
        torch.randn(batch, HEADS, count, VALUE_DIM),
    )


def left_padding(padding: list[int], queries: int, total: int) -> Tensor:
    """Causal mask bool `[B, 1, Q, T]` of rows that begin with hidden tokens."""
    position = torch.arange(total)
    causal = position <= position[total - queries :, None]
    return (causal & (position >= torch.tensor(padding)[:, None, None]))[:, None]


class Attention(nn.Module):
    """One attached attention module, its router, its recorder and its cache layer."""

    def __init__(self, config: OvalConfig) -> None:
        super().__init__()
        self.num_key_value_groups, self.is_causal = GROUP, True
        self.recorder = Recorder(config)
        self.binding = Binding("reference", "sdpa", self.recorder)
        setattr(self, BINDING, self.binding)
        self.layer = OvalLayer(config, None, 0)
        self.eval()

    def forward(self, tokens: Tokens, mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """One forward pass: `[B, n, heads, D_v]`."""
        self.recorder.next_step()
        handed: dict[str, Any] = {}
        keys, values = self.layer.update(tokens.keys, tokens.values, kwargs=handed)
        return oval_attention(self, tokens.query, keys, values, mask, **handed, **kwargs)[0]

    def decode(self, tokens: Tokens, padding: list[int] | None = None) -> Tensor:
        """One pass a token, `[B, n, heads, D_v]`."""
        outputs = []
        for token in range(tokens.keys.shape[2]):
            total = self.layer.get_seq_length() + 1
            mask = None if padding is None else left_padding(padding, 1, total)
            outputs.append(self(tokens.part(token, token + 1), mask))
        return torch.cat(outputs, 1)

    def pages(self, query: Tensor, mask: Tensor | None = None, softcap: float | None = None) -> tuple[Tensor, Pages]:
        """The grouped query and what a router is shown for it."""
        grouped = query.unflatten(1, (HEADS, GROUP))
        return grouped, view_pages(self.binding, self.layer, grouped.shape[3], mask, DIM**-0.5, softcap)


def filled(config: OvalConfig, tokens: Tokens, padding: list[int] | None = None) -> Attention:
    """All tokens but the last in one prefill, the last one decoded: every full page is sealed."""
    attention, count = Attention(config), tokens.keys.shape[2] - 1
    attention(tokens.part(0, count), None if padding is None else left_padding(padding, count, count))
    attention.decode(tokens.part(count), padding)
    return attention


def _numbers(name: str, stored: Tensor) -> Tensor:
    """What a field of a basis holds, 4-bit numbers one by one."""
    if stored.dtype != torch.uint8:
        return stored
    return (unpack_uint4 if name == "radius" else unpack_int4)(stored, 2 * stored.shape[-1])


def assert_same_pages(left: OvalLayer, right: OvalLayer, left_row: int = 0, right_row: int = 0) -> None:
    """The rows have the same sealed pages: borders, tags and bases (up to rounding)."""
    count = left.tables[left_row].num_pages
    assert count == right.tables[right_row].num_pages
    if not count:
        return
    for name in ("starts", "lengths", "tags"):
        rows = (getattr(left.pages, name)[left_row, :count], getattr(right.pages, name)[right_row, :count])
        assert torch.equal(*rows), name
    for name, tensor in left.pages.basis.tensors().items():
        other = right.pages.basis.tensors()[name]
        one, two = (
            _numbers(name, part).double() for part in (tensor[left_row, :, :count], other[right_row, :, :count])
        )
        step = 1.0 if tensor.dtype in (torch.int8, torch.uint8) else 1e-5 * float(one.abs().max())
        assert (one - two).abs().max() <= step, name
