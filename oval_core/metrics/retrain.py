"""Train a router anew on the newest tokens, once the hit rate stayed low.

retrainer, watch = Retrainer("routers"), Watch(handle)  # or `collector.watch`
watch.on_low_hit_rate(0.85, 10, retrainer)
model.generate(**inputs)  # asks for a training, if that is due: a model that generates cannot be trained on
handle = retrainer.retrain(watch)  # does it, between two generations; minutes for a small model on a CPU
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from oval_core.attach import Handle, attach
from oval_core.config import OvalConfig
from oval_core.metrics.watch import Watch
from oval_core.routers import Router, make_router
from oval_core.training.hits import hit_rates
from oval_core.training.passages import PassageSettings, cut_passages
from oval_core.training.run import LearningSettings
from oval_core.training.tasks import ROUTER_FILE, ROUTERS, load_router, train_router

logger = logging.getLogger(__name__)

PASSAGES, STOPS, ASKED_TOKENS = 4, 4, 16
PARTS = 3  # of the tokens; the last one is held out, passages are as long
LEARNING = LearningSettings(steps=200, coarse=True)  # so few tokens teach little: start from the training-free score


class Retrainer:
    """A callback for `Watch.on_low_hit_rate` that remembers the tokens it gets, and the training on them.

    Args:
        out: folder; every training leaves its router and a record in a new folder of it.
        router: which kind to train, one of `oval_core.training.tasks.ROUTERS`.
        learning: how; its `budget_pages` is replaced by one that reads as large a share of the pages as was read.

    Raises:
        ValueError: there is no such router.

    Attributes:
        tokens: what the next training learns from, int64 `[B, n]`; None: no training is due.
        hit_rates: of the last training, on held-out tokens: "before" and "after" it.
    """

    def __init__(self, out: Path | str, router: str = "output-head", learning: LearningSettings = LEARNING) -> None:
        if router not in ROUTERS:
            raise ValueError(f"router must be one of {sorted(ROUTERS)}, got {router!r}")
        self.out, self.router, self.learning = Path(out), router, learning
        self.tokens: Tensor | None = None
        self.hit_rates: dict[str, float] = {}

    def __call__(self, tokens: Tensor) -> None:
        """Ask for a training on `tokens [B, n]`, in place of one that was asked for and not done."""
        self.tokens = tokens

    def retrain(self, watch: Watch) -> Handle:
        """Train, if that is due, and attach the model again with the new router, if it finds more than the old one.

        The model must not be generating. Works in any grad and inference mode.

        Args:
            watch: of the model; it follows the new handle, with its alarms.

        Returns: the handle in use; the old one is detached, if there was a training.

        Raises:
            ValueError: too few tokens. The model is attached as before then.
        """
        handle = watch.handle
        if self.tokens is None:
            return handle
        tokens, self.tokens = self.tokens, None
        share = _share_read(handle)
        config = handle.config
        watch.close()
        handle.detach()
        try:
            with torch.inference_mode(False):
                router = self._trained(handle, tokens.clone(), share)
            config = config if router is None else dataclasses.replace(config, router=router)
        finally:
            handle = attach(handle.model, config)
            watch.follow(handle)
        return handle

    def _trained(self, handle: Handle, tokens: Tensor, share: float) -> Router | None:
        """A router that finds more than the one of `handle`, which is detached; None if it does not."""
        model, config = handle.model, handle.config
        passages, budget = fitting(tokens.shape[1], config.page_size, share)
        rows = {f"row {number}": row for number, row in enumerate(tokens.unique(dim=0))}  # beams are much alike
        learning, out = dataclasses.replace(self.learning, budget_pages=budget), _new_folder(self.out)
        with TemporaryDirectory() as lessons:
            train_router(out, model, rows, self.router, passages, learning, Path(lessons))
        both = {"before": make_router(config), "after": load_router(out / ROUTER_FILE)}
        self.hit_rates = hit_rates(model, cut_passages(rows, passages)[1], both, passages, budget)
        logger.info("a router was trained on %d tokens; hit rates: %s", tokens.numel(), self.hit_rates)
        return both["after"] if self.hit_rates["after"] > self.hit_rates["before"] else None


def fitting(tokens: int, page_size: int, share: float) -> tuple[PassageSettings, int]:
    """Passages that fit into so many tokens, and a budget in pages that reads a share of one, and one page at least
    beside those that are always read.

    Raises:
        ValueError: there are too few tokens for any budget to leave a page out.
    """
    context, least = tokens // PARTS, OvalConfig(router="box").least_pages + 1
    every = context // STOPS
    asked = max(1, min(ASKED_TOKENS, (every - 1) // 2))
    pages = (context - asked) // page_size
    if pages < least or every <= 2 * asked:
        wanted = PARTS * (least * page_size + ASKED_TOKENS)
        raise ValueError(f"expected {wanted} tokens or more to train a router on, pages of {page_size}, got {tokens}")
    settings = PassageSettings(PASSAGES, context, every, asked, page_size=page_size)
    return settings, max(least, min(round(share * pages), pages))


def _share_read(handle: Handle) -> float:
    """Share of the pages that a step of the last generation read."""
    stats = handle.stats()
    return stats["pages_read_mean"] / stats["pages"] if stats["pages"] else 0.0


def _new_folder(parent: Path) -> Path:
    """The first that is not there of `parent`/0, 1, ..."""
    number = 0
    while (parent / str(number)).exists():
        number += 1
    return parent / str(number)
