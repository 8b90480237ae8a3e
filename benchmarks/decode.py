"""Speed of a whole decoding step: OVAL against transformers' `DynamicCache` and `StaticCache`, all with SDPA.

The three variants take turns in one process and start from the same keys and values: those of a real text up to the
length of the prompt that is prefilled, random ones beyond (speed only). Figures are medians over the steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from benchmarks.alternating import WARM_UP_ROUNDS, median_ms, speedup, time_in_turns
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from demos.smollm2 import load_model
from demos.texts import load_text
from oval_core import OvalCache, OvalConfig, attach

PREFILL_CHUNK_TOKENS = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KeysValues = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """One context: milliseconds a step, and how many times faster OVAL is."""

    dtype: str
    context: int
    batch: int
    vs_dynamic: float
    vs_static: float
    step_ms: dict[str, float]
    read_ratio: float | None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    rows: list[Row] = []
    extra: dict[str, Any] = {}
    for name in options.dtypes:
        model, tokenizer = load_model(options.model, DTYPES[name])
        ids = tokenizer(load_text("novel"), return_tensors="pt", verbose=False).input_ids[:, : options.prefill]
        filled, prefill_s = _prefill(model, ids)
        if name == options.dtypes[0]:
            extra = _costs(model, filled, prefill_s)
        for context, batch in [(context, 1) for context in options.contexts] + [(options.prefill, options.batch)]:
            rows.append(_measure(model, name, filled, context, batch, options.steps))
            print(_line(rows[-1]), flush=True)
    result = {
        "benchmark": "decode",
        "command": command_line("decode", arguments),
        "machine": describe_machine(),
        "model": options.model or "SmolLM2-135M-Instruct",
    }
    result |= {"config": asdict(OvalConfig().for_device(model.device)), "rows": [asdict(row) for row in rows], **extra}
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32", "bfloat16"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512, 2048, 8128, 32768])
    parser.add_argument("--prefill", type=int, default=8128, help="tokens of real text (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=4, help="rows of the batched figure (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="steps timed (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    return parser.parse_args(arguments)


@torch.inference_mode()
def _prefill(model: PreTrainedModel, ids: Tensor) -> tuple[KeysValues, float]:
    """Keys and values of every layer after reading `ids`, and the seconds it took."""
    cache: Any = DynamicCache(config=model.config)
    begin = time.perf_counter()
    for chunk in tqdm(ids.split(PREFILL_CHUNK_TOKENS, dim=1), desc="prefill", unit="chunk"):
        model(chunk, cache=cache, logits_to_keep=1)
    return [(layer.keys, layer.values) for layer in cache.layers], time.perf_counter() - begin


@torch.inference_mode()
def _costs(model: PreTrainedModel, filled: KeysValues, prefill_s: float) -> dict[str, float]:
    """What sealing every page costs: seconds as a share of the prefill, bytes as a share of keys and values."""
    cache: Any = OvalCache(model.config)
    sealing_s = 0.0
    for layer, (keys, values) in zip(cache.layers, filled, strict=True):
        layer.update(keys, values)
        layer.attended(None)
        begin = time.perf_counter()
        layer.pages.seal(layer.store, layer.store.lengths)
        sealing_s += time.perf_counter() - begin
    layer, (keys, values) = cache.layers[0], filled[0]
    basis = layer.pages.basis
    per_page = (basis.coarse_bytes + basis.basis_bytes) * keys.shape[1]
    ratio = per_page * layer.pages.num_pages / (keys.nbytes + values.nbytes)
    return {"prefill_s": prefill_s, "prefill_overhead": sealing_s / prefill_s, "basis_bytes_ratio": ratio}


@torch.inference_mode()
def _measure(model: PreTrainedModel, dtype: str, filled: KeysValues, context: int, batch: int, steps: int) -> Row:
    states = [resized(pair, context, batch) for pair in filled]
    room = context + steps + WARM_UP_ROUNDS + 8
    token = torch.full((batch, 1), 28)
    paged_model = twin(model)
    with attach(paged_model, OvalConfig(stats_every=0)) as handle:
        variants: dict[str, Callable[[], object]] = {
            "dynamic": stepper(model, fill(DynamicCache(config=model.config), states), token),
            "static": stepper(model, fill(StaticCache(config=model.config, max_cache_len=room), states), token),
            "oval": stepper(paged_model, fill(DynamicCache(config=model.config), states), token),
        }
        seconds = time_in_turns(variants, steps)
        ratio = handle.stats()["read_ratio"]
    step_ms = {name: median_ms(values) for name, values in seconds.items()}
    faster = [speedup(seconds, other, "oval") for other in ("dynamic", "static")]
    return Row(dtype, context, batch, faster[0], faster[1], step_ms, ratio)


def resized(pair: tuple[Tensor, Tensor], context: int, batch: int) -> tuple[Tensor, Tensor]:
    """Cut to `context` tokens, or go on with random ones of the same spread; repeat over the batch."""
    sized = []
    for states in pair:
        missing = context - states.shape[2]
        if missing > 0:
            scale = states.float().std(2, keepdim=True)
            more = torch.randn(*states.shape[:2], missing, states.shape[3]) * scale + states.float().mean(
                2, keepdim=True
            )
            states = torch.cat([states, more.to(states.dtype)], dim=2)
        sized.append(states[:, :, :context].expand(batch, -1, -1, -1))
    return sized[0], sized[1]


def fill(cache: Cache, states: KeysValues) -> Cache:
    """Put keys and values of every layer into `cache`."""
    for index, (keys, values) in enumerate(states):
        cache.update(keys, values, index)
    return cache


def stepper(model: PreTrainedModel, cache: Cache, token: Tensor) -> Callable[[], object]:
    """A call that decodes one step of `token [B, 1]` over `cache`."""
    return lambda: model(token, cache=cache)


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second model over the same parameters, so that one can be attached while the other is not."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}
    return copy.deepcopy(model, shared)


def _line(row: Row) -> str:
    times = ", ".join(f"{name} {value:.1f} ms" for name, value in row.step_ms.items())
    return f"{row.dtype} {row.context:6} tokens x {row.batch}: {row.vs_dynamic:.2f}x, {row.vs_static:.2f}x  ({times})"


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
