"""Hit rates of routers on held-out passages: of the dense model's attention mass, the share on the pages they choose.

Every query is asked about alone, as when decoding, and only where the budget leaves a page out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from oval_core.routers import Pages, Router
from oval_core.routers.oracle import exact_log_mass
from oval_core.training.passages import PassageSettings, Watcher, watch_passage

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
        features = self._features(pages)
        for one, shown, share in _questions(query, pages):
            for name, router in self.routers.items():
                own = replace(shown, features=features.get(name))
                self.hits[name].append(_hits(router, one, own, share).cpu())

    def _features(self, pages: Pages) -> dict[str, Tensor]:
        if pages.features is None:
            return {}
        return dict(zip(self._widths, pages.features.split([*self._widths.values()], -1), strict=True))


class Rehearsal(Watcher):
    """Keeps what a learned router sees of a passage, so that it can be asked again and again without the model."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Pages, Tensor]] = []

    def watch(self, query: Tensor, pages: Pages) -> None:
        """See `Watcher.watch`."""
        for one, shown, share in _questions(query, pages):
            without_keys = replace(shown, keys=pages.keys.new_empty(0))  # the most bytes; it reads none
            self.kept.append((one, without_keys, share))

    @torch.no_grad()
    def hit_rate(self, router: Router) -> float:
        """Mean over layers, KV heads, stops and queries; what the router made of the pages before is made anew."""
        return _mean([_hits(router, one, replace(pages, derived={}), share) for one, pages, share in self.kept])


def rehearse(model: Any, tokens: Tensor, settings: PassageSettings, budget_pages: int) -> Rehearsal:
    """One query of each stop of one passage. Arguments and errors as those of `hit_rates`."""
    require_budget(settings, budget_pages)
    rehearsal = Rehearsal()
    watch_passage(model, tokens, rehearsal, replace(settings, asked_tokens=1), budget_pages)
    return rehearsal


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
        ValueError: the passages are so short that the budget leaves no page out, or the model has no layer to page.
    """
    require_budget(settings, budget_pages)
    examiner = Examiner(routers)
    for tokens in tqdm(passages, desc="held out", unit="passage"):
        watch_passage(model, tokens, examiner, _fewer(settings), budget_pages)
    return {name: _mean(found) for name, found in examiner.hits.items()}


def require_budget(settings: PassageSettings, budget_pages: int) -> None:
    """Raise ValueError if the budget leaves no page out of a passage: then there is nothing to measure."""
    pages = _fewer(settings).pages
    if budget_pages > pages:
        raise ValueError(
            f"budget_pages must be at most {pages} to leave a page out of {settings.context_tokens} tokens, "
            f"got {budget_pages}"
        )


def _fewer(settings: PassageSettings) -> PassageSettings:
    return replace(settings, asked_tokens=min(ASKED_TOKENS, settings.asked_tokens))


def _questions(query: Tensor, pages: Pages) -> Iterator[tuple[Tensor, Pages, Tensor]]:
    """Each query as if it were the only one, `[1, H, G, 1, D]`, what a router sees, and the pages' shares `[1, H, P]`.

    There is no question where the budget leaves no page out.
    """
    if int(pages.counts.max()) <= pages.most[0]:
        return
    log_mass = exact_log_mass(query, pages)
    for number in range(query.shape[3]):
        shown, at = _shown_alone(pages, number), slice(number, number + 1)
        yield query[:, :, :, at], shown, shown.weights(log_mass[:, :, :, at])


def _shown_alone(pages: Pages, number: int) -> Pages:
    """As if query `number` were the only one."""
    at = slice(number, number + 1)
    hidden, seen = pages.hidden_states, pages.seen
    return replace(
        pages,
        positions=pages.positions[:, at],
        hidden_states=None if hidden is None else hidden[:, at],
        seen=None if seen is None else seen[:, at],
    )


def _hits(router: Router, query: Tensor, pages: Pages, share: Tensor) -> Tensor:
    """What the router's choice holds of the mass, `[H]`."""
    read = router.select(query, pages).joined().mask(len(pages.index))
    return (share * read).sum(-1)[0]


def _mean(hits: Sequence[Tensor]) -> float:
    if not hits:
        raise ValueError("the model has no layer whose keys can be paged: there is nothing to measure")
    return torch.stack([*hits]).mean().item()
