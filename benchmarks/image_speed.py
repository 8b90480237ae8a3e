"""Decoding speed over images: OVAL against dense, on one attention layer and on a small model from end to end.

The layer has the shape of LLaVA-1.5-7B's, random keys and values, and 576 tokens an image; dense is SDPA over tokens
that lie ready. The small model has the sizes of the LLaVA that `oval_mm.recipes` trains, random weights, and reads
pictures of noise of 256 tokens each; dense is the faster one of transformers' `DynamicCache` and `StaticCache`. Dense
and OVAL take turns in one process; figures are medians. A read share is the budget as a share of all pages; everything
else is OVAL's default on this device.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm
from transformers import CLIPVisionConfig, CLIPVisionModel, DynamicCache, LlavaForConditionalGeneration, StaticCache

from benchmarks.alternating import WARM_UP_ROUNDS, median_ms, speedup, time_in_turns
from benchmarks.decode import fill, stepper, twin
from benchmarks.layer import DTYPES, bind, random_layer
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from oval_core import OvalConfig
from oval_core.attention import paged_attention
from oval_mm import attach
from oval_mm.recipes.question_packing import make_prefix
from oval_mm.recipes.tiny_clip import SHIPPED
from oval_mm.recipes.tiny_llava import IMAGE, build_llava, make_tokenizer

LAYER, MODEL = "LLaVA-1.5-7B, one layer", "small LLaVA, end to end"
HEADS, KV_HEADS, HEAD_DIM, IMAGE_TOKENS = 32, 32, 128, 576


@dataclass(frozen=True)
class Row:
    """One number of images: milliseconds a step, how many times faster OVAL is, and its share of the bytes."""

    shape: str
    images: int
    tokens: int
    dtype: str
    read_share: float
    dense_ms: float
    oval_ms: float
    vs_dense: float
    bytes_ratio: float


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    plan = [(measure_layer, images) for images in options.images]
    plan += [(measure_model, images) for images in options.model_images]
    work = [(*entry, dtype, share) for dtype in options.dtypes for share in options.shares for entry in plan]
    rows: list[Row] = []
    for measure, images, dtype, share in tqdm(work, unit="row"):
        rows.append(measure(images, dtype, share, options.calls))
        tqdm.write(_line(rows[-1]))
    result = {
        "benchmark": "image_speed",
        "command": command_line("image_speed", arguments),
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_speed", description=__doc__)
    parser.add_argument("--images", nargs="*", type=int, default=[1, 4, 16, 64], help="over the layer: %(default)s")
    parser.add_argument("--model-images", nargs="*", type=int, default=[16], help="of the small model: %(default)s")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.1], help="default: %(default)s")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    parser.add_argument("--calls", type=int, default=40, help="steps timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    return parser.parse_args(arguments)


@torch.inference_mode()
def measure_layer(images: int, dtype: str, share: float, calls: int) -> Row:
    """One layer of LLaVA-1.5-7B's shape over `images` images; 576 tokens are whole pages."""
    config, tokens = OvalConfig(budget_ratio=share, stats_every=0), images * IMAGE_TOKENS
    layer, binding = random_layer(config, KV_HEADS, HEAD_DIM, tokens, DTYPES[dtype]), bind(config)
    query = 2 * torch.randn(1, HEADS, 1, HEAD_DIM).to(DTYPES[dtype])
    keys, values = (states.contiguous() for states in layer.store.dense())
    seconds = time_in_turns(
        {
            "oval": partial(paged_attention, binding, layer, query, None, HEAD_DIM**-0.5),
            "dense": partial(scaled_dot_product_attention, query, keys, values),
        },
        calls,
    )
    return _row(LAYER, images, tokens, dtype, share, seconds, binding.recorder.report())


@torch.inference_mode()
def measure_model(images: int, dtype: str, share: float, calls: int) -> Row:
    """Whole steps of the small model after `images` images."""
    model: Any = random_llava()
    model.to(DTYPES[dtype])
    image_tokens = model.config.image_seq_length
    prompt = torch.tensor([make_prefix(make_tokenizer(), IMAGE * image_tokens * images).tokens])
    pixels = torch.randn(images, 3, SHIPPED.image_px, SHIPPED.image_px).to(DTYPES[dtype])
    paged, token = twin(model), prompt[:, :1]
    with attach(paged, config=OvalConfig(budget_ratio=share, stats_every=0)) as handle:
        cache: Any = paged(input_ids=prompt, pixel_values=pixels, use_cache=True, logits_to_keep=1).cache
        states = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        room = prompt.shape[1] + calls + WARM_UP_ROUNDS + 8
        text = model.config.get_text_config()
        others = {"dynamic": DynamicCache(config=text), "static": StaticCache(config=text, max_cache_len=room)}
        variants = {name: stepper(model, fill(other, states), token) for name, other in others.items()}
        seconds = time_in_turns(variants | {"oval": stepper(paged, cache, token)}, calls)
        stats = handle.stats()
    seconds["dense"] = min((seconds[name] for name in others), key=median_ms)
    return _row(MODEL, images, images * image_tokens, dtype, share, seconds, stats)


def random_llava() -> LlavaForConditionalGeneration:
    """A model of the sizes of the one that `oval_mm.recipes` trains, with random weights."""
    tower = CLIPVisionConfig(
        hidden_size=SHIPPED.width,
        intermediate_size=4 * SHIPPED.width,
        num_hidden_layers=SHIPPED.layers,
        num_attention_heads=SHIPPED.width // SHIPPED.head_dim,
        image_size=SHIPPED.image_px,
        patch_size=SHIPPED.patch_px,
    )
    return build_llava(CLIPVisionModel(tower))


def _row(
    shape: str,
    images: int,
    tokens: int,
    dtype: str,
    share: float,
    seconds: dict[str, list[float]],
    stats: dict[str, Any],
) -> Row:
    dense_ms, oval_ms = median_ms(seconds["dense"]), median_ms(seconds["oval"])
    faster = speedup(seconds, "dense", "oval")
    return Row(shape, images, tokens, dtype, share, dense_ms, oval_ms, faster, stats["read_ratio"])


def _line(row: Row) -> str:
    return (
        f"{row.shape}, {row.images} images, {row.dtype}, {row.read_share:.0%}: dense {row.dense_ms:.2f} ms, "
        f"OVAL {row.oval_ms:.2f} ms, {row.vs_dense:.2f}x, {row.bytes_ratio:.1%} of the bytes"
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
