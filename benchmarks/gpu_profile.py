"""What a step is made of: the time of every kernel, as the profiler sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_clock import flush

ROUNDS = 5
MOST_PARTS = 12
FLUSHING = "ceil_"  # is part of the name of what overwrites the cache


def kernel_ms(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds a call in each kernel of the GPU, nothing cached at its start; the largest first, small ones summed.

    On a CPU: in torch's operations.
    """
    on_gpu, overwrite = device.type == "cuda", flush(device)
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(ROUNDS):
            overwrite()
            call()
        if on_gpu:
            torch.cuda.synchronize(device)
    spent: Counter[str] = Counter()
    for event in seen.key_averages():
        if FLUSHING not in event.key:
            spent[_short(event.key)] += event.self_device_time_total if on_gpu else event.self_cpu_time_total
    parts = {name: us / 1e3 / ROUNDS for name, us in spent.most_common() if us > 0}
    largest = dict(list(parts.items())[:MOST_PARTS])
    others = sum(parts.values()) - sum(largest.values())
    return largest | ({"others": others} if len(parts) > MOST_PARTS else {})


def _short(name: str) -> str:
    """`void at::native::radix_sort<float, ...>(...)` -> `radix_sort`."""
    return name.split("<")[0].split("(")[0].split("::")[-1].strip().removeprefix("void ")
