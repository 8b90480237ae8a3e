"""Hit rates of routers on held-out passages: of the dense model's attention mass, the share on the pages they choose.

Every query is asked about alone, as when decoding, and only where the budget leaves a page out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from oval_core.router_training.passages import PassageSettings, Watcher, watch_passage
from oval_core.routers import Pages, Router
from oval_core.routers.oracle import exact_log_mass

ASKED_TOKENS = 4  # of a stop, at most: each is asked about alone


class Examiner(Watcher):
    """Asks routers which pages they would read.

    Args:
        routers: by name.

    Attributes:
        hits: what came, by name: one `[H]` a layer and query.
    """

    needs_bases = True

    def __init__(self, routers: Mapping[str, Router]) -> None:
        self.routers = routers
        self.hits: dict[str, list[Tensor]] = {name: [] for name in routers}
        self._widths: dict[str, int] = {}

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """Those of all routers, side by side."""
        found = {name: router.page_features(keys, mask) for name, router in self.routers.items()}
        kept = {name: features for name, features in found.items() if features is not None}
        self._widths = {name: features.shape[-1] for name, features in kept.items()}
        return torch.cat([*kept.values()], -1) if kept else None

    def watch(self, query: Tensor, pages: Pages) -> None:
        """See `Watcher.watch`."""
        if int(pages.counts.max()) <= pages.most[0]:
            return
        log_mass, features = exact_log_mass(query, pages), self._features(pages)
        for number in range(query.shape[3]):
            one, at = _asked_alone(pages, number), slice(number, number + 1)
            share = one.weights(log_mass[:, :, :, at])
            for name, router in self.routers.items():
                shown = dataclasses.replace(one, features=features.get(name))
                read = router.select(query[:, :, :, at], shown).joined().mask(len(pages.index))
                self.hits[name].append((share * read).sum(-1)[0].cpu())

    def _features(self, pages: Pages) -> dict[str, Tensor]:
        if pages.features is None:
            return {}
        return dict(zip(self._widths, pages.features.split([*self._widths.values()], -1), strict=True))


def _asked_alone(pages: Pages, number: int) -> Pages:
    """As if query `number` were the only one."""
    at = slice(number, number + 1)
    hidden, seen = pages.hidden_states, pages.seen
    return dataclasses.replace(
        pages,
        positions=pages.positions[:, at],
        hidden_states=None if hidden is None else hidden[:, at],
        seen=None if seen is None else seen[:, at],
    )


def hit_rates(
    model: Any,
    passages: Sequence[Tensor],
    routers: Mapping[str, Router],
    settings: PassageSettings,
    budget_pages: int,
) -> dict[str, float]:
    """Mean over layers, KV heads, stops and queries, by the name of the router.

    Args:
        model: not attached, in eval mode.
        passages: int64 `[t]` each.
        routers: by name.
        budget_pages: as in `OvalConfig`, the open tokens included.

    Raises:
        ValueError: the passages are so short that the budget leaves no page out.
    """
    examiner = Examiner(routers)
    fewer = dataclasses.replace(settings, asked_tokens=min(ASKED_TOKENS, settings.asked_tokens))
    for tokens in tqdm(passages, desc="held out", unit="passage"):
        watch_passage(model, tokens, examiner, fewer, budget_pages)
    if not all(examiner.hits.values()):
        raise ValueError(
            f"budget_pages must leave a page out of {settings.context_tokens} tokens to measure a router, "
            f"got {budget_pages}"
        )
    return {name: torch.stack(found).mean().item() for name, found in examiner.hits.items()}
