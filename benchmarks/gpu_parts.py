"""The parts of `benchmarks.gpu`, each for one implementation and a list of cases; what is found is yielded at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu_checks import check_kernels
from benchmarks.gpu_clock import Budget, layer_clock
from benchmarks.gpu_layer import measure_layer
from benchmarks.gpu_model import measure_step, random_model
from benchmarks.gpu_rows import Case, Check, Row
from benchmarks.layer import copy_bandwidth


class Bandwidth(NamedTuple):
    """What a large copy reaches."""

    bytes_per_s: float


Item = Bandwidth | Check | Row


@dataclass(frozen=True)
class Part:
    """What one process measures.

    Attributes:
        kind: "checks", "layer", "eager" or "graph".
        cases: what is measured; of each one row. Checks look at `shapes` alone.
        dtypes: of keys and values; the first is measured, all are checked.
        share: of the budget, after which nothing new is begun.
    """

    kind: str
    impl: str
    cases: tuple[Case, ...]
    shapes: dict[str, tuple[int, int, int]]
    model_sizes: dict[str, Any]
    dtypes: tuple[torch.dtype, ...]
    device: torch.device
    rounds: int
    budget: Budget
    share: float

    def empty(self, case: Case, reason: str) -> Row:
        """The row of a case that is not measured."""
        return Row(self.kind, case.shape, case.context, case.batch, self.impl, reason)


def measure(part: Part) -> Iterator[Item]:
    """Checks; or the bandwidth, and one row a case. What fails is said in its row.

    Raises whatever made the device unusable: only a new process goes on from there.
    """
    torch.manual_seed(0)
    if part.kind == "checks":
        for shape, sizes in part.shapes.items():
            for dtype in part.dtypes:
                yield from check_kernels(part.impl, shape, sizes, dtype, part.device)
        return
    if part.kind == "layer":
        bandwidth = copy_bandwidth(part.device, layer_clock(part.device))
        yield Bandwidth(bandwidth)
        one = partial(measure_layer, bandwidth=bandwidth, dtype=part.dtypes[0], device=part.device)
    else:
        model = cache(partial(random_model, part.model_sizes, part.dtypes[0], part.device))
        one = partial(measure_step, model, graph=part.kind == "graph")
    for case in part.cases:
        empty = part.empty(case, "")
        yield _measured(partial(one, case, part.impl, rounds=part.rounds), empty, part)


def _measured(one: partial[Row], empty: Row, part: Part) -> Row:
    reason = part.budget.spent(part.share)
    if reason is not None:
        return replace(empty, reason=reason)
    try:
        return one()
    except Exception as error:  # whatever a driver raises: the other cases go on
        if part.device.type == "cuda":
            torch.cuda.synchronize()  # raises again if nothing can go on
            torch.cuda.empty_cache()
        return replace(empty, reason=f"{type(error).__name__}: {error}".splitlines()[0])
