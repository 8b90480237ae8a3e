"""The picture of `benchmarks.quality`: KL against bytes read, one panel a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot_quality(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the plot to `path` (PNG); needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    texts = list(dict.fromkeys(row["text"] for row in rows))
    figure, axes = pyplot.subplots(1, len(texts), figsize=(5.5 * len(texts), 4.5), sharey=True, squeeze=False)
    routers = list(dict.fromkeys(row["router"] for row in rows))
    for panel, text in zip(axes[0], texts, strict=True):
        for index, router in enumerate(routers):
            points = sorted((r["bytes_ratio"], r["kl"]) for r in rows if (r["text"], r["router"]) == (text, router))
            style = "--" if router == "oracle" else "-"
            panel.plot(*zip(*points, strict=True), style, marker="o", color=f"C{index}", label=router)
        panel.set(title=text, xlabel="bytes read / dense bytes", yscale="log")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("KL to dense [nats]")
    axes[0][-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
