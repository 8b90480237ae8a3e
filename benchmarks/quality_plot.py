"""The picture of `benchmarks.quality`: KL against bytes read and against time, one column a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]


def plot_quality(rows: Rows, path: Path) -> None:
    """Write the plot to `path` (PNG); needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    texts = list(dict.fromkeys(row["text"] for row in rows))
    figure, axes = pyplot.subplots(2, len(texts), figsize=(4.6 * len(texts), 8), sharey=True, squeeze=False)
    timed = [row for row in rows if row.get("layer_ms") is not None]
    for column, text in enumerate(texts):
        _panel(axes[0][column], [row for row in rows if row["text"] == text], "bytes_ratio")
        _panel(axes[1][column], [row for row in timed if row["text"] == text], "layer_ms")
        axes[0][column].set(title=text, xlabel="bytes read / dense bytes")
        axes[1][column].set(xlabel="milliseconds a layer (routers that run as compiled code)")
    for row in axes:
        row[0].set_ylabel("KL to dense [nats]")
    axes[0][-1].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _panel(panel: Any, rows: Rows, along: str) -> None:
    """One line a router, of the settings with its usual page size, rank and shortlist."""
    for index, router in enumerate(dict.fromkeys(row["router"] for row in rows)):
        points = sorted((row[along], row["kl"]) for row in rows if row["router"] == router)
        style = "--" if router == "oracle" else "-"
        panel.plot(*zip(*points, strict=True), style, marker="o", color=f"C{index}", label=router)
    panel.set(yscale="log")
    panel.grid(alpha=0.3)
