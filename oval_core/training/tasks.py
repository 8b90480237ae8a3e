"""What can be trained here: a router, and the repair of its input; each leaves a file and its hit rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from oval_core.config import OvalConfig
from oval_core.routers import Router, make_router
from oval_core.routers.learned import LearnedRouter
from oval_core.routers.learned_file import ModelSizes, kind_of
from oval_core.routers.output_head import OutputHeadRouter
from oval_core.routers.position_mlp import PositionMlpRouter
from oval_core.routers.repair import InputRepair, RepairedRouter
from oval_core.training.course import Course
from oval_core.training.hits import require_budget
from oval_core.training.learning import fit_scales
from oval_core.training.passages import PassageSettings, cut_passages, digests
from oval_core.training.quantised import INT8_DYNAMIC, quantised
from oval_core.training.record import Record
from oval_core.training.run import LearningSettings

ROUTERS: dict[str, type[LearnedRouter]] = {kind.name: kind for kind in (PositionMlpRouter, OutputHeadRouter)}
RIVALS = ("random", "window", "quest", "box", "basis", "oracle")
ROUTER_FILE, REPAIR_FILE = "router.safetensors", "repair.safetensors"
RECORD_FILE = "training.json"


def load_router(path: Path) -> LearnedRouter:
    """A learned router of any kind. Raises as `LearnedRouter.load` does."""
    kinds = {kind.head_class.kind: kind for kind in ROUTERS.values()}
    found = kind_of(path)
    if found not in kinds:
        raise ValueError(f"{path}: expected one of {sorted(kinds)}, got {found!r}")
    return kinds[found].load(path)


def train_router(
    out: Path,
    model: Any,
    texts: Mapping[str, Tensor],
    router: str,
    passages: PassageSettings | None = None,
    learning: LearningSettings | None = None,
    lessons: Path | None = None,
) -> dict[str, float]:
    """Train a router, or finish training it, and leave it in `out`; hit rates, its own as `router`.

    Nothing is trained where `out` already holds it; with another budget, its hit rates are measured again. After an
    interruption the same call goes on where it stopped and comes to the same weights.

    Args:
        out: folder for the router, and for the state of the training until then.
        model: not attached, in eval mode; left as it is.
        texts: token ids `[t]` by name.
        router: one of `ROUTERS`.
        passages, learning: default settings if None.
        lessons: folder for what is learned from, which several routers may share; None: in `out`.

    Raises:
        ValueError: no such router, a text is too short, the budget leaves no page out, or a folder holds a training
            with other settings or of another model.
        KeyboardInterrupt: Ctrl-C; what was reached is saved.
    """
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {sorted(ROUTERS)}, got {router!r}")
    course = _course(model, texts, passages, learning)
    source, kind, settings = course.source(), ROUTERS[router], course.learning
    record = Record(out / RECORD_FILE, out / ROUTER_FILE, source | {"router": router} | course.influence())
    if (measured := record.hit_rates(settings.budget_pages)) is not None:
        return measured
    if not record.is_trained:
        made = course.lessons(lessons or out / "lessons", source, settings.coarse)
        head = kind.head_class(ModelSizes.of(model), settings.dim, settings.coarse, course.passages.seed)
        fit_scales(head.to(model.device), made)
        course.train(record, made, kind(head), head)
    asked = {**_rivals(settings.budget_pages), router: kind.load(record.weights)}
    return record.add_hit_rates(settings.budget_pages, course.hit_rates(asked))


def train_repair(
    out: Path,
    model: Any,
    texts: Mapping[str, Tensor],
    router: LearnedRouter,
    how: str = INT8_DYNAMIC,
    passages: PassageSettings | None = None,
    learning: LearningSettings | None = None,
    lessons: Path | None = None,
) -> dict[str, float]:
    """Train a router's input repair on a quantised copy of the model; hit rates of the router on the model as it was
    (`float`), on the copy (`before`) and on the copy with the repair (`after`).

    Args:
        out: folder for the repair, and for the state of the training until then.
        model: the one that the router was trained for.
        texts, passages, learning: see `train_router`.
        router: stays as it is.
        how: one of `oval_core.training.quantised.KINDS`.
        lessons: folder for what is learned from, which repairs on the same quantised model may share; None: in `out`.

    Raises: as `train_router` and `quantised` do.
    """
    router.head.require_model(model)
    course = _course(model, texts, passages, learning)
    source, head, budget = (
        course.source() | {"quantised": how},
        router.head.to(model.device),
        course.learning.budget_pages,
    )
    of_router = {"repaired": router.name, "router_weights": digests(head.state_dict())}
    record = Record(out / RECORD_FILE, out / REPAIR_FILE, source | of_router | course.influence())
    if (measured := record.hit_rates(budget)) is not None:
        return measured
    on_copy = dataclasses.replace(course, model=quantised(model, how))
    if not record.is_trained:
        made = on_copy.lessons(lessons or out / "lessons", source, head.gate is not None)
        repair = InputRepair(head.sizes, seed=course.passages.seed).to(model.device)
        on_copy.train(record, made, RepairedRouter(router, repair), head, repair)
    both = {"before": router, "after": RepairedRouter.load(router, record.weights)}
    return record.add_hit_rates(budget, course.hit_rates({"float": router}) | on_copy.hit_rates(both))


def _course(
    model: Any, texts: Mapping[str, Tensor], passages: PassageSettings | None, learning: LearningSettings | None
) -> Course:
    """Checked before anything is read."""
    course = Course(model, texts, passages or PassageSettings(), learning or LearningSettings())
    require_budget(course.passages, course.learning.budget_pages)
    cut_passages(texts, course.passages)
    return course


def _rivals(budget_pages: int) -> dict[str, Router]:
    configs = (OvalConfig(router=name, budget_pages=budget_pages, estimate_tail="none") for name in RIVALS)
    return {name: make_router(config) for name, config in zip(RIVALS, configs, strict=True)}
