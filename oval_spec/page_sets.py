"""Which pages draft and target expect a verification to need, and a router that reads by them.

    D  tokens that the drafter expects the target to need, as pages of the target
    T  pages that the target's own router chooses for its last state, before it has seen the draft

Both are known before the verification runs, so their pages could be fetched from wherever they are in this order: those
both name, those one names, the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels import Partial
from oval_core.routers import Pages, Router, Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.oracle import exact_log_mass

READS = ("agreed", "union", "all")
SETS = ("D", "T", "D & T", "D | T")
Ask = Callable[[Tensor], Tensor]  # queries [B, heads, N, D] -> tokens that the target's router would read, [B, H, T]
Expects = Callable[[int, Ask], Tensor | None]  # of a layer: tokens [B, H or 1, T], bool; None: no idea


@dataclass
class PageSetStats:
    """Sums over the KV heads, rows and layers of the verifications that were looked at.

    Attributes:
        pages: by set, and "context": pages in it.
        covered: by set: share of the true attention mass of the sealed pages.
        looks: heads summed up.
        escalated: of them, those where D & T left more mass uncovered than allowed.
        steps: `pages` of every verification that was looked at.
    """

    pages: Counter[str] = field(default_factory=Counter)
    covered: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SETS, 0.0))
    looks: int = 0
    escalated: int = 0
    steps: dict[int, Counter[str]] = field(default_factory=dict)

    @property
    def overlap(self) -> list[float]:
        """Of every verification that was looked at: |D & T| / |D | T|."""
        return [step["D & T"] / max(1, step["D | T"]) for step in self.steps.values()]

    def means(self) -> dict[str, dict[str, float]]:
        """Means over the heads: pages by set, and coverage by set."""
        count = max(1, self.looks)
        return {
            "pages": {name: total / count for name, total in self.pages.items()},
            "covered": {name: total / count for name, total in self.covered.items()},
        }


class AgreementRouter(Router):
    """Reads by what the drafter and the target's own router expect.

    Args:
        base: the target's router.
        reads: "agreed": D & T, and D | T where that leaves too much mass uncovered; "union": D | T; "all": everything,
            D & T first, then the rest of D | T, then the other pages, merged by log-sum-exp.
        expects: see `Drafter.expects`.
        most_uncovered: estimated share of the attention mass that "agreed" may leave out.

    Attributes:
        measures: whether `stats` are summed up, which costs a dense read of the keys.
    """

    name = "agreement"

    def __init__(self, base: Router, reads: str, expects: Expects, most_uncovered: float = 0.1) -> None:
        if reads not in READS:
            raise ValueError(f"reads must be one of {READS}, got {reads!r}")
        self.base, self.reads, self.most_uncovered = base, reads, most_uncovered
        self.needs_bases, self.needs_hidden_states = base.needs_bases, base.needs_hidden_states
        self.expects = expects
        self.measures, self.stats = True, PageSetStats()
        self._pass, self._last = 0, torch.zeros(0)
        self._queries: dict[int, tuple[int, Tensor]] = {}  # by layer: a pass and its queries

    def __deepcopy__(self, _: object) -> AgreementRouter:
        return self

    def passed(self, last: Tensor) -> None:
        """A verification is over; each row's last accepted token was query `last`, int64 `[B]`."""
        self._pass, self._last = self._pass + 1, last

    def _own_query(self, query: Tensor, layer_idx: int) -> Tensor:
        """Of the target's last state, `[B, H, G, 1, D]`; if that pass was not seen, of the root."""
        when, before = self._queries.get(layer_idx, (-2, query))
        self._queries[layer_idx] = self._pass, query
        return _at(before, self._last) if when == self._pass - 1 else query[..., :1, :]

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor | None:
        """See `Router.page_features`."""
        return self.base.page_features(keys, mask)

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        return self.base.metadata_bytes(pages, shortlist, basis, features)

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        own = self._own_query(query, pages.layer_idx)
        target = self.base.select(own, _for_first(pages, 1)).mask(len(pages.index))
        drafted = self._drafted(pages, target)
        drafted = drafted.expand_as(target)
        agreed, union = (drafted & target) | pages.forced(), drafted | target | pages.forced()
        coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        uncovered = 1 - (pages.weights(coarse) * agreed).sum(-1, keepdim=True)
        escalated = uncovered > self.most_uncovered
        if self.measures:
            self._measure(query, pages, {"D": drafted, "T": target, "D & T": agreed, "D | T": union}, escalated)
        if self.reads == "all":
            rest = pages.present() & ~union
            then = tuple(_as_selection(part) for part in (union & ~agreed, rest) if bool(part.any()))
            return _as_selection(agreed)._replace(then=then)
        read = union if self.reads == "union" else torch.where(escalated, union, agreed)
        return _as_selection(read)._replace(tail=self._tail(query, pages, coarse, read))

    def _drafted(self, pages: Pages, otherwise: Tensor) -> Tensor:
        """Pages with a token that the drafter expects to be needed, `[B, H, P]`."""
        kv_heads = otherwise.shape[1]

        def ask(queries: Tensor) -> Tensor:
            grouped = queries.unflatten(1, (kv_heads, -1)).float()
            read = self.base.select(grouped, _for_first(pages, queries.shape[2])).mask(len(pages.index))
            return _tokens_of(read, pages)

        tokens = self.expects(pages.layer_idx, ask)
        if tokens is None:
            return otherwise
        before = torch.nn.functional.pad(tokens.long().cumsum(-1), (1, 0))
        begin = pages.starts[:, None].expand(-1, tokens.shape[1], -1).clamp_max(tokens.shape[2])
        end = (pages.starts + pages.lengths)[:, None].expand_as(begin).clamp_max(tokens.shape[2])
        return (before.gather(-1, end) > before.gather(-1, begin)) & pages.present()

    def _measure(self, query: Tensor, pages: Pages, sets: dict[str, Tensor], escalated: Tensor) -> None:
        mass = pages.weights(exact_log_mass(query, pages))  # [B, H, P]
        found = Counter[str]()
        for name, named in sets.items():
            found[name] = int(named.sum())
            self.stats.covered[name] += float((mass * named).sum())
        found["context"] = int(pages.present().sum()) * mass.shape[1]
        self.stats.pages += found
        self.stats.steps.setdefault(self._pass, Counter()).update(found)
        self.stats.looks += mass.shape[0] * mass.shape[1]
        self.stats.escalated += int(escalated.sum())

    def _tail(self, query: Tensor, pages: Pages, coarse: Tensor, read: Tensor) -> Partial | None:
        """What the base router estimates of the pages that are not read."""
        if self.reads == "all" or not isinstance(self.base, BasisRouter) or not self.base.estimate_tail:
            return None
        return self.base.estimate(query, pages, coarse, read)


def _at(queries: Tensor, index: Tensor) -> Tensor:
    """Of each row one query: `[B, H, G, Q, D]` at `[B]` -> `[B, H, G, 1, D]`."""
    return queries[torch.arange(len(queries), device=queries.device), :, :, index][..., None, :]


def _for_first(pages: Pages, queries: int) -> Pages:
    """The pages as they are shown to a chunk's first query, for so many of its kind."""

    def spread(tensor: Tensor | None) -> Any:
        return None if tensor is None else tensor[:, :1].expand(-1, queries, -1)

    positions = pages.positions[:, :1].expand(-1, queries)
    return replace(pages, positions=positions, seen=spread(pages.seen), hidden_states=spread(pages.hidden_states))


def _tokens_of(mask: Tensor, pages: Pages) -> Tensor:
    """Tokens `[B, H, T]` of pages `[B, H, P]`."""
    token = torch.arange(pages.keys.shape[2], device=mask.device)
    absent = pages.index >= pages.counts[:, None]
    starts = pages.starts.masked_fill(absent, pages.keys.shape[2])  # ascending, also in rows with fewer pages
    page = (torch.searchsorted(starts, token.repeat(len(mask), 1), right=True) - 1).clamp_min(0)  # [B, T]
    inside = (token >= starts.gather(-1, page)) & (token < (starts + pages.lengths).gather(-1, page))
    return mask.gather(-1, page[:, None].expand(-1, mask.shape[1], -1)) & inside[:, None]


def _as_selection(mask: Tensor) -> Selection:
    """Of pages `[B, H, P]`."""
    valid, pages = mask.sort(dim=-1, descending=True, stable=True)
    most = int(mask.sum(-1).max())
    return Selection(pages[..., :most], valid[..., :most])
