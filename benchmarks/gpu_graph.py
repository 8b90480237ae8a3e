"""Calls as CUDA graphs: the work of the GPU without the Python that launches it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.alternating import WARM_UP_ROUNDS
from oval_core import memory

REASON_CHARACTERS = 160
Call = Callable[[], object]


def captured(calls: dict[str, Call]) -> tuple[dict[str, Call], str]:
    """Replays of the calls that could be captured as CUDA graphs, and why others could not."""
    graphs: dict[str, Call] = {}
    refused = []
    for name, call in calls.items():
        try:
            graphs[name] = _graph_of(call)
        except RuntimeError as error:
            refused.append(f"{name} was not captured: {root_of(error)}")
    return graphs, "; ".join(refused)


def root_of(error: BaseException) -> str:
    """The first line of what went wrong first."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}".splitlines()[0][:REASON_CHARACTERS]


def _graph_of(call: Call) -> Call:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # relaxed: a call may allocate pinned memory; a capture that fails does not give the stream back
    with torch.cuda.stream(stream), _kept_numbers() as kept:
        for _ in range(WARM_UP_ROUNDS):
            call()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="relaxed"):
            call()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(kept: object = kept) -> None:  # what the graph reads lives as long as it does
        graph.replay()

    return replay


@contextmanager
def _kept_numbers() -> Iterator[dict[Any, Any]]:
    """Inside the `with` block, numbers that Python sends to a device stay in the host memory that they were sent from.

    A replay copies them again, long after `memory.on_device` has given its own back. Numbers that were sent before are
    not sent again.
    """
    send, kept = memory.on_device, dict[Any, Any]()

    def keep(numbers: Sequence[Any], device: torch.device) -> Tensor:
        key = (repr(numbers), device)
        if key not in kept:
            host = torch.tensor(numbers, dtype=torch.long, device="cpu").pin_memory()
            kept[key] = host, host.to(device, non_blocking=True)
        sent: Tensor = kept[key][1]
        return sent

    users = [module for name, module in sys.modules.items() if name.startswith("oval_core.")]
    users = [module for module in users if getattr(module, "on_device", None) is send]
    for module in users:
        setattr(module, "on_device", keep)  # noqa: B010
    try:
        yield kept
    finally:
        for module in users:
            setattr(module, "on_device", send)  # noqa: B010
