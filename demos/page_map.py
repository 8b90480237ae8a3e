"""A picture of sparsity: which pages each generated token read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from oval_core.stats import TraceEntry


def draw_page_map(trace: Sequence[TraceEntry], path: Path, title: str, layers: int = 4) -> None:
    """Write a PNG with one panel for each of a few layers: pages from left to right, steps from top to bottom.

    Args:
        trace: from `handle.trace()`, of one row.
        path: where the picture goes.
        title: stands above the panels.
        layers: panels, spread evenly over the paged layers.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = pyplot.get_cmap("magma_r").with_extremes(bad="lightgrey")
    shown = _spread(sorted({entry.layer_idx for entry in trace}), layers)
    figure, axes = pyplot.subplots(
        len(shown), 1, figsize=(11, 2.2 * len(shown)), sharex=True, squeeze=False, layout="constrained"
    )
    for panel, layer in zip(axes[:, 0], shown, strict=True):
        image = panel.imshow(_share_of_heads(trace, layer).numpy(), aspect="auto", cmap=colours, vmin=0, vmax=1)
        panel.set(ylabel="step", title=f"layer {layer}")
    axes[-1, 0].set_xlabel("sealed page (grey: not there yet; the open page, always read, is not drawn)")
    figure.suptitle(title)
    figure.colorbar(image, ax=axes[:, 0].tolist(), label="share of KV heads that read the page")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _spread(layers: list[int], wanted: int) -> list[int]:
    """`wanted` of the layers, evenly, first and last included."""
    last, steps = len(layers) - 1, max(wanted - 1, 1)
    return sorted({layers[round(i * last / steps)] for i in range(wanted)})


def _share_of_heads(trace: Sequence[TraceEntry], layer: int) -> torch.Tensor:
    """`[steps, pages]`, NaN for pages that a step does not have yet."""
    rows = [entry.read[0].float().mean(0) for entry in trace if entry.layer_idx == layer]
    pages = max(row.shape[0] for row in rows)
    return torch.stack([torch.nn.functional.pad(row, (0, pages - row.shape[0]), value=torch.nan) for row in rows])
