"""The optional parts that `benchmarks.routers` compares with the routers that need no training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.page_sizes import FIXED, MOST_TOKENS
from benchmarks.settings import Setting
from benchmarks.variants import make_variant
from oval_core import OvalConfig
from oval_core.page_sizing import SelfSizedPages
from oval_core.router_training.tasks import RECORD_FILE, ROUTER_FILE, ROUTERS, load_router
from oval_core.routers import Router

PAGE_SIZE, LEAST_BUDGET = 16, 3
HIT_RATE_EVERY = 5  # steps: not in time with the selection cache, which selects at every fourth at least
DEFAULTS = ("basis", "box")
LOCALITY = ("basis + decay 0.25", "basis + decay 0.5", "basis + graph 0.25", "basis + graph 0.5")
SELECTION_CACHE = ("basis reused 0.9", "basis reused 0.8", "basis reused -1.0")
REPAIRS = "-repair"  # what the folder of a router's repair ends in


@dataclass(frozen=True)
class Part(Setting):
    """A setting, and what its names alone do not say.

    Attributes:
        impl: see `OvalConfig`; "reference" shows what a router costs that does not run as compiled code.
        policy: who cuts pages; None: they are all full.
        made: the router where its name alone does not make it.
        train_s: seconds that its training took; None: it has none.
    """

    impl: str = "auto"
    policy: SelfSizedPages | None = None
    made: Router | None = None
    train_s: float | None = None

    @property
    def page_tokens(self) -> int:
        """See `Setting.page_tokens`."""
        return self.page_size if self.policy is None else self.policy.mean_tokens

    @property
    def pages(self) -> str:
        """Tokens a page, for a table."""
        return str(self.page_size) if self.policy is None else f"self-sized, mean {self.page_tokens}"

    def config(self, stats_every: int = HIT_RATE_EVERY) -> OvalConfig:
        """See `Setting.config`."""
        chosen: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(Setting)}
        chosen |= {"router": self.made or make_variant(self.router), "page_policy": self.policy, "impl": self.impl}
        return OvalConfig(**chosen, always_paged=True, stats_every=stats_every)


@dataclass(frozen=True)
class Repair:
    """What the training of an input repair measured: hit rates of a router, on a quantised model before and after."""

    router: str
    quantised: str
    hit_rates: dict[str, float]
    train_s: float | None


def untrained() -> list[Part]:
    """The default routers, compiled and not; locality and the selection cache around one; other pages under both."""
    names = (*DEFAULTS, *LOCALITY, *SELECTION_CACHE)
    parts = [Part(name, PAGE_SIZE, LEAST_BUDGET) for name in names]
    parts += [Part(name, PAGE_SIZE, LEAST_BUDGET, impl="reference") for name in DEFAULTS]
    for name in DEFAULTS:
        parts += [Part(name, size, LEAST_BUDGET) for size in FIXED if size != PAGE_SIZE]
        parts += [Part(name, MOST_TOKENS, LEAST_BUDGET, policy=SelfSizedPages())]
    return parts


def learned(folder: Path, model: Any) -> list[Part]:
    """The routers that `oval_core.training` left in folders of their names under `folder`.

    Raises:
        ValueError: a file is no router, or made for another model than `model`.
    """
    parts = []
    for name, record in _records(folder, ""):
        router = load_router(folder / name / ROUTER_FILE)
        router.head.require_model(model)
        parts.append(Part(name, PAGE_SIZE, LEAST_BUDGET, made=router, train_s=record.get("train_s")))
    return parts


def repairs(folder: Path) -> list[Repair]:
    """The repairs of these routers, in folders that end in `REPAIRS`."""
    return [
        Repair(name, record["about"]["quantised"], record["hit_rates"], record.get("train_s"))
        for name, record in _records(folder, REPAIRS)
    ]


def missing(folder: Path) -> list[str]:
    """Folders that a router or its repair would be in, and is not."""
    names = [name + ending for ending in ("", REPAIRS) for name in ROUTERS]
    return [str(folder / name) for name in names if not (folder / name / RECORD_FILE).exists()]


def _records(folder: Path, ending: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ROUTERS:
        path = folder / f"{name}{ending}" / RECORD_FILE
        if path.exists():
            yield name, json.loads(path.read_text())
