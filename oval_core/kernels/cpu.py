"""Selecting and reading as one compiled call a layer, for CPUs; the loops are in `cpu_loops.py`.

For the routers in `FUSED_ROUTERS`; tier functions on their own, for all others, are those of the reference.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from oval_core.kernels import cpu_loops as loops
from oval_core.kernels.reference import attend, attend_pages, coarse_scores, evaluate_bases, merge
from oval_core.routers.base import Selection
from oval_core.routers.basis import BasisRouter
from oval_core.routers.box import BoxRouter

if TYPE_CHECKING:
    from oval_core.layer import OvalLayer

__all__ = [
    "FUSED_ROUTERS",
    "attend",
    "attend_pages",
    "cascade",
    "coarse_scores",
    "evaluate_bases",
    "merge",
    "unsupported",
    "warm_up",
]

# torch's OpenMP threads spin between operations; a pool of its own would fight them for the cores.
_settings: Any = numba.config
_settings.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]

FUSED_ROUTERS = (BasisRouter, BoxRouter)
_STORED_AS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16}
MESSAGE_AFTER_S = 2.0
_ALL_TOKENS = np.ones((1, 0, 0), np.bool_)
_numba = threading.local()  # how many threads Numba was told to use, from each thread
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
        query: `[B, heads, Q, D]`.
        mask: bool `[B, 1, Q, T]` or None.

    Returns: float32 `[B, Q, heads, D_v]`, and the selection (its tail is already inside the output).
    """
    batch, heads, queries, _ = query.shape
    tokens, plan = _tokens(layer), _plan(layer)
    kv_heads, value_dim = tokens.keys.shape[1], tokens.values.shape[3]
    out = torch.empty(batch, queries, heads, value_dim, dtype=torch.float32, device="cpu")
    picked = torch.zeros(batch, kv_heads, plan.most_pages, dtype=torch.long, device="cpu")
    valid = torch.zeros(batch, kv_heads, plan.most_pages, dtype=torch.bool, device="cpu")
    loops.cascade(
        query.float().contiguous().numpy(),
        _tail_mask(layer, mask, heads // kv_heads, queries),
        tokens,
        plan.packed,
        np.float32(scaling),
        _use_threads_of_torch(),
        out.numpy(),
        picked.numpy(),
        valid.numpy(),
    )
    return out, Selection(picked, valid)


def _use_threads_of_torch() -> int:
    """Let Numba's next loops use as many threads as torch; how many."""
    threads = min(torch.get_num_threads(), _settings.NUMBA_NUM_THREADS)
    if getattr(_numba, "threads", 0) != threads:
        numba.set_num_threads(threads)
        _numba.threads = threads
    return threads


def warm_up(dtype: torch.dtype, *_: object) -> None:
    """See `api.Kernels.warm_up`; one compilation serves any model. Says so if it takes long."""
    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer

    if dtype not in _STORED_AS:
        return
    config = OvalConfig(page_size=8, budget_pages=3, rank=1, seal_tokens=1, stats_every=0)
    layer = OvalLayer(config, None, 0)
    for tokens in (16, 1):
        layer.update(torch.zeros(1, 1, tokens, 8, dtype=dtype), torch.zeros(1, 1, tokens, 8, dtype=dtype))
        layer.attended(None)
    threads = torch.get_num_threads()
    notice = threading.Timer(MESSAGE_AFTER_S, lambda: print(_COMPILING, file=sys.stderr, flush=True))
    notice.start()
    try:
        cascade(torch.zeros(1, 1, 1, 8), layer, None, 1.0)
    finally:
        notice.cancel()
        torch.set_num_threads(threads)  # Numba's first parallel call sets it to all cores


_COMPILING = "OVAL: compiling the CPU kernels (about a minute, once; later processes load them from disk) ..."


def _tokens(layer: OvalLayer) -> loops.Tokens:
    store = layer.store
    address = store.storage[0].data_ptr()  # `share_memory_` moves what a tensor holds
    if store.derived.get("cpu_address") != address:
        keys, values = (storage.view(_STORED_AS[storage.dtype]).numpy() for storage in store.storage)
        visible = np.ones((keys.shape[0], 0), np.bool_) if store.visible is None else store.visible.numpy()
        store.derived |= {"cpu_address": address, "cpu_tokens": loops.Tokens(keys, values, visible)}
    tokens: loops.Tokens = store.derived["cpu_tokens"]
    return tokens


class _Plan(NamedTuple):
    """What the compiled call takes of a layer, the arrays whose addresses that holds, the most pages a row reads."""

    packed: loops.Packed
    arrays: list[np.ndarray]
    most_pages: int


def _plan(layer: OvalLayer) -> _Plan:
    derived = layer.pages.derived
    plan: _Plan | None = derived.get("cpu")
    if plan is None or plan.packed.numbers[loops.FIRST_ADDRESS] != layer.pages.basis.centroid.data_ptr():
        plan = derived["cpu"] = _new_plan(layer)
    plan.packed.rows[:, loops.SEALED_END :] = [(table.sealed_end, table.length) for table in layer.tables]
    return plan


def _new_plan(layer: OvalLayer) -> _Plan:
    config, pages, router, basis = layer.config, layer.pages, layer.router, layer.pages.basis
    budgets = [config.budget_for(count) - 1 for count in pages.counts]
    rows = [
        (count, budget, config.shortlist_for(count), 0, 0) for count, budget in zip(pages.counts, budgets, strict=True)
    ]
    tensors = [getattr(basis, name) for name in loops.Bases._fields]
    arrays = [tensor.numpy() for tensor in (*tensors, pages.starts, pages.lengths, pages.mean_value_norm)]
    sizes = loops.Sizes(basis.capacity_pages, basis.page_size, basis.rank, basis.value_offset.shape[3])
    tail = router.estimate_tail if isinstance(router, BasisRouter) else False
    choices = loops.Choices(config.sink_pages, config.window_pages, isinstance(router, BasisRouter), tail)
    numbers = np.array([*sizes, *choices, *(array.ctypes.data for array in arrays)])
    return _Plan(loops.Packed(numbers, np.array(rows)), arrays, max(budgets))


def _tail_mask(layer: OvalLayer, mask: Tensor | None, group: int, queries: int) -> np.ndarray:
    """Which open tokens each query may read, bool `[B, G * Q, n]`; n = 0: all."""
    if queries == 1 and mask is None and layer.store.visible is None and not layer.store.is_ragged:
        return _ALL_TOKENS
    tail = np.array([table.open_tokens for table in layer.tables])
    last = tail[:, None] - queries + np.arange(queries)
    readable = np.arange(tail.max()) <= last[..., None]  # [B, Q, n]
    hidden = mask if mask is not None else layer.store.visible
    if hidden is not None:
        for row, table in enumerate(layer.tables):
            begin, end = table.sealed_end, table.length
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
