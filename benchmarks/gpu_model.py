"""Speed of a whole decoding step of a random model on a GPU, launched kernel by kernel or as a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, PreTrainedModel, StaticCache

from benchmarks.alternating import WARM_UP_ROUNDS, median_ms, speedup, time_in_turns
from benchmarks.decode import KeysValues, fill, stepper, twin
from benchmarks.gpu_clock import lacking_memory, step_clock
from benchmarks.gpu_rows import Row
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
CACHES = 3.5  # times the keys and values: DynamicCache, StaticCache, OVAL's, and what making them needs
REASON_CHARACTERS = 160
Call = Callable[[], object]


def random_model(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """A Llama of these sizes, made on the device."""
    config: Any = LlamaConfig(**sizes, eos_token_id=None)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    return model


@torch.inference_mode()
def measure_step(
    model: PreTrainedModel, shape: str, context: int, batch: int, impl: str, graph: bool, rounds: int
) -> list[Row]:
    """One step over a cache of `context` random tokens in each of `batch` rows."""
    device = model.device
    row = partial(Row, "graph" if graph else "eager", shape, context, batch, impl)
    if graph and device.type != "cuda":
        return [row(f"no CUDA graphs on {device.type}")]
    lacking = lacking_memory(device, CACHES * batch * context * _token_bytes(model))
    if lacking:
        return [row(lacking)]
    with attach(twin(model), OvalConfig(router="basis", impl=impl, stats_every=0)) as handle:
        steps, refused = _steps(model, handle.model, context, batch, rounds), ""
        if graph:
            steps, refused = _captured(steps)
        seconds = time_in_turns(steps, rounds, step_clock(device))
        return [row(refused or None, **_figures(seconds, handle.stats()["read_ratio"]))]


def _token_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, all layers."""
    config: Any = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim_of(config) * model.dtype.itemsize


def _steps(
    model: PreTrainedModel, paged_model: PreTrainedModel, context: int, batch: int, rounds: int
) -> dict[str, Call]:
    """Calls that decode one token each."""
    states = _random_states(model, context, batch)
    token = torch.ones(batch, 1, dtype=torch.long, device=model.device)
    room = context + rounds + 2 * WARM_UP_ROUNDS + 8
    return {
        "dynamic": stepper(model, fill(DynamicCache(config=model.config), states), token),
        "static": stepper(model, fill(StaticCache(config=model.config, max_cache_len=room), states), token),
        "oval": stepper(paged_model, fill(DynamicCache(config=model.config), states), token),
    }


def _random_states(model: PreTrainedModel, context: int, batch: int) -> KeysValues:
    """Keys and values, the same for every layer; by a generator of their own, for a failed capture spoils torch's."""
    config: Any = model.config
    generator = torch.Generator(model.device).manual_seed(0)
    shape = (batch, config.num_key_value_heads, context, head_dim_of(config))
    random = partial(torch.randn, shape, generator=generator, dtype=model.dtype, device=model.device)
    return [(random(), random())] * config.num_hidden_layers


def _captured(steps: dict[str, Call]) -> tuple[dict[str, Call], str]:
    """Replays of the steps that could be captured as CUDA graphs, and why others could not.

    A replay writes to the place of the token that was captured: good for timing, not for decoding.
    """
    graphs: dict[str, Call] = {}
    refused = []
    for name in ("static", "oval"):
        try:
            graphs[name] = _graph_of(steps[name])
        except RuntimeError as error:
            refused.append(f"{name} was not captured: {_root(error)}")
    return graphs, "; ".join(refused)


def _graph_of(step: Call) -> Call:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # a capture that fails does not give the stream back
        for _ in range(WARM_UP_ROUNDS):
            step()
        with torch.cuda.graph(graph, stream=stream):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def _root(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0][:REASON_CHARACTERS]


def _figures(seconds: dict[str, list[float]], read_ratio: float | None) -> dict[str, Any]:
    """Of the caches that were timed; dense is the faster one."""
    ms = {name: median_ms(values) for name, values in seconds.items()}
    oval_ms = ms.pop("oval", None)
    dense = min(ms, key=lambda name: ms[name], default=None)
    figures: dict[str, Any] = {"oval_ms": oval_ms, "read_ratio": read_ratio, "parts_ms": ms}
    if dense is not None:
        figures["dense_ms"] = ms[dense]
        figures["vs_dense"] = None if oval_ms is None else speedup(seconds, dense, "oval")
    return figures
