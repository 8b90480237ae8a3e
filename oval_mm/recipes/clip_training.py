"""Train the tiny CLIP: images against captions, and parts of images against words."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader
from tqdm import tqdm

from oval_core.training.state import (
    Content,
    StateFile,
    ignore_interrupts,
    interrupts_wait,
    make_accelerator,
    require_same,
    share_of_rate,
    write_whole,
)
from oval_mm.recipes.clip_accuracy import ClipAccuracy, HeldOut
from oval_mm.recipes.clip_batches import ClipBatch, ClipBatches
from oval_mm.recipes.muon import advance, make_optimizers, restore
from oval_mm.recipes.tiny_clip import (
    SHIPPED,
    ClipSizes,
    as_pixels,
    build_clip,
    image_embeddings,
    load_clip,
    save_clip,
    word_embeddings,
)

STEPS, BATCH = 700, 64
LEARNING_RATE = 3e-3
LARGEST_SCALE = math.log(100)
HELD_OUT_SCENES, REPORT_EVERY = 256, 100
RECORD_FILE, STATE_FILE = "training.json", "training.pt"


def train_clip(
    out: Path,
    steps: int = STEPS,
    seed: int = 0,
    *,
    sizes: ClipSizes = SHIPPED,
    batch: int = BATCH,
    held_out_scenes: int = HELD_OUT_SCENES,
    workers: int = 1,
) -> ClipAccuracy:
    """Train a CLIP, or finish training it, and leave it in `out` in open_clip's format; return its accuracy.

    Nothing is done where `out` already holds it. After an interruption the same call goes on where it stopped and comes
    to the same weights. `batch` images a step are drawn by `workers` processes (0: by this one).

    Raises:
        ValueError: `steps` or `batch` too small, or `out` holds a training with other settings.
        ImportError: the package `easy-vqa` is not installed.
        KeyboardInterrupt: Ctrl-C; what was reached is saved.
    """
    if steps < 1 or batch < 2:
        raise ValueError(f"steps must be at least 1 and batch at least 2, got steps={steps}, batch={batch}")
    about = {"steps": steps, "seed": seed, "batch": batch, **dataclasses.asdict(sizes)}
    record = out / RECORD_FILE
    if record.exists():
        found = json.loads(record.read_text())
        require_same(about, found["about"], out)
        return ClipAccuracy(**found["accuracy"])
    state, held_out = StateFile(out / STATE_FILE, about), HeldOut(sizes, held_out_scenes)
    run = _Run(sizes, steps, seed, state)
    batches = DataLoader(
        ClipBatches(sizes, batch, seed),
        batch_size=None,
        sampler=range(run.step, steps),
        num_workers=workers,
        worker_init_fn=ignore_interrupts,
    )
    run.through(batches, held_out)
    save_clip(run.model, sizes, out)
    accuracy = held_out.measure(load_clip(out)[0])
    content = {"about": about, "accuracy": dataclasses.asdict(accuracy)}
    write_whole(record, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))
    state.remove()
    print(f"CLIP after {steps} steps: {accuracy}")
    return accuracy


class _Run:
    """A model on its way, and what is needed to go on with it."""

    def __init__(self, sizes: ClipSizes, steps: int, seed: int, state: StateFile) -> None:
        self.steps, self.step, self.state = steps, 0, state
        self.accelerator = make_accelerator()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.model = build_clip(sizes).to(self.accelerator.device)
        self.optimizers = make_optimizers([(LEARNING_RATE, dict(self.model.named_parameters()))])
        saved = state.load()
        if saved:
            self.step = saved["step"]
            self.model.load_state_dict(saved["model"])
            restore(self.optimizers, saved["optimizers"])

    def through(self, batches: DataLoader[ClipBatch], held_out: HeldOut) -> None:
        """Take all steps that are left."""
        bar = tqdm(total=self.steps, initial=self.step, desc="CLIP", unit="step")
        with bar, interrupts_wait() as interrupted:
            for batch in batches:
                loss = self._advance(batch)
                bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
                bar.update()
                if self.step % REPORT_EVERY == 0 and self.step < self.steps:
                    bar.write(f"CLIP step {self.step}: loss {loss:.3f}, {held_out.measure(self.model)}")
                self.state.after_step(self._content, interrupted())

    def _advance(self, batch: ClipBatch) -> float:
        """One step; its loss."""
        with self.accelerator.autocast():
            loss = loss_of(self.model, ClipBatch(*(tensor.to(self.accelerator.device) for tensor in batch)))
        self.accelerator.backward(loss)
        advance(self.optimizers, share_of_rate(self.step, self.steps))
        with torch.no_grad():
            self.model.logit_scale.clamp_(max=LARGEST_SCALE)
        self.step += 1
        return loss.item()

    def _content(self) -> Content:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        return {"step": self.step, "model": self.model.state_dict(), "optimizers": optimizers}


def loss_of(model: Any, batch: ClipBatch) -> Tensor:
    """Scalar: the mean of both contrastive losses, of whole images and of parts."""
    images, patches = image_embeddings(model, as_pixels(batch.images), batch.shown)  # [B, J], [B, K, J]
    parts = (batch.part_patches[:, None] @ patches[batch.part_images].float())[:, 0]  # [R, J]
    scale = model.logit_scale.exp()
    whole = contrast(images, word_embeddings(model, batch.captions), scale, batch.caption_also_true)
    said, which = batch.part_captions.unique(dim=0, return_inverse=True)
    part = contrast(parts, word_embeddings(model, said)[which], scale, batch.part_also_true)
    return (whole + part) / 2


def contrast(seen: Tensor, said: Tensor, scale: Tensor, also_true: Tensor) -> Tensor:
    """Scalar: how badly N embeddings `[N, J]` of what is seen and of what is said find each other, both ways.

    What is said is not held against what is seen where it is `also_true` `[N, N]` of it.
    """
    logits = (scale * normalize(seen.float(), dim=-1)) @ normalize(said.float(), dim=-1).T
    logits = logits.float().masked_fill(also_true, -math.inf)
    own = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2
