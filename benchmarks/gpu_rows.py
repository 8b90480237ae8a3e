"""What `benchmarks.gpu` reports: rows of figures, or the reason why there is none."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.markdown import Result, table


@dataclass(frozen=True)
class Case:
    """What is measured: a name, query heads, KV heads and head dimension, tokens in the cache, rows."""

    shape: str
    sizes: tuple[int, int, int]
    context: int
    batch: int


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        part: "layer" (one attention layer), or "eager" or "graph" (a whole decoding step of a model).
        impl: the kernel implementation.
        reason: why figures are missing; None: none is.
        dense_ms, oval_ms: medians. Dense is SDPA's FlashAttention for a layer, the fastest of the caches for a step.
        graph_ms: of the same layer replayed as a CUDA graph, which needs no Python.
        vs_dense, graph_vs_dense: how many times faster than dense.
        floor_ms: the bytes that OVAL reads over the bandwidth that a large copy reaches.
        of_floor: `floor_ms / graph_ms`; `floor_ms / oval_ms` where there is no graph.
        read_ratio: bytes that OVAL reads over those that dense reads.
        parts_ms: means of the kernels of a layer, or medians of the caches that dense was measured with.
    """

    part: str
    shape: str
    context: int
    batch: int
    impl: str
    reason: str | None = None
    dense_ms: float | None = None
    oval_ms: float | None = None
    graph_ms: float | None = None
    vs_dense: float | None = None
    graph_vs_dense: float | None = None
    floor_ms: float | None = None
    of_floor: float | None = None
    read_ratio: float | None = None
    parts_ms: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Check:
    """One kernel against the reference: the largest difference and how much was allowed."""

    impl: str
    shape: str
    kernel: str
    error: float
    allowed: float

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; one that is no number is not."""
        return self.error <= self.allowed


def gpu_table(result: Result) -> str:
    """One line a row."""
    head = (
        "part",
        "shape",
        "context",
        "batch",
        "kernels",
        "dense [ms]",
        "OVAL [ms]",
        "as a graph [ms]",
        "vs dense",
        "graph vs dense",
        "of floor",
        "parts [ms], notes",
    )
    return table(head, [_line(row) for row in result["rows"]])


def _line(row: Result) -> tuple[str, ...]:
    name = (row["part"], row["shape"], f"{row['context']:,}", str(row["batch"]), row["impl"])
    faster = ("–" if row[name] is None else f"{row[name]:.2f}x" for name in ("vs_dense", "graph_vs_dense"))
    share = "–" if row["of_floor"] is None else f"{row['of_floor']:.0%}"
    notes = [f"{part} {ms:.3f}" for part, ms in row["parts_ms"].items()]
    if row["reason"] is not None:
        notes.append(row["reason"])
    times = (_ms(row[column]) for column in ("dense_ms", "oval_ms", "graph_ms"))
    return (*name, *times, *faster, share, ", ".join(notes))


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
