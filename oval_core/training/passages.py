"""Passages of texts, and reading them with stops at which a router looks at every page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oval_core.attach import attach
from oval_core.checks import check_count
from oval_core.config import OvalConfig
from oval_core.routers import Pages, Router, Selection


@dataclass(frozen=True)
class PassageSettings:
    """What is read, and where the model is watched.

    Args:
        passages: to learn from, in all.
        context_tokens: of each.
        every_tokens: one stop comes after so many.
        asked_tokens: queries of a stop, the last before it.
        held_out: share of every text that nothing is learned from.
        held_out_passages: to measure on, from each text.
        page_size: as the router will be used, see `OvalConfig`.
        seed: of all that is drawn.

    Raises:
        TypeError, ValueError: one is out of range.
    """

    passages: int = 40
    context_tokens: int = 2048
    every_tokens: int = 256
    asked_tokens: int = 16
    held_out: float = 0.1
    held_out_passages: int = 1
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("passages", "context_tokens", "every_tokens", "asked_tokens", "held_out_passages"):
            check_count(name, getattr(self, name))
        if self.every_tokens <= 2 * self.asked_tokens:  # longer chunks than those asked about are read densely
            raise ValueError(f"every_tokens must be more than twice {self.asked_tokens=}, got {self.every_tokens}")
        if self.context_tokens < 2 * self.every_tokens:
            raise ValueError(f"context_tokens must be at least twice {self.every_tokens=}, got {self.context_tokens}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out must be between 0 and 1, got {self.held_out}")
        OvalConfig(page_size=self.page_size)

    @property
    def pages(self) -> int:
        """Sealed pages before the last stop of a passage."""
        asked = min(self.asked_tokens, self.context_tokens % self.every_tokens or self.every_tokens)
        return (self.context_tokens - asked) // self.page_size


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A short digest of every tensor, of a text or of weights."""
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    return {name: hashlib.sha256(array.tobytes()).hexdigest()[:16] for name, array in arrays.items()}


def cut_passages(texts: Mapping[str, Tensor], settings: PassageSettings) -> tuple[list[Tensor], list[Tensor]]:
    """Passages to learn from, evenly spread, and held-out ones from the ends of the texts: int64 `[context_tokens]`.

    Args:
        texts: token ids `[t]` by name.

    Raises:
        ValueError: no texts, or one too short for a passage on both sides.
    """
    if not texts:
        raise ValueError("texts must hold at least one text, got none")
    length, total = settings.context_tokens, sum(map(len, texts.values()))
    learned, kept = list[Tensor](), list[Tensor]()
    for name, text in texts.items():
        held = max(length, round(settings.held_out * len(text)))
        if len(text) < held + length:
            raise ValueError(f"{name}: expected at least {held + length} tokens for two passages, got {len(text)}")
        learned += _spread(text[:-held], max(1, round(settings.passages * len(text) / total)), length)
        kept += _spread(text[-held:], settings.held_out_passages, length)
    return learned, kept


def _spread(text: Tensor, count: int, length: int) -> list[Tensor]:
    starts = torch.linspace(0, len(text) - length, count).long().tolist()
    return [text[start : start + length] for start in starts]


class Watcher(Router):
    """Reads every page, so that the model stays dense, and looks at them in `watch`."""

    name = "watcher"
    needs_hidden_states = True

    def watch(self, query: Tensor, pages: Pages) -> None:
        """Called for every layer at every stop; one row. `query` as in `Router.score`."""
        raise NotImplementedError

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        self.watch(query, pages)
        everything = pages.index.expand(len(query), query.shape[1], -1)
        return Selection(everything, pages.present().expand_as(everything))


@torch.no_grad()
def watch_passage(
    model: Any, tokens: Tensor, watcher: Watcher, settings: PassageSettings, budget_pages: int | None = None
) -> None:
    """Let a model, not attached and in eval mode, read a passage `[t]`; `watcher` looks at every stop.

    Args:
        budget_pages: what `Pages.budget` tells the watcher; None: all pages.
    """
    config = OvalConfig(
        page_size=settings.page_size,
        router=watcher,
        budget_pages=budget_pages,
        budget_ratio=1.0 if budget_pages is None else None,
        always_paged=True,
        seal_tokens=1,
        stats_every=0,
        max_sparse_query_tokens=settings.asked_tokens,
        impl="reference",
    )
    cache = None
    with attach(model, config):
        for stretch in tokens.split(settings.every_tokens):
            for chunk in (stretch[: -settings.asked_tokens], stretch[-settings.asked_tokens :]):
                if len(chunk):
                    cache = model(chunk[None].to(model.device), cache=cache, use_cache=True, logits_to_keep=1).cache
