"""Allocating what outlives a forward pass, copying rows out of it, and moving numbers to where it lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

Method = TypeVar("Method", bound=Callable[..., Any])


def lasting(method: Method) -> Method:
    """Let what `method` allocates be written later on, inside `torch.inference_mode` or outside of it."""
    return torch.inference_mode(False)(torch.no_grad()(method))


def on_device(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Python integers (nested alike) as an int64 tensor on `device`; nobody waits for the copy.

    Raises RuntimeError while a CUDA graph is captured, see `refuse_capture`.
    """
    refuse_capture(device)
    tensor = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError while the current stream of a CUDA `device` is captured: a replay would reuse old numbers."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "OVAL's attention cannot be captured in a CUDA graph: page numbers and lengths come from Python at every "
            "step, a replay would use those of the captured one. Run it outside of torch.cuda.graph"
        )


def take(tensor: Tensor, index: Tensor) -> Tensor:
    """Copy `tensor [B, H, N, ...]` at `index [B, H, k]` into `[B, H, k, ...]`, whole rows at a time."""
    rows, first = rows_of(tensor)
    return rows.index_select(0, (first + index).flatten()).view(*index.shape, *tensor.shape[3:])


def rows_of(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor [B, H, N, ...]` as rows `[R, ...]`, without a copy, and the row that each head begins with, `[B, H, 1]`.

    The tensor may be the start of a longer one (`[:, :, :n]`): rows are addressed through its strides.
    """
    batch, heads, count = tensor.shape[:3]
    to_row, to_head, step = tensor.stride()[:3]
    row = torch.arange(batch, device=tensor.device)[:, None, None] * (to_row // step)
    head = torch.arange(heads, device=tensor.device)[:, None] * (to_head // step)
    rows = (batch - 1) * (to_row // step) + (heads - 1) * (to_head // step) + count
    return tensor.as_strided((rows, *tensor.shape[3:]), tensor.stride()[2:]), row + head
