"""Speed of a whole decoding step of a random model on a GPU, launched kernel by kernel or as a CUDA graph.

The baselines: OVAL's own storage, which copies nothing, read whole by SDPA's FlashAttention; transformers' StaticCache,
whose mask SDPA's FlashAttention does not take; transformers' DynamicCache, which copies itself at every step. A replay
of a graph writes to the place of the token that was captured: good for timing, not for decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

from benchmarks.alternating import WARM_UP_ROUNDS, median_ms, speedup, time_in_turns
from benchmarks.decode import KeysValues, fill, stepper, twin
from benchmarks.gpu_clock import lacking_memory, step_clock
from benchmarks.gpu_graph import Call, captured
from benchmarks.gpu_rows import Case, Row
from oval_core import OvalConfig, attach
from oval_core.model_shape import head_dim_of

LLAMA_8B: dict[str, Any] = {  # meta-llama/Llama-3.1-8B
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
BASELINES = ("store", "static", "dynamic")  # those that fit, the strongest first; graphs do without the last
SPARE_CACHES = 0.5  # what making and growing them needs, in caches
NEVER_TOKENS = 1 << 40  # to collect before pages are sealed


def random_model(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A Llama of these sizes, made on the device."""
    config: Any = LlamaConfig(**sizes, eos_token_id=None)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


@torch.inference_mode()
def measure_step(get_model: Callable[[], PreTrainedModel], case: Case, impl: str, graph: bool, rounds: int) -> Row:
    """One step over a cache of `case.context` random tokens in each of `case.batch` rows."""
    model = get_model()
    device = model.device
    row = partial(Row, "graph" if graph else "eager", case.shape, case.context, case.batch, impl)
    if graph and device.type != "cuda":
        return row(f"no CUDA graphs on {device.type}")
    baselines, lacking = _fitting(model, case, BASELINES[: 2 if graph else 3])
    if lacking:
        return row(lacking)
    plain = OvalConfig(router="box", seal_tokens=NEVER_TOKENS, impl=impl, stats_every=0)  # no page, hence dense
    sparse = OvalConfig(router="basis", impl=impl, stats_every=0)
    with attach(twin(model), plain) as store, attach(twin(model), sparse) as oval:
        models = {"store": store.model, "static": model, "dynamic": model, "oval": oval.model}
        steps = _steps({name: models[name] for name in (*baselines, "oval")}, case, rounds)
        steps, refused = captured(steps) if graph else (steps, "")
        seconds = time_in_turns(steps, rounds, step_clock(device))
        return row(refused or None, **_figures(seconds, oval.stats()["read_ratio"]))


def _fitting(model: PreTrainedModel, case: Case, names: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
    """As many of the baselines as fit beside OVAL; why there is none."""
    cache_bytes = case.batch * case.context * _token_bytes(model)
    for count in range(len(names), 0, -1):
        lacking = lacking_memory(model.device, (count + 1 + SPARE_CACHES) * cache_bytes)
        if lacking is None:
            return names[:count], None
    return (), lacking


def _token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers."""
    config: Any = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config) * model.dtype.itemsize


def _steps(models: dict[str, PreTrainedModel], case: Case, rounds: int) -> dict[str, Call]:
    """Calls that decode one token each, by cache."""
    model = models["oval"]
    states = _random_states(model, case.context, case.batch)
    token = torch.ones(case.batch, 1, dtype=torch.long, device=model.device)
    room = case.context + rounds + 2 * WARM_UP_ROUNDS + 8
    steps = {}
    for name, each in models.items():
        empty = partial(StaticCache, max_cache_len=room) if name == "static" else DynamicCache
        steps[name] = stepper(each, fill(empty(config=each.config), states), token)
    return steps


def _random_states(model: PreTrainedModel, context: int, batch: int) -> KeysValues:
    """Keys and values, the same for every layer; by a generator of their own, for a failed capture spoils torch's."""
    config: Any = model.config
    generator = torch.Generator(model.device).manual_seed(0)
    shape = (batch, config.num_key_value_heads, context, head_dim_of(config))
    random = partial(torch.randn, shape, generator=generator, dtype=model.dtype, device=model.device)
    return [(random(), random())] * config.num_hidden_layers


def _figures(seconds: dict[str, list[float]], read_ratio: float | None) -> dict[str, Any]:
    """Of the caches that were timed; dense is the fastest other one."""
    ms = {name: median_ms(values) for name, values in seconds.items()}
    oval_ms = ms.pop("oval", None)
    dense = min(ms, key=lambda name: ms[name], default=None)
    figures: dict[str, Any] = {"oval_ms": oval_ms, "read_ratio": read_ratio, "parts_ms": ms}
    if dense is not None:
        figures["dense_ms"] = ms[dense]
        figures["vs_dense"] = None if oval_ms is None else speedup(seconds, dense, "oval")
    return figures
