"""What can be trained here: a router, and the repair of its input; each leaves a file and its hit rates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from oval_core.config import OvalConfig
from oval_core.router_training.hits import hit_rates
from oval_core.router_training.learning import fit_scales
from oval_core.router_training.lessons import make_lessons
from oval_core.router_training.passages import PassageSettings, cut_passages, digests
from oval_core.router_training.quantised import INT8_DYNAMIC, quantised
from oval_core.router_training.run import LearningSettings, Run
from oval_core.routers import Router, make_router
from oval_core.routers.learned import LearnedRouter
from oval_core.routers.learned_file import LearnedModule, ModelSizes, kind_of, save_learned
from oval_core.routers.output_head import OutputHeadRouter
from oval_core.routers.position_mlp import PositionMlpRouter
from oval_core.routers.repair import InputRepair, RepairedRouter
from oval_core.training_state import Content, StateFile, require_same, write_whole

ROUTERS: dict[str, type[LearnedRouter]] = {kind.name: kind for kind in (PositionMlpRouter, OutputHeadRouter)}
RIVALS = ("random", "window", "quest", "box", "basis", "oracle")
ROUTER_FILE, REPAIR_FILE = "router.safetensors", "repair.safetensors"
RECORD_FILE, STATE_FILE = "training.json", "training.pt"


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

    Nothing is trained where `out` already holds it. After an interruption the same call goes on where it stopped and
    comes to the same weights.

    Args:
        out: folder for the router, and for the state of the training until then.
        model: not attached, in eval mode; left as it is.
        texts: token ids `[t]` by name.
        router: one of `ROUTERS`.
        passages, learning: default settings if None.
        lessons: folder for what is learned from, which several routers may share; None: in `out`.

    Raises:
        ValueError: no such router, a text is too short, or a folder holds a training with other settings.
        KeyboardInterrupt: Ctrl-C; what was reached is saved.
    """
    if router not in ROUTERS:
        raise ValueError(f"router must be one of {sorted(ROUTERS)}, got {router!r}")
    passages, learning = passages or PassageSettings(), learning or LearningSettings()
    kind: Any = ROUTERS[router]
    head = kind.head_class(ModelSizes.of(model), learning.dim, learning.coarse, passages.seed).to(model.device)
    about = _source(model, texts, passages) | {"router": router, **dataclasses.asdict(learning)}
    if (measured := _finished(out, about)) is not None:
        return measured
    learned, held_out = cut_passages(texts, passages)
    made = make_lessons(lessons or out / "lessons", model, learned, passages, _source(model, texts, passages))
    fit_scales(head, made)
    run = Run(head, None, learning, passages.seed, StateFile(out / STATE_FILE, about))
    run.through(made)
    measured = hit_rates(model, held_out, {**_rivals(learning), router: kind(head)}, passages, learning.budget_pages)
    return _finish(out, run, ROUTER_FILE, measured)


def train_repair(
    out: Path,
    model: Any,
    texts: Mapping[str, Tensor],
    router: LearnedRouter,
    how: str = INT8_DYNAMIC,
    passages: PassageSettings | None = None,
    learning: LearningSettings | None = None,
) -> dict[str, float]:
    """Train a router's input repair on a quantised copy of the model; hit rates of the router on the model as it was
    (`float`), on the copy (`before`) and on the copy with the repair (`after`).

    Args:
        out: folder for the repair, and for the state of the training until then.
        model: the one that the router was trained for.
        texts, passages, learning: see `train_router`.
        router: stays as it is.
        how: one of `oval_core.router_training.quantised.KINDS`.

    Raises: as `train_router` and `quantised` do.
    """
    passages, learning = passages or PassageSettings(), learning or LearningSettings()
    router.head.require_model(model)
    source = _source(model, texts, passages) | {"quantised": how}
    about = source | {"repaired": router.name, "weights": _digest(router.head), **dataclasses.asdict(learning)}
    if (measured := _finished(out, about)) is not None:
        return measured
    copy, (learned, held_out) = quantised(model, how), cut_passages(texts, passages)
    repair = InputRepair(router.head.sizes, seed=passages.seed).to(model.device)
    run = Run(router.head.to(model.device), repair, learning, passages.seed, StateFile(out / STATE_FILE, about))
    run.through(make_lessons(out / "lessons", copy, learned, passages, source))
    both = {"before": router, "after": RepairedRouter(router, repair)}
    measured = hit_rates(model, held_out, {"float": router}, passages, learning.budget_pages)
    measured |= hit_rates(copy, held_out, both, passages, learning.budget_pages)
    return _finish(out, run, REPAIR_FILE, measured)


def _rivals(learning: LearningSettings) -> dict[str, Router]:
    configs = (OvalConfig(router=name, budget_pages=learning.budget_pages, estimate_tail="none") for name in RIVALS)
    return {name: make_router(config) for name, config in zip(RIVALS, configs, strict=True)}


def _source(model: Any, texts: Mapping[str, Tensor], passages: PassageSettings) -> Content:
    """What decides which lessons there are; a folder counts by its name."""
    name = model.config.name_or_path or ""
    name = Path(name).name if Path(name).is_dir() else name
    sizes = dataclasses.asdict(ModelSizes.of(model))
    return {"model": name, "sizes": sizes, "texts": digests(texts), **dataclasses.asdict(passages)}


def _digest(module: LearnedModule) -> dict[str, str]:
    return digests({name: tensor.cpu() for name, tensor in module.state_dict().items()})


def _finished(out: Path, about: Content) -> dict[str, float] | None:
    """What was measured, if `out` holds the finished training."""
    record = out / RECORD_FILE
    if not record.exists():
        return None
    found = json.loads(record.read_text())
    require_same(about, found["about"], out)
    measured: dict[str, float] = found["hit_rates"]
    return measured


def _finish(out: Path, run: Run, file: str, measured: dict[str, float]) -> dict[str, float]:
    """Leave what was trained and a record beside each other, and no state."""
    save_learned(out / file, run.trained)
    content = {"about": run.state.about, "train_s": run.seconds, "hit_rates": measured}
    write_whole(out / RECORD_FILE, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    run.state.remove()
    return measured
