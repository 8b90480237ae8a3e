"""Time the tiers of the compiled cascade one by one, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit

from benchmarks.layer import random_layer
from oval_core import OvalConfig
from oval_core.kernels import cpu
from oval_core.kernels import cpu_loops as loops
from oval_core.model_shape import head_dim_of

REPEATS = 50


def time_tiers(config: OvalConfig, model_config: Any, context: int) -> dict[str, float]:
    """Seconds a layer spends in each tier, for one row and all KV heads on one thread."""
    heads, kv_heads = model_config.num_attention_heads, model_config.num_key_value_heads
    dim = head_dim_of(model_config)
    layer = random_layer(config, kv_heads, dim, context, torch.float32)
    plan, tokens = cpu._plan(layer), cpu._tokens(layer)
    rows = 2 * np.random.default_rng(0).standard_normal((1, kv_heads, heads // kv_heads, dim)).astype(np.float32)
    query = loops.Query(rows, np.ones((1, 0, 0), np.bool_))
    stages = _stages(query, tokens, plan.packed, np.float32(dim**-0.5), layer.router.needs_bases, config.rank)
    return {name: kv_heads * _seconds(call) for name, call in stages.items()}


def _stages(
    query: Any, tokens: Any, packed: Any, scaling: Any, refines: bool, rank: int
) -> dict[str, Callable[[int], object]]:
    count, budget, short = (int(size) for size in packed.rows[0, :3])
    (rows, dim), page_size = query.rows.shape[2:], int(packed.numbers[1])
    shape = (1, query.rows.shape[1])
    coarse = loops.Coarse(*(np.empty((*shape, *size), np.float32) for size in ((rows, count), (1, rows), (1, rows))))
    _tier1(1, query, packed, scaling, coarse)
    listed = np.arange(short)
    lse, moved = np.zeros((rows, short), np.float32), np.zeros((rows, short, rank), np.float32)
    read = np.arange(short) < budget
    positions = np.arange(budget * page_size + loops.BLOCK)
    sums = np.zeros((rows, dim), np.float32), np.zeros(rows, np.float32), np.ones(rows, np.float32)
    wanted = short if refines else budget
    stages: dict[str, Callable[[int], object]] = {
        "tier 1": lambda n: _tier1(n, query, packed, scaling, coarse),
        "selection": lambda n: _selection(n, query, wanted, packed, coarse, np.empty(wanted, np.int64)),
        "exact": lambda n: _exact(n, query, tokens, packed, scaling, positions, *sums),
    }
    if refines:
        stages["tier 2"] = lambda n: _tier2(n, query, packed, scaling, listed, lse, moved)
        stages["tail"] = lambda n: _tail(n, query, packed, listed, read, lse, moved, *sums)
    return stages


def _seconds(call: Callable[[int], object]) -> float:
    call(1)
    best = []
    for _ in range(5):
        begin = time.perf_counter()
        call(REPEATS)
        best.append((time.perf_counter() - begin) / REPEATS)
    return sorted(best)[2]


@njit
def _tier1(n, query, packed, scaling, coarse):  # type: ignore[no-untyped-def]
    table, bases, choices = loops.unpack(packed, query.rows.shape[1], query.rows.shape[3])
    for _ in range(n):
        loops._score(0, 0, 0, 1, query, table, bases, choices, scaling, coarse)


@njit
def _selection(n, query, wanted, packed, coarse, listed):  # type: ignore[no-untyped-def]
    table, bases, choices = loops.unpack(packed, query.rows.shape[1], query.rows.shape[3])
    for _ in range(n):
        loops._best(0, 0, 1, wanted, table, bases, choices, coarse, listed)


@njit
def _tier2(n, query, packed, scaling, listed, lse, moved):  # type: ignore[no-untyped-def]
    _, bases, _ = loops.unpack(packed, query.rows.shape[1], query.rows.shape[3])
    for _ in range(n):
        loops._basis(query.rows[0, 0], 0, 0, bases, scaling, listed, lse, moved)


@njit
def _exact(n, query, tokens, packed, scaling, positions, out, most, mass):  # type: ignore[no-untyped-def]
    for _ in range(n):
        found = positions.shape[0] - loops.BLOCK
        loops._read(query, 0, 0, tokens, packed.rows[0, 3], scaling, positions, found, out, most, mass)


@njit
def _tail(n, query, packed, listed, read, lse, moved, out, most, mass):  # type: ignore[no-untyped-def]
    _, bases, _ = loops.unpack(packed, query.rows.shape[1], query.rows.shape[3])
    for _ in range(n):
        loops._add_tail(0, 0, bases, listed, read, lse, moved, out, most, mass)
