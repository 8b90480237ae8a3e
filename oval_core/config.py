"""`OvalConfig`: every choice a user can make, validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from oval_core.page_policy import PagePolicy
    from oval_core.routers import Router

AUTO = "auto"
ROUTER_OF_DEVICE = {"cpu": "box"}  # measured: README, "How well it works"; every other device: basis
BUDGET_PAGES, BASIS_BUDGET_PAGES = 96, 32  # the basis router estimates what it does not read
PAGE_SIZES = (8, 16, 32, 64, 128, 256)
TAIL_ESTIMATES = ("shortlist", "none")


@dataclass(frozen=True)
class OvalConfig:
    """How the KV cache is paged and how much of it a decoding step reads.

    Args:
        page_size: tokens a page, a power of two from 8 to 256.
        budget_pages: pages per KV head read exactly at a step; sinks and window included, the open tokens count as one.
            None: 32 with the `basis` router, 96 with any other.
        budget_ratio: the same as a share of the pages in the cache, in (0, 1]; excludes `budget_pages`.
        sink_pages: pages at the start that are always read exactly.
        window_pages: sealed pages at the end that are always read exactly; the open tokens come on top.
        seal_tokens: tokens to collect at the end before the full pages among them are sealed, all at once: the more,
            the rarer that work and the more tokens read exactly. 1: every page as soon as it is full.
        page_policy: cuts prefilled text into pages of up to `page_size` tokens, see `oval_core.page_policy`; pages that
            are filled while decoding are full ones. None: all are.
        rank: key directions of a page's basis; at most the head dimension.
        shortlist_ratio: share of the pages whose basis is evaluated at a step, in (0, 1].
        shortlist_pages: upper bound of the shortlist; never below the budget. None: no bound.
        estimate_tail: "shortlist" (pages that are not read contribute through their basis) or "none".
        max_sparse_query_tokens: longer query chunks are dense; in a chunk all queries share one selection.
        min_context_tokens: contexts below this are dense.
        always_paged: take the paged path even when the budget covers every page, to test paging itself.
        router: name of a router (`oval_core.routers.ROUTERS`), a `Router` of your own, or "auto": `box` on a CPU, where
            reading more pages is quicker than evaluating bases, `basis` elsewhere.
        impl: "auto" or the name of a kernel implementation (`oval_core.kernels.IMPLEMENTATIONS`).
        stats_every: measure the hit rate every n-th decoding step (it costs a dense read); 0: never.
        seed: of the `random` router.

    Raises:
        ValueError, TypeError: naming the field, what is accepted and what came.
    """

    page_size: int = 16
    budget_pages: int | None = None
    budget_ratio: float | None = None
    sink_pages: int = 1
    window_pages: int = 1
    seal_tokens: int = 64
    page_policy: PagePolicy | None = None
    rank: int = 8
    shortlist_ratio: float = 0.35
    shortlist_pages: int | None = 512
    estimate_tail: str = "shortlist"
    max_sparse_query_tokens: int = 64
    min_context_tokens: int = 0
    always_paged: bool = False
    router: str | Router = AUTO
    impl: str = "auto"
    stats_every: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_budget()
        _check("page_size", self.page_size, int, lambda v: v in PAGE_SIZES, f"one of {PAGE_SIZES}")
        _check("rank", self.rank, int, lambda v: v >= 1, "an integer >= 1")
        for name in ("sink_pages", "window_pages", "min_context_tokens", "stats_every", "seed"):
            _check(name, getattr(self, name), int, lambda v: v >= 0, "an integer >= 0")
        _check("shortlist_ratio", self.shortlist_ratio, float, lambda v: 0 < v <= 1, "a number in (0, 1]")
        if self.shortlist_pages is not None:
            _check("shortlist_pages", self.shortlist_pages, int, lambda v: v >= 1, "an integer >= 1 or None")
        _check("estimate_tail", self.estimate_tail, str, lambda v: v in TAIL_ESTIMATES, f"one of {TAIL_ESTIMATES}")
        for name in ("max_sparse_query_tokens", "seal_tokens"):
            _check(name, getattr(self, name), int, lambda v: v >= 1, "an integer >= 1")
        _check("always_paged", self.always_paged, bool, lambda v: True, "True or False")
        self._check_names()

    def _check_budget(self) -> None:
        if self.budget_pages is not None and self.budget_ratio is not None:
            raise ValueError(
                f"give budget_pages or budget_ratio, not both: got budget_pages={self.budget_pages!r}, "
                f"budget_ratio={self.budget_ratio!r}"
            )
        if self.budget_ratio is not None:
            _check("budget_ratio", self.budget_ratio, float, lambda v: 0 < v <= 1, "a number in (0, 1]")
            return
        if self.budget_pages is None and self.router != AUTO:
            object.__setattr__(self, "budget_pages", self._default_budget)
        budget = self._default_budget if self.budget_pages is None else self.budget_pages
        least = self.least_pages if isinstance(self.sink_pages, int) and isinstance(self.window_pages, int) else 1
        expected = f"an integer >= {least} (sink_pages + window_pages + one for the open tokens)"
        _check("budget_pages", budget, int, lambda v: v >= least, expected)

    def _check_names(self) -> None:
        from oval_core.kernels import check_implementation
        from oval_core.page_policy import check_page_policy
        from oval_core.routers import check_router

        check_page_policy(self.page_policy, self.page_size)
        check_router(self.router)
        check_implementation(self.impl)

    def for_device(self, device: torch.device) -> OvalConfig:
        """This config with a router and a budget in place of what "auto" and None stand for on `device`."""
        if self.router != AUTO:
            return self
        return replace(self, router=ROUTER_OF_DEVICE.get(device.type, "basis"))

    @property
    def _default_budget(self) -> int:
        """Of the router; of "auto" the smaller one, which has to be large enough on any device."""
        name = self.router if isinstance(self.router, str) else getattr(self.router, "name", "")
        return BASIS_BUDGET_PAGES if name in ("basis", AUTO) else BUDGET_PAGES

    @property
    def least_pages(self) -> int:
        """Pages that every step reads exactly: sinks, window, and the open tokens, which count as one."""
        return self.sink_pages + self.window_pages + 1

    def budget_for(self, num_pages: int) -> int:
        """Pages read exactly out of `num_pages` sealed pages and the open one, which is included.

        Raises ValueError while router and budget are left to the device, see `for_device`.
        """
        if self.budget_pages is None and self.budget_ratio is None:
            raise ValueError("budget_pages depends on the device: ask config.for_device(device)")
        wanted = self.budget_pages if self.budget_ratio is None else round(self.budget_ratio * (num_pages + 1))
        return min(max(wanted or 0, self.least_pages), num_pages + 1)

    def shortlist_for(self, num_pages: int) -> int:
        """Sealed pages out of `num_pages` whose basis is evaluated; never fewer than the budget reads."""
        wanted = max(1, round(self.shortlist_ratio * num_pages))
        if self.shortlist_pages is not None:
            wanted = min(wanted, self.shortlist_pages)
        return min(max(wanted, self.budget_for(num_pages) - 1), num_pages)


def _check(name: str, value: Any, kind: type, accepted: Callable[[Any], bool], expected: str) -> None:
    """Refuse `value` with an error that names the field, the accepted range and what came."""
    is_number = isinstance(value, int) and kind is float
    is_bool = isinstance(value, bool) and kind is not bool
    if is_bool or not (isinstance(value, kind) or is_number):
        raise TypeError(f"{name} must be {expected}, got {value!r} ({type(value).__name__})")
    if not accepted(value):
        raise ValueError(f"{name} must be {expected}, got {value!r}")
