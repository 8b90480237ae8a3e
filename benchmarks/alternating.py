"""Time variants fairly on a noisy machine: in turns, in one process, medians after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

WARM_UP_ROUNDS = 3
Clock = Callable[[Callable[[], object]], float]


def wall_s(call: Callable[[], object]) -> float:
    """Seconds that `call` takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def time_in_turns(
    variants: Mapping[str, Callable[[], object]], rounds: int, clock: Clock = wall_s
) -> dict[str, list[float]]:
    """Seconds of `rounds` calls of each variant; every round calls each once, after a few that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(WARM_UP_ROUNDS + rounds):
        for name, call in variants.items():
            spent = clock(call)
            if turn >= WARM_UP_ROUNDS:
                seconds[name].append(spent)
    return seconds


def median_ms(seconds: list[float]) -> float:
    """Median in milliseconds."""
    return statistics.median(seconds) * 1e3


def speedup(seconds: Mapping[str, list[float]], over: str, of: str) -> float:
    """Median of the ratios `over / of` within a round: a disturbance that hits a whole round cancels out."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[of], strict=True))
