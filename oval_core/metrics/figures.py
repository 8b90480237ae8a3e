"""Readings of a watched model, the ranges they should lie in, and a collector that exports them to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from oval_core.attach import Handle
from oval_core.metrics.page_use import graph_density, head_use
from oval_core.metrics.watch import Snapshot, Watch


class Range(NamedTuple):
    """Values from `low` to `high`, both included, are healthy."""

    low: float
    high: float


# Below: pages that matter are missed. Raise the budget, or train the router.
ROUTE_HIT_RATE = Range(0.85, 1.0)
# Below: the context is longer than the answer needs. Above: nearly every page is read at some time.
PAGE_UTILIZATION = Range(0.6, 0.8)
# Below: selections share little from step to step. Above: the same pages are read together all the time.
GRAPH_DENSITY = Range(0.05, 0.15)
# Below: OVAL is hardly worth its metadata.
BANDWIDTH_SAVED = Range(0.25, 1.0)

HEALTHY: Mapping[str, Range] = {
    "route_hit_rate": ROUTE_HIT_RATE,
    "page_utilization": PAGE_UTILIZATION,
    "graph_density": GRAPH_DENSITY,
    "bandwidth_saved": BANDWIDTH_SAVED,
}
# Above: selecting costs more than reading less saves. A CPU takes longer by its nature, see docs/claims.md.
HEALTHY_ON_CUDA: Mapping[str, Range] = {**HEALTHY, "route_latency_p99_seconds": Range(0.0, 0.3e-3)}

MEANINGS: Mapping[str, str] = {
    "route_hit_rate": "Share of the attention mass of sealed pages that lies on pages read exactly",
    "page_utilization": "Share of the sealed pages that were ever read exactly",
    "graph_density": "Share of the pairs of pages that are read together in half of the steps that read either",
    "route_latency_p50_seconds": "Median time of a selection of one layer",
    "route_latency_p99_seconds": "Time that 99 of 100 selections of one layer do not exceed",
    "bandwidth_saved": "Share of the bytes of dense decoding that were not read",
    "kv_efficiency": "Bytes read over those of the keys and values in full pages of the budget",
    "context_tokens": "Tokens in the cache",
}


def readings(snapshot: Snapshot) -> dict[str, float | None]:
    """The figures by the names of `MEANINGS`, since the cache was last empty; None where nothing was measured.

    `kv_efficiency` is actual over theoretical bytes. Theoretical are the keys and values that a KV head reads if all
    pages of its budget are full (of all tokens, where these are fewer); actual are all bytes read, metadata included.
    Above 1: metadata, more open tokens than a page, steps that are dense though the budget does not cover everything.
    Below 1: short pages.
    """
    report = snapshot.report
    ratio, budgeted = report.get("read_ratio"), report.get("bytes_budgeted")
    return {
        "route_hit_rate": report.get("route_hit_rate"),
        "page_utilization": report.get("page_utilization"),
        "graph_density": graph_density(snapshot.selections),
        "route_latency_p50_seconds": report.get("route_latency_p50_s"),
        "route_latency_p99_seconds": report.get("route_latency_p99_s"),
        "bandwidth_saved": None if ratio is None else 1 - ratio,
        "kv_efficiency": report["bytes_read"] / budgeted if budgeted else None,
        "context_tokens": report.get("context_tokens"),
    }


def ranges(device_type: str) -> Mapping[str, Range]:
    """What is healthy on a device of this type, by the names of `MEANINGS`."""
    return HEALTHY_ON_CUDA if device_type == "cuda" else HEALTHY


def health(figures: Mapping[str, float | None], device_type: str) -> dict[str, str]:
    """What of `readings` is out of its range: name -> what is expected and what came.

    Args:
        device_type: where the model runs, `Snapshot.device_type`.
    """
    found = {}
    for name, (low, high) in ranges(device_type).items():
        value = figures.get(name)
        if value is not None and not low <= value <= high:
            found[name] = f"expected {low} to {high}, got {value:.3g}"
    return found


class OvalCollector:
    """A collector for `prometheus_client`: gauges `oval_...` of one handle, and `oval_healthy` for each range.

    What was not measured yet is left out. Scraping reads the newest snapshot and does not wait for the model.

    Args:
        handle: of a model that is attached.
        settings: of the `Watch` that the collector makes, such as `trace_every` and `refresh_s`.

    Raises:
        ImportError: prometheus_client is not installed.

    Attributes:
        watch: that watch; its `on_low_hit_rate` may ask for a training, see `oval_core.metrics.retrain`.
    """

    def __init__(self, handle: Handle, **settings: Any) -> None:
        try:
            from prometheus_client.core import GaugeMetricFamily
        except ImportError as error:
            raise ImportError(
                f"OvalCollector needs prometheus_client, pip install 'oval-suite[metrics]': {error}"
            ) from None
        self._gauge = GaugeMetricFamily
        self.watch = Watch(handle, **settings)

    def collect(self) -> Iterator[Any]:
        """The metric families, as `prometheus_client` wants them."""
        snapshot = self.watch.snapshot
        figures = {name: value for name, value in readings(snapshot).items() if value is not None}
        for name, value in figures.items():
            yield self._gauge(f"oval_{name}", MEANINGS[name], value=value)
        unhealthy = health(figures, snapshot.device_type)
        healthy = self._gauge("oval_healthy", "1 where a figure is in its range, else 0", labels=["figure"])
        for name in (name for name in ranges(snapshot.device_type) if name in figures):
            healthy.add_metric([name], 0.0 if name in unhealthy else 1.0)
        yield healthy
        use = self._gauge(
            "oval_kv_head_use", "Share of the pages read lately by a KV head", labels=["layer", "kv_head"]
        )
        for layer, selections in snapshot.selections.items():
            for head, share in enumerate(head_use(selections)):
                use.add_metric([str(layer), str(head)], share)
        yield use

    def describe(self) -> list[Any]:
        """Nothing: the names depend on what was measured, and registering must not collect."""
        return []

    def close(self) -> None:
        """Stop watching; unregister the collector before."""
        self.watch.close()
