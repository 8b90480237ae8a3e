"""Selecting and reading as one compiled call a layer, for CPUs; the loops are in `cpu_loops.py`.

For the routers in `FUSED_ROUTERS`; tier functions on their own, for all others, are those of the reference.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch
from torch import Tensor

from oval_core.kernels import cpu_loops as loops
from oval_core.kernels.reference import attend, coarse_scores, evaluate_bases, merge
from oval_core.routers.base import Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter

if TYPE_CHECKING:
    from oval_core.layer import OvalLayer

__all__ = ["FUSED_ROUTERS", "attend", "cascade", "coarse_scores", "evaluate_bases", "merge", "unsupported", "warm_up"]

# torch's OpenMP threads spin between operations; a pool of its own would fight them for the cores.
_settings: Any = numba.config
_settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

FUSED_ROUTERS = (BasisRouter, BoxRouter)
_STORED_AS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
MESSAGE_AFTER_S = 2.0
_ALL_TOKENS = np.ones((1, 0, 0), np.bool_)
_PROCESS = os.getpid()  # GNU OpenMP ends a process that was forked from one that had used it


def unsupported(
    query: Tensor, layer: OvalLayer, mask: Tensor | None, softcap: float | None, sinks: Tensor | None
) -> str | None:
    """Why the fused cascade cannot serve this call, or None. `mask` is bool `[B, 1, Q, T]`."""
    if query.requires_grad:
        return "gradients"
    if os.getpid() != _PROCESS:
        return "forked process"
    keys, values = layer.store.storage
    if keys.device.type != "cpu":
        return f"{keys.device.type} cache"
    if keys.dtype not in _STORED_AS or values.dtype != keys.dtype:
        return f"{keys.dtype} cache" if values.dtype == keys.dtype else "keys and values of different dtypes"
    if softcap is not None:
        return "softcap"
    if sinks is not None:
        return "sink logits"
    if mask is not None and not _shows_sealed_tokens(layer, mask):
        return "mask that hides sealed tokens"
    return None


def cascade(query: Tensor, layer: OvalLayer, mask: Tensor | None, scaling: float) -> tuple[Tensor, Selection]:
    """Select pages as the layer's router does, read them and the open tail exactly, add the estimated tail.

    Args:
        query: float32 `[B, H, G, Q, D]`.
        mask: bool `[B, 1, Q, T]` or None.

    Returns: float32 `[B, H, G, Q, D_v]`, and the selection (its tail is already inside the output).
    """
    batch, heads, group, queries, _ = query.shape
    tokens, (table, bases, choices, most_pages) = _tokens(layer), _pages(layer)
    rows = (batch, heads, group * queries, -1)
    out = np.empty((*rows[:3], tokens.values.shape[3]), np.float32)
    picked, valid = np.zeros((batch, heads, most_pages), np.int64), np.zeros((batch, heads, most_pages), np.bool_)
    threads = min(torch.get_num_threads(), _settings.NUMBA_NUM_THREADS)
    numba.set_num_threads(threads)
    loops.cascade(
        loops.Query(query.reshape(rows).contiguous().numpy(), _tail_mask(layer, table, mask, group, queries)),
        tokens,
        table,
        bases,
        choices,
        np.float32(scaling),
        threads // math.gcd(threads, batch * heads),  # the fewest parts that keep all threads equally busy
        out,
        picked,
        valid,
    )
    result = torch.from_numpy(out).view(batch, heads, group, queries, -1)
    return result, Selection(torch.from_numpy(picked), torch.from_numpy(valid))


def warm_up(dtype: torch.dtype) -> None:
    """Compile for a cache of `dtype`, or load what an earlier process compiled; says so if it takes long."""
    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer

    if dtype not in _STORED_AS:
        return
    config = OvalConfig(page_size=8, budget_pages=3, rank=1, stats_every=0)
    layer = OvalLayer(config, None, 0)
    for tokens in (16, 1):
        layer.update(torch.zeros(1, 1, tokens, 8, dtype=dtype), torch.zeros(1, 1, tokens, 8, dtype=dtype))
        layer.attended(None)
    threads = torch.get_num_threads()
    notice = threading.Timer(MESSAGE_AFTER_S, lambda: print(_COMPILING, file=sys.stderr, flush=True))
    notice.start()
    try:
        cascade(torch.zeros(1, 1, 1, 1, 8, dtype=torch.float32), layer, None, 1.0)
    finally:
        notice.cancel()
        torch.set_num_threads(threads)  # Numba's first parallel call sets it to all cores


_COMPILING = "OVAL: compiling the CPU kernels (about a minute, once; later processes load them from disk) ..."


def _tokens(layer: OvalLayer) -> loops.Tokens:
    store = layer.store
    if "cpu_tokens" not in store.derived:
        keys, values = (storage.view(_STORED_AS[storage.dtype]).numpy() for storage in store.storage)
        visible = np.ones((keys.shape[0], 0), np.bool_) if store.visible is None else store.visible.numpy()
        store.derived["cpu_tokens"] = loops.Tokens(keys, values, visible)
    tokens: loops.Tokens = store.derived["cpu_tokens"]
    return tokens


def _pages(layer: OvalLayer) -> tuple[loops.Table, loops.Bases, loops.Choices, int]:
    """The page tables, the bases, how to choose, and the most sealed pages that any row reads."""
    derived = layer.pages.derived
    if "cpu" not in derived:
        table = _new_table(layer)
        derived["cpu"] = table, _bases(layer), _choices(layer), int(table.budget.max())
    pages: tuple[loops.Table, loops.Bases, loops.Choices, int] = derived["cpu"]
    pages[0].sealed_end[:] = [row.sealed_end for row in layer.tables]
    pages[0].ends[:] = layer.store.lengths
    return pages


def _new_table(layer: OvalLayer) -> loops.Table:
    config, counts = layer.config, layer.pages.counts
    return loops.Table(
        layer.pages.starts.numpy(),
        layer.pages.lengths.numpy(),
        np.array(counts),
        np.array([config.budget_for(count) - 1 for count in counts]),
        np.array([config.shortlist_for(count) for count in counts]),
        layer.pages.mean_value_norm.numpy(),
        sealed_end=np.zeros(len(counts), np.int64),
        ends=np.zeros(len(counts), np.int64),
    )


def _bases(layer: OvalLayer) -> loops.Bases:
    tensors = layer.pages.basis.tensors()
    return loops.Bases(*(tensors[name].numpy() for name in loops.Bases._fields))


def _choices(layer: OvalLayer) -> loops.Choices:
    router, config = layer.router, layer.config
    refine = isinstance(router, BasisRouter)
    tail = isinstance(router, BasisRouter) and router.estimate_tail
    return loops.Choices(config.sink_pages, config.window_pages, refine, tail)


def _tail_mask(layer: OvalLayer, table: loops.Table, mask: Tensor | None, group: int, queries: int) -> np.ndarray:
    """Which open tokens each query may read, bool `[B, G * Q, n]`; n = 0: all."""
    if queries == 1 and mask is None and layer.store.visible is None and not layer.store.is_ragged:
        return _ALL_TOKENS
    tail = table.ends - table.sealed_end
    last = tail[:, None] - queries + np.arange(queries)
    readable = np.arange(tail.max()) <= last[..., None]  # [B, Q, n]
    hidden = mask if mask is not None else layer.store.visible
    if hidden is not None:
        for row, (begin, end) in enumerate(zip(table.sealed_end, table.ends, strict=True)):
            shown = hidden[row, 0, :, begin:end] if mask is not None else hidden[row, begin:end]
            readable[row, :, : end - begin] &= shown.numpy()
    return np.tile(readable, (1, group, 1))


def _shows_sealed_tokens(layer: OvalLayer, mask: Tensor) -> bool:
    """Whether every query may read exactly the tokens that the bases were built from."""
    visible = layer.store.visible
    for row, table in enumerate(layer.tables):
        shown = mask[row, 0, :, table.first : table.sealed_end]
        if visible is None:
            if not bool(shown.all()):
                return False
        elif not bool((shown == visible[row, table.first : table.sealed_end]).all()):
            return False
    return True
