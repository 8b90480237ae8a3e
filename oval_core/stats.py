"""What was read: the recorder that attention writes to, and the report that `handle.stats()` returns."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oval_core.routers.oracle import exact_log_mass

if TYPE_CHECKING:
    from oval_core.config import OvalConfig
    from oval_core.layer import OvalLayer
    from oval_core.routers import Pages, Router, Selection


@dataclass(frozen=True)
class TraceEntry:
    """One selection: decoding step, layer index, and which pages were read, bool `[B, H, P]` on the CPU."""

    step: int
    layer_idx: int
    read: Tensor


class Recorder:
    """Counts what the decoding steps of one attached model read. A step is one forward pass over a filled cache.

    Args:
        config: `stats_every` is read from it.
    """

    def __init__(self, config: OvalConfig) -> None:
        self.config = config
        self.trace: list[TraceEntry] | None = None
        self.reset()

    def reset(self) -> None:
        """Start a new generation."""
        self.step = 0
        self.context_tokens = 0
        self.dense_steps: Counter[str] = Counter()
        self._noted: set[tuple[int, str]] = set()
        self._bytes_read = self._bytes_dense = self._metadata_bytes = 0
        self._page_bytes_read: list[Tensor] = []
        self._pages: list[int] = []
        self._pages_read: list[Tensor] = []
        self._hit_rates: list[Tensor] = []
        self._route_s: list[float] = []
        self._ever_read: dict[int, Tensor] = {}
        self._sealed: dict[int, int] = {}

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

    def dense(self, layer: OvalLayer, num_queries: int, reason: str) -> None:
        """A layer read everything. Only decoding over a filled cache counts towards the bytes."""
        self.note(reason)
        self.context_tokens = max(self.context_tokens, layer.store.num_tokens)
        if num_queries <= self.config.max_sparse_query_tokens and num_queries < layer.store.num_tokens:
            dense_bytes = sum(layer.store.lengths) * _token_bytes(layer)
            self._bytes_read += dense_bytes
            self._bytes_dense += dense_bytes

    @contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Time a selection; on an accelerator only at sampled steps, because it has to wait for the device."""
        measures = device.type == "cpu" or self.samples
        if measures and device.type != "cpu":
            torch.accelerator.synchronize(device)
        begin = time.perf_counter()
        yield
        if measures:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            self._route_s.append(time.perf_counter() - begin)

    def paged(self, layer: OvalLayer, router: Router, pages: Pages, selection: Selection, query: Tensor) -> None:
        """A layer read `selection`."""
        store, config = layer.store, layer.config
        read = _read_pages(selection, pages)
        counts = [table.num_pages for table in layer.tables]
        metadata = sum(
            router.metadata_bytes(count, config.shortlist_for(count), layer.pages.basis, layer.pages.features)
            for count in counts
        )
        open_tokens = sum(table.open_tokens for table in layer.tables)
        self.context_tokens = max(self.context_tokens, store.num_tokens)
        self._metadata_bytes += query.shape[1] * metadata
        self._bytes_read += query.shape[1] * metadata + open_tokens * _token_bytes(layer)
        self._bytes_dense += sum(store.lengths) * _token_bytes(layer)
        self._page_bytes_read.append((read * pages.lengths[:, None]).sum() * _token_bytes(layer) // query.shape[1])
        self._pages.append(max(counts) + 1)
        self._pages_read.append(read.sum(-1).float().mean() + 1)
        self._remember(pages.layer_idx, read)
        self._sealed[pages.layer_idx] = query.shape[1] * sum(counts)
        if self.samples:
            self._hit_rates.append(_hit_rate(query, pages, read))
        if self.trace is not None:
            self.trace.append(TraceEntry(self.step, pages.layer_idx, read.cpu()))

    def _remember(self, layer_idx: int, read: Tensor) -> None:
        """Mark the pages that were ever read."""
        before = self._ever_read.get(layer_idx)
        if before is not None and before.shape[:2] == read.shape[:2]:
            shared = min(before.shape[2], read.shape[2])
            read = read.clone()
            read[..., :shared] |= before[..., :shared]
        self._ever_read[layer_idx] = read

    def report(self) -> dict[str, Any]:
        """The figures of section `handle.stats()` in the README; None where nothing was measured."""
        used = [int(read.sum()) / self._sealed[layer] for layer, read in self._ever_read.items()]
        bytes_read = self._bytes_read + sum(int(pages) for pages in self._page_bytes_read)
        return {
            "steps": self.step,
            "context_tokens": self.context_tokens,
            "pages": max(self._pages, default=None),
            "pages_read_mean": _mean([pages.item() for pages in self._pages_read]),
            "bytes_read": bytes_read,
            "bytes_dense": self._bytes_dense,
            "metadata_bytes": self._metadata_bytes,
            "read_ratio": bytes_read / self._bytes_dense if self._bytes_dense else None,
            "dense_steps": dict(self.dense_steps),
            "route_hit_rate": _mean([rate.item() for rate in self._hit_rates]),
            "page_utilization": _mean(used),
            "route_latency_p50_s": _percentile(self._route_s, 0.5),
            "route_latency_p99_s": _percentile(self._route_s, 0.99),
        }


def _read_pages(selection: Selection, pages: Pages) -> Tensor:
    """bool `[B, H, P]`."""
    read = torch.zeros(pages.basis.tokens.shape, dtype=torch.bool, device=selection.pages.device)
    return read.scatter_(-1, selection.pages, selection.valid)


def _hit_rate(query: Tensor, pages: Pages, read: Tensor) -> Tensor:
    """Share of the true attention mass of the sealed pages that lies on pages read exactly."""
    hit = (pages.weights(exact_log_mass(query, pages)) * read).sum(-1)  # [B, H]
    counts = pages.present().any(-1).expand_as(hit)  # a row without pages has no mass to miss
    return (hit * counts).sum() / counts.sum().clamp_min(1)


def _token_bytes(layer: OvalLayer) -> int:
    """Bytes of one token of one row, keys and values of all KV heads."""
    keys, values = layer.store.dense()
    return keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _percentile(values: list[float], share: float) -> float | None:
    """Nearest-rank percentile."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
