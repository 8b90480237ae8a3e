"""Linear layers over a few rows of float32 on a CPU: the transposed product, which reads the weights once.

BLAS libraries are made for many rows. A single one they multiply at less than the memory's speed, and two to eight, as
in the verification of a small draft, like many. `W x^T` has the weights where the many rows are; a single row is
counted twice for it. `python -m benchmarks.short_linears` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

MOST_ROWS = 8


@contextmanager
def quick_short_linears(model: nn.Module) -> Iterator[None]:
    """Inside the `with` block plain float32 `nn.Linear` layers on a CPU multiply up to `MOST_ROWS` rows the quick way.

    Layers whose `forward` somebody else has replaced, before or meanwhile, stay as they are.
    """
    plain = [module for module in model.modules() if isinstance(module, nn.Linear) and _is_plain(module)]
    ours = [(module, partial(_forward, module)) for module in plain]
    for module, forward in ours:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, forward in ours:
            if module.__dict__.get("forward") is forward:
                module.__dict__.pop("forward", None)


def _is_plain(module: nn.Linear) -> bool:
    if type(module) is not nn.Linear or "forward" in module.__dict__ or type(module.weight) is not nn.Parameter:
        return False
    return module.weight.device.type == "cpu" and module.weight.dtype == torch.float32


def _forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    if inputs.numel() > MOST_ROWS * module.in_features or inputs.dtype != torch.float32 or _is_special():
        return linear(inputs, module.weight, module.bias)
    out = few_rows(inputs.reshape(-1, module.in_features), module.weight).view(*inputs.shape[:-1], module.out_features)
    return out if module.bias is None else out + module.bias


def few_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T` for few rows: `[n, in]` and `[out, in]` -> `[n, out]`, contiguous."""
    if len(x) == 1:
        return (weight @ x.repeat(2, 1).T).T[:1].contiguous()
    return (weight @ x.T).T.contiguous()


def _is_special() -> bool:
    return torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
