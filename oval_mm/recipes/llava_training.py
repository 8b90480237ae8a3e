"""Train the tiny LLaVA, stage after stage."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from oval_core.training.state import (
    Content,
    StateFile,
    interrupts_wait,
    make_accelerator,
    require_same,
    share_of_rate,
    write_whole,
)
from oval_mm.recipes.answering import accuracy, answers_in
from oval_mm.recipes.llava_batches import Batch, Pack, packs
from oval_mm.recipes.llava_plan import LANGUAGE, PROJECTOR, Seen, Stage, StepBatches, batch_of
from oval_mm.recipes.muon import advance, make_optimizers, restore
from oval_mm.recipes.question_packing import packed_outputs, symbol_features
from oval_mm.recipes.tiny_llava import save_llava

REPORTS, HELD_OUT_PACKS = 10, 12  # reports a stage, packs a source that they are measured on
RECORD_FILE, STATE_FILE = "training.json", "training.pt"

Accuracies = dict[str, dict[str, float]]  # by source and kind of question
Optimizers = Sequence[torch.optim.Optimizer]


def train_llava(
    out: Path,
    model: Any,
    processor: Any,
    plan: Sequence[Stage],
    seed: int = 0,
    *,
    stages: Sequence[str] | None = None,
    held_out_packs: int = HELD_OUT_PACKS,
) -> None:
    """Train a LLaVA, or go on with that, and leave it in `out` when the last stage of the plan is done.

    Nothing is done where `out` already holds it. After an interruption the same call goes on where it stopped and comes
    to the same weights.

    Args:
        out: folder for the finished model, and for the state of the training until then.
        model: a `LlavaForConditionalGeneration` to begin with; trained in place.
        processor: its `LlavaProcessor`.
        plan: all stages; they have their order from here.
        seed: of what is drawn.
        stages: names of those to do now, default all.
        held_out_packs: from every source, to report the accuracy on.

    Raises:
        ValueError: `out` holds a training with other settings, or a stage is wanted whose predecessor is not done.
        KeyboardInterrupt: Ctrl-C; what was reached is saved.
    """
    about = _about(model, plan, seed)
    record = out / RECORD_FILE
    if record.exists():
        require_same(about, json.loads(record.read_text())["about"], out)
        return
    run = _Run(model, processor, StateFile(out / STATE_FILE, about))
    wanted = [stage.name for stage in plan] if stages is None else list(stages)
    found: Accuracies = {}
    for stage in plan[run.stages_done :]:
        if stage.name not in wanted:
            if any(later.name in wanted for later in plan[run.stages_done :]):
                raise ValueError(f"stages {wanted} can only follow stage {stage.name!r}, which is not done in {out}")
            return
        found = run.through(stage, StepBatches(stage, processor, seed), held_out_packs)
    save_llava(model, processor, out)
    content = {"about": about, "validation": found}
    write_whole(record, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
    run.state.remove()


def _about(model: Any, plan: Sequence[Stage], seed: int) -> dict[str, Any]:
    """What must be the same to go on, as JSON has it."""
    features = (model.config.vision_feature_layer, model.config.vision_feature_select_strategy)
    settings = {"seed": seed, "features": features} | {stage.name: dataclasses.asdict(stage) for stage in plan}
    content: dict[str, Any] = json.loads(json.dumps(settings))
    return content


class _Run:
    """A model on its way, and what is needed to go on with it."""

    def __init__(self, model: Any, processor: Any, state: StateFile) -> None:
        self.accelerator = make_accelerator()
        self.model, self.processor, self.state = model.to(self.accelerator.device), processor, state
        self.stages_done, self.step = 0, 0
        self.saved = state.load()
        if self.saved:
            self.stages_done, self.step = self.saved["stages_done"], self.saved["step"]
            model.load_state_dict(self.saved["model"])

    def through(self, stage: Stage, batches: StepBatches, held_out_packs: int) -> Accuracies:
        """Take all steps of a stage that are left; the accuracy after the last."""
        optimizers = make_optimizers(trained_parts(self.model, stage))
        if self.saved and self.step:
            restore(optimizers, self.saved["optimizers"])
        self.saved = None
        held_out = held_out_of(stage, batches.size_px, held_out_packs)
        self._take_steps(stage, optimizers, batches, held_out)
        self.stages_done, self.step = self.stages_done + 1, 0
        self.state.save(self._content([]))
        found = self._measure(stage, held_out)
        print(f"{stage.name} done: {_shown(found)}")
        return found

    def _take_steps(
        self, stage: Stage, optimizers: Optimizers, batches: StepBatches, held_out: dict[str, list[Pack]]
    ) -> None:
        loader = DataLoader(batches, batch_size=None, sampler=range(self.step, stage.steps))
        bar = tqdm(total=stage.steps, initial=self.step, desc=stage.name, unit="step")
        with bar, interrupts_wait() as interrupted:
            for batch in loader:
                loss = self._advance(stage, optimizers, batch)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                if self.step % math.ceil(stage.steps / REPORTS) == 0 and self.step < stage.steps:
                    found = _shown(self._measure(stage, held_out))
                    bar.write(f"{stage.name} step {self.step}: loss {loss:.3f}; {found}")
                self.state.after_step(partial(self._content, optimizers), interrupted())

    def _advance(self, stage: Stage, optimizers: Optimizers, batches: Sequence[Batch]) -> float:
        """One step; its loss: the mean over the tokens of all answers, or over all images."""
        total, loss = sum(batch.packed.answer_tokens for batch in batches), 0.0
        for batch in (one.to(self.accelerator.device) for one in batches):
            with self.accelerator.autocast():
                if stage.seen == "both":
                    part = distance(self.model, batch) / len(batches)
                else:
                    part = packed_outputs(self.model, *batch, num_items_in_batch=total).loss
            self.accelerator.backward(part)
            loss += part.item()
        advance(optimizers, share_of_rate(self.step, stage.steps))
        self.step += 1
        return loss

    def _measure(self, stage: Stage, held_out: dict[str, list[Pack]]) -> Accuracies:
        phase = stage.phases[-1]
        seen: Seen = "symbols" if stage.seen == "symbols" else "images"
        whole = dataclasses.replace(phase, objects=1.0, background=1.0 if seen == "images" else phase.background)
        rng = random.Random(0)

        def make(some: Sequence[Pack]) -> Batch:
            return batch_of(seen, some, self.processor, whole, rng)

        with self.accelerator.autocast():
            return {
                source: accuracy(answers_in(self.model, self.processor, some, make))
                for source, some in held_out.items()
            }

    def _content(self, optimizers: Optimizers) -> Content:
        content = {"stages_done": self.stages_done, "step": self.step, "model": self.model.state_dict()}
        return content | {"optimizers": [optimizer.state_dict() for optimizer in optimizers]}


def distance(model: Any, batch: Batch) -> Tensor:
    """Scalar: the mean squared difference between features and symbols of what is shown, over that of symbols to 0."""
    assert batch.pixels is not None
    assert batch.symbols is not None
    seen = torch.stack([*model.get_image_features(batch.pixels).pooler_output])
    said = symbol_features(model, batch.symbols)
    if batch.shown is not None:
        seen, said = seen[batch.shown], said[batch.shown]
    return (seen - said).square().mean() / said.square().mean()


def trained_parts(model: Any, stage: Stage) -> list[tuple[float, dict[str, nn.Parameter]]]:
    """The learning rates and parameters, by name, of what the stage trains. All other weights are frozen."""
    model.requires_grad_(False)
    parts = []
    for part, rate in stage.rates.items():
        parameters = dict(_module(model, part).named_parameters())
        for parameter in parameters.values():
            parameter.requires_grad_()
        parts.append((rate, parameters))
    return parts


def _module(model: Any, part: str) -> nn.Module:
    inner = model.model
    # The head's weights are those of the embedding.
    return {PROJECTOR: inner.multi_modal_projector, LANGUAGE: inner.language_model}[part]


def held_out_of(stage: Stage, size_px: int, count: int) -> dict[str, list[Pack]]:
    """Packs of the validation split to measure a stage on, by source."""
    return {source: [*itertools.islice(packs(source, "validation", size_px), count)] for source in stage.sources}


def _shown(found: Accuracies) -> str:
    lines = (
        f"{source}: " + ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(shares.items()))
        for source, shares in found.items()
    )
    return "held out " + "; ".join(lines)
