"""The optional parts that `benchmarks.routers` compares with the routers that need no training."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from benchmarks.page_sizes import FIXED, MOST_TOKENS
from benchmarks.settings import Setting
from benchmarks.variants import GRAPH_EVERY, LEAST_COSINES, LOCALITY_WEIGHTS, REUSED_LONG, make_variant
from oval_core import OvalConfig
from oval_core.page_sizing import ByScore, SelfSizedPages, SizingHead, entropy, spread
from oval_core.page_sizing.training import record_of
from oval_core.routers.learned import LearnedRouter
from oval_core.training.tasks import RECORD_FILE, REPAIR_FILE, ROUTER_FILE, load_router

PAGE_SIZE, LEAST_BUDGET = 16, 3
SIZING_FILE = "sizing.safetensors"
DEFAULTS = ("basis", "box")
LOCALITY = tuple(f"basis + decay {weight}" for weight in LOCALITY_WEIGHTS) + tuple(
    f"basis + graph {weight}, every {GRAPH_EVERY}" for weight in LOCALITY_WEIGHTS
)
SELECTION_CACHE = (*(f"basis reused {cosine}" for cosine in LEAST_COSINES), REUSED_LONG)
LEARNED_ON = ("passages", "context_tokens", "asked_tokens", "steps", "batch", "budget_pages")  # of a training's record


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
    made: LearnedRouter | None = None
    train_s: float | None = None

    @property
    def page_tokens(self) -> int:
        """See `Setting.page_tokens`."""
        return self.page_size if self.policy is None else self.policy.mean_tokens

    @property
    def pages(self) -> str:
        """Tokens a page, for a table."""
        if self.policy is None:
            return str(self.page_size)
        by = self.policy.weigh.score if isinstance(self.policy.weigh, ByScore) else "head"
        return f"self-sized by {by}, mean {self.page_tokens}"

    def weights_ratio(self, context: int) -> float | None:
        """Weights of a trained head over the numbers in a dense cache, of one layer; None: it has none."""
        if self.made is None:
            return None
        head = self.made.head
        weights = sum(tensor.numel() for tensor in head.state_dict().values()) / head.sizes.layers
        return float(weights / (2 * context * head.sizes.heads * head.sizes.head_dim))

    def config(self, stats_every: int = 1) -> OvalConfig:
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
        parts += [Part(name, MOST_TOKENS, LEAST_BUDGET, policy=SelfSizedPages(way)) for way in (spread, entropy)]
    return parts


def learned(folder: Path, model: Any) -> list[Part]:
    """The routers that trainings of `oval_core.training` left in folders of `folder`, and the default routers over
    pages that are sized by the heads which `oval_core.page_sizing.training` left there.

    Raises:
        ValueError: there is none, or one was made for another model than `model`.
    """
    parts = []
    for path, record in _records(folder, ROUTER_FILE):
        router = load_router(path)
        router.head.require_model(model)
        name = f"{router.name} + coarse" if record["about"]["coarse"] else router.name
        parts.append(Part(name, PAGE_SIZE, LEAST_BUDGET, made=router, train_s=record["train_s"]))
    for path in sorted(folder.glob(f"*/{SIZING_FILE}")):
        record = json.loads(record_of(path).read_text())
        policy, train_s = SelfSizedPages(SizingHead.load(path), record["mean_tokens"]), record["train_s"]
        parts += [Part(name, MOST_TOKENS, LEAST_BUDGET, policy=policy, train_s=train_s) for name in DEFAULTS]
    if not parts:
        raise ValueError(
            f"{folder}: expected folders with a {ROUTER_FILE} of `oval_core.training` or a {SIZING_FILE} of "
            "`oval_core.page_sizing.training`, found none"
        )
    return parts


def repairs(folder: Path) -> list[Repair]:
    """The repairs that trainings left in folders of `folder`."""
    return [
        Repair(record["about"]["repaired"], record["about"]["quantised"], record["hit_rates"], record["train_s"])
        for _, record in _records(folder, REPAIR_FILE)
    ]


def learned_on(folder: Path) -> list[dict[str, Any]]:
    """What the routers in folders of `folder` learned from and how long, each way once."""
    found = [
        {name: record["about"][name] for name in LEARNED_ON}
        for file in (ROUTER_FILE, REPAIR_FILE)
        for _, record in _records(folder, file)
    ]
    return [settings for at, settings in enumerate(found) if settings not in found[:at]]


def _records(folder: Path, file: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every file of this name, one folder down, and the record beside it."""
    for path in sorted(folder.glob(f"*/{file}")):
        yield path, json.loads(path.with_name(RECORD_FILE).read_text())
