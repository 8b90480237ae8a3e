"""Make the small CLIP and the small LLaVA that OVAL for images is tried on, on a CPU, in about two hours.

    python -m oval_mm.recipes.train --out DIR

leaves a CLIP (open_clip's format) in DIR/clip and a LLaVA (transformers' format) in DIR/llava. Interrupted, the same
command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from oval_mm.recipes import clip_training
from oval_mm.recipes.clip_to_transformers import build_image_processor, build_vision_tower
from oval_mm.recipes.clip_training import train_clip
from oval_mm.recipes.llava_plan import make_plan
from oval_mm.recipes.llava_training import train_llava
from oval_mm.recipes.tiny_llava import FEATURE_LAYER, build_llava, make_processor

STAGES = {
    "clip": (),
    "symbols": ("symbols",),
    "align": ("align",),
    "tune": ("tune",),
    "all": ("symbols", "align", "tune"),
}


def main(arguments: list[str] | None = None) -> None:
    """Train; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m oval_mm.recipes.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--stage", choices=STAGES, default="all", help="what to do now (default: %(default)s)")
    parser.add_argument("--steps-scale", type=float, default=1.0, help="of the recipe's steps, 0.01 for a trial")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--feature-layer", type=int, default=FEATURE_LAYER, help="of the tower, for the LLaVA (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        train(**vars(options))
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on where this one stopped")


def train(out: Path, stage: str, steps_scale: float, seed: int, feature_layer: int) -> None:
    """Do one stage, or all that are left.

    Raises:
        ValueError: an option is out of range, `out` holds a training with other settings, or a stage is missing.
    """
    plan = make_plan(steps_scale, easy_vqa=find_spec("easy_vqa") is not None)
    if stage in ("clip", "all"):
        train_clip(out / "clip", max(1, round(clip_training.STEPS * steps_scale)), seed)
    if not STAGES[stage]:
        return
    tower = build_vision_tower(out / "clip")
    torch.manual_seed(seed)
    model = build_llava(tower, feature_layer=feature_layer)
    processor = make_processor(build_image_processor(out / "clip"), tower)
    train_llava(out / "llava", model, processor, plan, seed, stages=STAGES[stage])


if __name__ == "__main__":
    main()
