"""What was read: the recorder that attention writes to, and the report that `handle.stats()` returns."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from oval_core.pages_read import PagesRead
from oval_core.routers.oracle import exact_log_mass

if TYPE_CHECKING:
    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer
    from oval_core.routers import Pages, Selection

Result = TypeVar("Result")


@dataclass(frozen=True)
class TraceEntry:
    """One selection: decoding step, layer index, which pages were read, bool `[B, H, P]` on the CPU, and the pages
    that each row has: of P, those of the fullest row.
    """

    step: int
    layer_idx: int
    read: Tensor
    counts: tuple[int, ...]


class Recorder:
    """Counts what the decoding steps of one attached model read. A step is one forward pass over a filled cache.

    Args:
        config: `stats_every` is read from it.
    """

    def __init__(self, config: OvalConfig) -> None:
        self.config = config
        self.traces: list[list[TraceEntry]] = []  # those that are open
        self.reset()

    def reset(self) -> None:
        """Start a new generation."""
        self.step = 0
        self.context_tokens = 0
        self.dense_steps: Counter[str] = Counter()
        self.fallbacks: Counter[str] = Counter()
        self._noted: set[tuple[int, str]] = set()
        self._bytes_read = self._bytes_dense = self._bytes_budgeted = self._metadata_bytes = 0
        self._pages = self._selections = 0
        self._hit_rates: list[Tensor] = []
        self._route_s: list[float] = []
        self._router_counts: Counter[str] = Counter()
        self.unpageable: dict[int, str | None] = {}
        self._read: dict[tuple[int, int], PagesRead] = defaultdict(PagesRead)

    def next_step(self) -> None:
        """A forward pass begins."""
        self.step += 1

    @property
    def samples(self) -> bool:
        """Whether the hit rate is measured at this step: the first decoding step and every n-th after it."""
        every = self.config.stats_every
        return every > 0 and (self.step - 2) % every == 0

    def note(self, reason: str) -> None:
        """This step is dense for `reason` (counted once a step)."""
        if (self.step, reason) not in self._noted:
            self._noted.add((self.step, reason))
            self.dense_steps[reason] += 1

    def fall_back(self, reason: str) -> None:
        """The implementation asked for could not do all of a layer, or not in one call (counted once a step)."""
        if (self.step, reason) not in self._noted:
            self._noted.add((self.step, reason))
            self.fallbacks[reason] += 1

    def dense(self, layer: OvalLayer, num_queries: int, reason: str) -> None:
        """A layer read everything. Only decoding over a filled cache counts towards the bytes."""
        self.note(reason)
        self.context_tokens = max(self.context_tokens, layer.store.num_tokens)
        if num_queries <= self.config.max_sparse_query_tokens and num_queries < layer.store.num_tokens:
            dense_bytes = sum(layer.store.lengths) * layer.store.storage[0].shape[1] * layer.store.token_bytes
            self._bytes_read += dense_bytes
            self._bytes_dense += dense_bytes
            self._bytes_budgeted += _budgeted_bytes(layer)

    def timed(self, select: Callable[..., Result], query: Tensor, *arguments: Any) -> Result:
        """Time `select(query, *arguments)`; on an accelerator at sampled steps only, for it waits for the device."""
        waits = query.device.type != "cpu"
        if waits and not self.samples:
            return select(query, *arguments)
        if waits:
            torch.accelerator.synchronize(query.device)
        begin = time.perf_counter()
        result = select(query, *arguments)
        if waits:
            torch.accelerator.synchronize(query.device)
        self._route_s.append(time.perf_counter() - begin)
        return result

    def paged(self, layer: OvalLayer, selection: Selection, look: Callable[[], tuple[Tensor, Pages]]) -> None:
        """A layer read `selection`; `look` gives the queries `[B, H, G, Q, D]` and the pages it was chosen from."""
        counts, heads, token_bytes = layer.pages.counts, selection.pages.shape[1], layer.store.token_bytes
        metadata = _metadata_bytes(layer)
        self.context_tokens = max(self.context_tokens, layer.store.num_tokens)
        self._metadata_bytes += metadata
        self._bytes_read += metadata + heads * token_bytes * sum(table.open_tokens for table in layer.tables)
        self._bytes_dense += heads * token_bytes * sum(layer.store.lengths)
        self._bytes_budgeted += _budgeted_bytes(layer)
        self._pages = max(self._pages, max(counts) + 1)
        self._selections += heads * len(counts)
        self._router_counts.update(selection.counts or {})
        self._read[layer.layer_idx, token_bytes].add(layer, selection)
        if self.samples or self.traces:
            self._look_closer(layer, selection, look)

    def _look_closer(self, layer: OvalLayer, selection: Selection, look: Callable[[], tuple[Tensor, Pages]]) -> None:
        """Measure the hit rate, keep the selection: what is too costly for every step."""
        read = selection.mask(layer.pages.num_pages)
        if self.samples:
            self._hit_rates.append(_hit_rate(*look(), read))
        if self.traces:
            entry = TraceEntry(self.step, layer.layer_idx, read.cpu(), tuple(layer.pages.counts))
            for trace in self.traces:
                trace.append(entry)

    @contextmanager
    def tracing(self) -> Iterator[list[TraceEntry]]:
        """Collect the selections made inside the `with` block; other traces that are open get them, too."""
        entries: list[TraceEntry] = []
        self.traces.append(entries)
        try:
            yield entries
        finally:
            self.traces = [trace for trace in self.traces if trace is not entries]

    @property
    def hit_rates(self) -> list[Tensor]:
        """The hit rates measured so far, each `[]`: one a layer and sampled step, in their order."""
        return [*self._hit_rates]

    @property
    def bytes_read(self) -> int:
        """Bytes of keys, values and metadata read so far by passes over a filled cache."""
        return self._bytes_read + sum(token_bytes * read.num_tokens for (_, token_bytes), read in self._read.items())

    def report(self) -> dict[str, Any]:
        """The figures of section `handle.stats()` in the README; None where nothing was measured."""
        selected = sum(read.num_pages for read in self._read.values())
        bytes_read = self.bytes_read
        return {
            "steps": self.step,
            "context_tokens": self.context_tokens,
            "pages": self._pages or None,
            "pages_read_mean": selected / self._selections + 1 if self._selections else None,
            "bytes_read": bytes_read,
            "bytes_dense": self._bytes_dense,
            "bytes_budgeted": self._bytes_budgeted,
            "metadata_bytes": self._metadata_bytes,
            "read_ratio": bytes_read / self._bytes_dense if self._bytes_dense else None,
            "dense_steps": dict(self.dense_steps),
            "impl_fallbacks": dict(self.fallbacks),
            "router_counts": dict(self._router_counts),
            "route_hit_rate": _mean([rate.item() for rate in self._hit_rates]),
            "page_utilization": _mean([read.share for read in self._read.values()]),
            "route_latency_p50_s": _percentile(self._route_s, 0.5),
            "route_latency_p99_s": _percentile(self._route_s, 0.99),
        }


def _hit_rate(query: Tensor, pages: Pages, read: Tensor) -> Tensor:
    """Share of the true attention mass of the sealed pages that lies on pages read exactly."""
    hit = (pages.weights(exact_log_mass(query, pages)) * read).sum(-1)  # [B, H]
    counts = pages.present().any(-1).expand_as(hit)  # a row without pages has no mass to miss
    return (hit * counts).sum() / counts.sum().clamp_min(1)


def _budgeted_bytes(layer: OvalLayer) -> int:
    """Bytes of the keys and values in full pages of the budget, or of all tokens where these are fewer."""
    config, rows = layer.config, zip(layer.tables, layer.store.lengths, strict=True)
    tokens = sum(min(length, config.budget_for(table.num_pages) * config.page_size) for table, length in rows)
    return layer.store.storage[0].shape[1] * layer.store.token_bytes * tokens


def _metadata_bytes(layer: OvalLayer) -> int:
    """Bytes of metadata that one selection reads, all rows and KV heads."""
    pages, derived = layer.pages, layer.pages.derived
    key = "metadata_bytes", layer.router
    if key not in derived:
        read = partial(layer.router.metadata_bytes, basis=pages.basis, features=pages.features)
        per_head = sum(read(count, layer.config.shortlist_for(count)) for count in pages.counts)
        derived[key] = pages.basis.tokens.shape[1] * per_head
    size: int = derived[key]
    return size


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
