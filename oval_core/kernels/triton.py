"""The three tiers and their merge in Triton, for CUDA devices; under Triton's interpreter also for CPU tensors.

Each kernel has a file of its own: `triton_coarse.py`, `triton_basis.py`, `triton_exact.py`, `triton_merge.py`. Basis
fields, page numbers and runs of tokens are read where they lie; nothing is unpacked or gathered beforehand. A decoding
step without a mask takes few launches, see `triton_cascade.py`.

A decoding step without an attention mask never waits for the device: selections stay there, and of the numbers that
Python knows only the length changes from step to step; it is an argument of a kernel. With a mask it waits once a
layer, to see whether a new token is hidden; at the steps that `stats_every` samples it waits, too. An attempt to
capture such a step in a CUDA graph is refused (`memory.refuse_capture`). Between it and a graph stand:

- Shapes grow: scores are as wide as there are pages, shortlist and budget are shares of these. A graph wants the
  capacity of `SealedPages`, upper bounds, and counts on the device.
- `PageStore.append` writes where Python says, the length is an argument: a replay would use those of the captured step.
  Both want a counter on the device that the graph itself advances.
- `PageStore` and `SealedPages` move when they grow, so a graph is good until then; pages are sealed between replays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from oval_core.config import OvalConfig
from oval_core.kernels import triton_basis, triton_cascade, triton_coarse, triton_exact, triton_merge
from oval_core.kernels.api import Partial
from oval_core.kernels.reference import attend
from oval_core.kernels.triton_cascade import FUSED_ROUTERS, unsupported

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

WARM_UP_PAGES = 64  # at least; twice the budget, so that some are not read

First = TypeVar("First", bound=Tensor | list[Partial])
Rest = ParamSpec("Rest")
Result = TypeVar("Result")


def on_its_device(function: Callable[Concatenate[First, Rest], Result]) -> Callable[Concatenate[First, Rest], Result]:
    """Let `function` launch where its first argument lives: Triton launches on the current device."""

    @wraps(function)
    def launched(first: First, *args: Rest.args, **kwargs: Rest.kwargs) -> Result:
        device = first.device if isinstance(first, Tensor) else first[0].out.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return function(first, *args, **kwargs)
        with torch.cuda.device(device):
            return function(first, *args, **kwargs)

    return launched


attend_pages = on_its_device(triton_exact.attend_pages)
cascade = on_its_device(triton_cascade.cascade)
coarse_scores = on_its_device(triton_coarse.coarse_scores)
evaluate_bases = on_its_device(triton_basis.evaluate_bases)
merge = on_its_device(triton_merge.merge)


def warm_up(dtype: torch.dtype, device: torch.device, model_config: PreTrainedConfig, config: OvalConfig) -> None:
    """See `api.Kernels.warm_up`: the kernels of a decoding step of one row, if the router is a fused one."""
    config = config.for_device(device)
    heads = getattr(model_config, "num_attention_heads", None)
    if device.type != "cuda" or heads is None or config.router not in [router.name for router in FUSED_ROUTERS]:
        return
    kv_heads = getattr(model_config, "num_key_value_heads", None) or heads
    dim = getattr(model_config, "head_dim", None) or model_config.hidden_size // heads
    with torch.inference_mode():
        step_of_zeros((heads, kv_heads, dim), dtype, device, config)


def step_of_zeros(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device, config: OvalConfig) -> None:
    """One decoding step of a layer of that many query heads, KV heads and dimensions."""
    from oval_core.layer import OvalLayer

    heads, kv_heads, dim = sizes
    layer = OvalLayer(config, None, 0)
    pages = max(WARM_UP_PAGES, 2 * (config.budget_pages or 0))
    for tokens in (pages * config.page_size + config.seal_tokens, 1):
        new = torch.zeros(1, kv_heads, tokens, dim, dtype=dtype, device=device)
        layer.update(new, new)
        layer.attended(None)
    cascade(torch.zeros(1, heads, 1, dim, dtype=dtype, device=device), layer, None, 1.0)
