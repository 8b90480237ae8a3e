"""Train a routing head from the dense model's attention: which image pages each KV head looks at, token by token.

    python -m oval_mm.distillation --model DIR/llava --clip DIR/clip --out head.safetensors

The head learns to correct the training-free score (`box`) of image pages; the loss is the KL divergence of its shares
of the image pages from the true ones, mean over layers, KV heads and tokens. What is printed of held-out scenes, before
and after:

    kl            that divergence
    page_recall   of the truly heaviest quarter of the image pages, the share in the quarter that is ranked first
    mass_recall   the share of the attention mass on images that lies in the quarter that is ranked first
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm

from oval_core.model_shape import head_dim_of
from oval_core.training.state import share_of_rate
from oval_mm.concepts import SCENE, concept_list, make_concept_space
from oval_mm.head_file import save_head
from oval_mm.hybrid_head import DIM, HeadSizes, HybridHead
from oval_mm.lessons import ALL, TOKENS, Lesson, Teacher, lessons
from oval_mm.page_embeddings import (
    CLIP_TEXT,
    KINDS,
    MEAN_KEY,
    RANDOM,
    TEXT_ONLY,
    ConceptEmbedding,
    MeanKeyEmbedding,
    PageEmbedding,
    PlaceEmbedding,
)
from oval_mm.recipes.llava_batches import SOURCES, Pack, packs
from oval_mm.recipes.tiny_llava import load_llava

READ_SHARE = 0.25  # of the image pages, for the recalls
WEIGHT_DECAY, LARGEST_GRADIENT = 0.01, 1.0


def make_embedding(kind: str, model: Any, clip: str | None, concepts: Sequence[str], seed: int) -> PageEmbedding:
    """A kind of page embedding for a model, see `oval_mm.page_embeddings`; mean keys and places take no CLIP.

    Raises:
        ValueError: no such kind, or it takes a CLIP and there is none.
        ImportError: it takes a CLIP, and open_clip_torch is not installed.
    """
    if kind not in KINDS or (kind in (CLIP_TEXT, RANDOM) and clip is None):
        raise ValueError(f"init must be one of {KINDS}, the first two with a CLIP, got {kind!r} and CLIP {clip!r}")
    if kind == TEXT_ONLY:
        return PlaceEmbedding()
    if kind == MEAN_KEY:
        text = model.config.get_text_config(decoder=True)
        return MeanKeyEmbedding(head_dim_of(text))
    space = make_concept_space(str(clip), concepts).to(model.device)
    return ConceptEmbedding(space.with_random_texts(seed) if kind == RANDOM else space, kind)


def divergence(lesson: Lesson, head: HybridHead | None) -> Tensor:
    """KL of the guessed shares from the true ones, mean over layers, KV heads and tokens; `[]`."""
    losses = []
    for number, layer in enumerate(lesson):
        tiny = torch.finfo(layer.share.dtype).tiny
        log_ratio = layer.share.clamp_min(tiny).log() - layer.guess(head, number).clamp_min(tiny).log()
        losses.append((layer.share * log_ratio).sum(-1).mean())
    return torch.stack(losses).mean()


@torch.no_grad()
def measure(held_out: Sequence[Lesson], head: HybridHead | None) -> dict[str, float]:
    """`kl`, `page_recall` and `mass_recall`, see the top of this file; without a head: training-free."""
    pages, mass = [], []
    for number, layer in ((number, layer) for lesson in held_out for number, layer in enumerate(lesson)):
        most = max(1, round(READ_SHARE * layer.share.shape[-1]))
        first = layer.guess(head, number).topk(most).indices
        heaviest = torch.zeros_like(layer.share).scatter_(-1, layer.share.topk(most).indices, 1.0)
        pages.append(heaviest.gather(-1, first).mean())
        mass.append(layer.share.gather(-1, first).sum(-1).mean())
    kl = torch.stack([divergence(lesson, head) for lesson in held_out]).mean()
    found = {"kl": kl, "page_recall": torch.stack(pages).mean(), "mass_recall": torch.stack(mass).mean()}
    return {name: value.item() for name, value in found.items()}


def train_head(head: HybridHead, lessons: Sequence[Lesson], steps: int, rate: float, seed: int) -> list[float]:
    """Train in place, one lesson a step, in an order that `seed` decides; the loss of every step."""
    accelerator = Accelerator(mixed_precision="no")
    optimizer = accelerator.prepare(torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=WEIGHT_DECAY))
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    bar = tqdm(range(steps), desc="distil", unit="step")
    for step in bar:
        for group in optimizer.param_groups:
            group["lr"] = rate * share_of_rate(step, steps)
        lesson = lessons[int(torch.randint(len(lessons), (), generator=generator))]
        loss = divergence(lesson, head)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(head.parameters(), LARGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix_str(f"loss {losses[-1]:.4f}", refresh=False)
    return losses


def main(arguments: list[str] | None = None) -> None:
    """Distil; see `--help`."""
    options = _parse(arguments)
    model, processor = load_llava(options.model)
    embedding = make_embedding(options.init, model, options.clip, concept_list(options.concepts), options.seed)
    head = HybridHead(HeadSizes.of(model, embedding.size, options.dim), options.seed)
    teacher, size_px = Teacher(head, embedding, base="box"), processor.image_processor.crop_size["height"]
    learned, held_out = (
        list(
            lessons(
                model,
                processor,
                tqdm(_packs(options.sources, split, size_px, count), desc=split, unit="pack"),
                teacher,
                options.page_size,
                options.block,
                options.tokens,
            )
        )
        for split, count in (("train", options.packs), ("validation", options.held_out))
    )
    before = measure(held_out, None)
    train_head(head, learned, options.steps, options.rate, options.seed)
    after = measure(held_out, head)
    save_head(options.out, head, embedding)
    print(json.dumps({"init": options.init, "held_out": {"training_free": before, "head": after}}))


def _packs(sources: Sequence[str], split: str, size_px: int, count: int) -> list[Pack]:
    """`count` packs of every source."""
    return [pack for source in sources for pack in itertools.islice(packs(source, split, size_px), count)]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.init in (CLIP_TEXT, RANDOM) and options.clip is None:
        parser.error(f"--init {options.init} needs --clip")
    for name in ("packs", "held_out", "steps", "dim"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m oval_mm.distillation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the LLaVA")
    add("--clip", help="folder of its CLIP, or what open_clip calls it; not for mean-key and text-only")
    add("--out", type=Path, required=True, help="file for the head")
    add("--init", choices=KINDS, default=CLIP_TEXT, help="page embeddings (default: %(default)s)")
    add("--concepts", default=SCENE, help="scene, general, or a file with one a line (default: %(default)s)")
    add("--sources", nargs="+", choices=SOURCES, default=["one", "four"], help="of images (default: one four)")
    add("--packs", type=int, default=100, help="to learn from, of every source (default: %(default)s)")
    add("--held-out", type=int, default=25, help="to measure on, of every source (default: %(default)s)")
    add("--tokens", choices=TOKENS, default=ALL, help="to learn from: all, or only answers (default: %(default)s)")
    add("--steps", type=int, default=1000, help="of one pack each (default: %(default)s)")
    add("--rate", type=float, default=3e-3, help="highest learning rate (default: %(default)s)")
    add("--dim", type=int, default=DIM, help="of the comparison (default: %(default)s)")
    add("--page-size", type=int, default=16, help="tokens a page (default: %(default)s)")
    add("--block", type=int, help="side of the square blocks that are pages (default: runs)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    return parser


if __name__ == "__main__":
    main()
