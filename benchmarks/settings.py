"""Which ways of reading the cache `benchmarks.quality` compares."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import torch

from benchmarks.variants import make_variant
from oval_core import OvalConfig
from oval_core.basis import PageBasis
from oval_core.routers import make_router

BYTES_PER_ELEMENT = 2  # bfloat16
SHARES = (0.12, 0.16, 0.20)


@dataclass(frozen=True)
class Setting:
    """One way to read the cache."""

    router: str
    page_size: int
    budget_pages: int
    rank: int = 8
    shortlist_ratio: float = 0.35
    estimate_tail: str = "shortlist"

    @property
    def page_tokens(self) -> int:
        """Tokens of a page, on average."""
        return self.page_size

    def config(self) -> OvalConfig:
        """The setting as a config."""
        chosen = {**asdict(self), "router": make_variant(self.router)}
        return OvalConfig(**chosen, stats_every=32)

    def metadata_bytes(self, context: int, head_dim: int) -> int:
        """Bytes of metadata that one KV head reads at one step."""
        config, pages = self.config(), context // self.page_tokens
        router = make_router(config)
        dims, device = (head_dim, head_dim), torch.device("cpu")
        rank = self.rank if router.needs_bases else 0
        basis = PageBasis.empty(1, 1, self.page_size, rank, dims, device)
        features = router.page_features(torch.zeros(1, 1, 0, self.page_size, head_dim, dtype=torch.bfloat16), None)
        return router.metadata_bytes(pages, config.shortlist_for(pages), basis, features)


SomeSetting = TypeVar("SomeSetting", bound=Setting)


def frontier() -> list[Setting]:
    """From few to many pages, to draw quality against bytes and against time."""
    return [
        *(Setting("basis", 16, budget) for budget in (12, 18, 24, 32, 48, 96)),
        *(Setting("box", 16, budget) for budget in (24, 36, 48, 72, 96, 128)),
        *(Setting(router, 16, 48) for router in ("quest", "mean")),
        *(Setting("oracle", 16, budget) for budget in (24, 48)),
        *(Setting(router, 16, 48) for router in ("window", "random")),
    ]


def equal_bytes(context: int, head_dim: int) -> list[tuple[float, Setting]]:
    """OVAL and its rivals, each with as many pages as a share of the dense bytes pays for."""
    kinds = [Setting("basis", 16, 3)]
    kinds += [Setting(router, size, 3) for router in ("box", "quest int8") for size in (8, 16, 32)]
    kinds += [Setting(router, 16, 3) for router in ("mean", "window", "oracle")]
    return [(share, paid_for(kind, share, context, head_dim)) for share in SHARES for kind in kinds]


def page_sizes(context: int, head_dim: int) -> list[tuple[float, Setting]]:
    """Pages of several sizes, each with as many as a share of the dense bytes pays for."""
    kinds = [Setting(router, size, 3) for router in ("basis", "box") for size in (8, 16, 32)]
    return [(share, paid_for(kind, share, context, head_dim)) for share in (0.16, 0.20, 0.30) for kind in kinds]


def ablations() -> list[Setting]:
    """One choice changed at a time."""
    basis, box = Setting("basis", 16, 32), Setting("box", 16, 96)
    return [
        basis,
        *(replace(basis, rank=rank) for rank in (4, 12)),
        *(replace(basis, shortlist_ratio=ratio) for ratio in (0.25, 0.5)),
        *(replace(basis, page_size=size, budget_pages=512 // size) for size in (8, 32)),
        replace(basis, estimate_tail="none"),
        box,
        *(replace(box, page_size=size, budget_pages=1536 // size) for size in (8, 32)),
        *(replace(box, router=router) for router in ("box every 2", "box every 4")),
        *(replace(box, router=router) for router in ("box to 80%", "box to 90%", "box to 95%")),
    ]


def quick() -> list[Setting]:
    """For a smoke test."""
    return [Setting(router, 16, 12) for router in ("basis", "box", "random")]


def paid_for(setting: SomeSetting, share: float, context: int, head_dim: int) -> SomeSetting:
    """`setting` with the largest budget whose bytes are at most `share` of the dense ones."""
    token_bytes = 2 * head_dim * BYTES_PER_ELEMENT
    budget = setting.budget_pages
    while True:
        more = replace(setting, budget_pages=budget + 1)
        needed = (budget + 1) * setting.page_tokens * token_bytes + more.metadata_bytes(context, head_dim)
        if needed > share * context * token_bytes:
            return replace(setting, budget_pages=budget)
        budget += 1
