"""Timing on a GPU: by events, with a cold cache; how much fits, and how long there is."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.alternating import Clock, wall_s

FLUSH_BYTES = 256 * 1024**2  # more than any second-level cache holds


def layer_clock(device: torch.device) -> Clock:
    """Seconds of a call on `device`, none of whose input is cached.

    While a GPU's cache is overwritten the call is launched already: what is measured is the work of the GPU, unless
    launching takes longer than that.
    """
    if device.type != "cuda":
        return wall_s
    overwrite = flush(device)
    return lambda call: _event_s(call, overwrite)


def flush(device: torch.device) -> Callable[[], object]:
    """A call that overwrites what a GPU's cache holds, by an operation that no step has; on a CPU it does nothing."""
    return torch.zeros(FLUSH_BYTES // 4 if device.type == "cuda" else 0, device=device).ceil_


def step_clock(device: torch.device) -> Clock:
    """Seconds of a call on `device` from its first launch to its end, Python included."""
    return wall_s if device.type != "cuda" else lambda call: _event_s(call, torch.cuda.synchronize)


def _event_s(call: Callable[[], object], before: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def lacking_memory(device: torch.device, needed_bytes: float) -> str | None:
    """Why something of that size is not measured, or None."""
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (
        None if needed_bytes <= free else f"needs {needed_bytes / 1e9:.0f} GB of memory, {free / 1e9:.0f} GB are free"
    )


class Budget:
    """A stretch of time, the same in all processes.

    Args:
        minutes: how long, from now on.
    """

    def __init__(self, minutes: float) -> None:
        self._begin, self._seconds = time.monotonic(), 60 * minutes

    @property
    def end(self) -> float:
        """When it ends, of `time.monotonic`."""
        return self._begin + self._seconds

    def spent(self, share: float = 1.0) -> str | None:
        """Why nothing new is begun after a share of it, or None."""
        return "time is up" if time.monotonic() - self._begin >= share * self._seconds else None
