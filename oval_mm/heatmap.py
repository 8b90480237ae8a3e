"""A picture of what was looked at: the image pages that each token of an answer read.

`answer_heat` makes numbers of a trace, `views` finds what they lie on, `draw_heat` paints both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oval_core.page_table import TEXT, PageTable
from oval_core.stats import TraceEntry
from oval_mm.image_spans import ImageSpan, find_spans
from oval_mm.models import family_of

if TYPE_CHECKING:
    from PIL.Image import Image

TILES_ARE_CROPS = ("llava", "idefics3", "smolvlm")  # each grid shows one picture of `pixel_values`, not the whole image
ROWS_END_WITH_NEWLINE = ("llava_next", "llava_onevision")
PANELS, MOST_PANELS = 8, 32  # side by side, and in all
CELL_INCHES, COLOURS, OPACITY = 2.0, "YlOrRd", 0.6
LETTERS_PER_INCH = 9  # of the title


@dataclass(frozen=True)
class View:
    """What a grid of patches shows.

    Args:
        picture: stretched over the first `columns` columns of the grid; what lies right of them are newline tokens.
        label: stands beside it.
    """

    picture: Image
    columns: int
    label: str


def answer_heat(
    trace: Sequence[TraceEntry], tables: Mapping[int, PageTable], spans: Sequence[ImageSpan], steps: Sequence[int]
) -> list[Tensor]:
    """How much of each patch was read: for every span with a grid float32 `[steps, rows, columns]` in [0, 1].

    A value is the share of layers x KV heads that read the page of the patch exactly. What a layer read densely at a
    step, and tokens that are not sealed yet, count as read.

    Args:
        trace: from `handle.trace()`, of a batch of one row.
        tables: the page table of every paged layer, as it was after the last of `steps`.
        spans: of the row, see `prompt_spans`.
        steps: numbers of the steps that chose the tokens of the answer, as in the trace.

    Raises:
        ValueError: more than one row, or tables that do not hold the spans.
    """
    gridded = [span for span in spans if span.rows and span.columns]
    shares = {layer: _token_shares(_reads(trace, layer), table, steps) for layer, table in tables.items()}
    heats = []
    for span in gridded:
        layers = [shares[layer][:, patch_places(table, span)] for layer, table in tables.items()]
        heats.append(torch.stack(layers).mean(0).unflatten(1, (span.rows, span.columns)))
    return heats


def image_share(trace: Sequence[TraceEntry], tables: Mapping[int, PageTable], steps: Sequence[int]) -> float | None:
    """The share of image pages that were read, mean over steps, layers and KV heads; None without image pages."""
    shares = []
    for layer, table in tables.items():
        is_image = torch.tensor(table.tags) != TEXT
        reads = _reads(trace, layer)
        for step in steps if is_image.any() else ():
            read = reads.get(step)
            shares.append(1.0 if read is None else float(read[:, is_image[: read.shape[1]]].float().mean()))
    return sum(shares) / len(shares) if shares else None


def patch_places(table: PageTable, span: ImageSpan) -> Tensor:
    """Where the storage of a layer holds each patch of a span, row after row of its grid: int64 `[rows * columns]`.

    Pages are neighbours in the storage: this is all that tells pages of square blocks from pages that are runs.
    """
    if span.stop > table.length:
        raise ValueError(f"expected a page table with the span [{span.start}, {span.stop}), got {table.length} tokens")
    offsets = torch.arange(span.stop - span.start)
    for marked in table.spans:
        if marked.start == span.start and marked.blocks:
            offsets = torch.tensor(marked.order).argsort()
    return span.start + offsets


def _reads(trace: Sequence[TraceEntry], layer: int) -> dict[int, Tensor]:
    """What a layer read at each step, bool `[H, P]`."""
    entries = [entry for entry in trace if entry.layer_idx == layer]
    if any(len(entry.read) != 1 for entry in entries):
        raise ValueError(f"expected the trace of one row, got {len(entries[0].read)} rows")
    return {entry.step: entry.read[0] for entry in entries}


def _token_shares(reads: Mapping[int, Tensor], table: PageTable, steps: Sequence[int]) -> Tensor:
    """Share of KV heads that read the page of each stored token: float32 `[steps, T]`."""
    shares = torch.ones(len(steps), table.length)
    for row, step in zip(shares, steps, strict=True):
        if step in reads:
            heads = reads[step].float().mean(0)
            tokens = heads.repeat_interleave(torch.tensor(table.lengths[: len(heads)]))
            row[table.first : table.first + len(tokens)] = tokens
    return shares


def prompt_spans(model: Any, inputs: Mapping[str, Any]) -> list[ImageSpan]:
    """Where the pictures are in a prompt of one row, from what the processor made of it."""
    family, ids = family_of(model), inputs["input_ids"]
    pictures = family.in_prompt(ids, family.encoded(inputs) if inputs.get("pixel_values") is not None else [])
    return find_spans(ids, family.image_token_id, pictures, inputs.get("attention_mask"), family.settings)[0]


def views(
    model: Any, processor: Any, inputs: Mapping[str, Any], spans: Sequence[ImageSpan], images: Sequence[Image]
) -> list[View]:
    """What each grid of `answer_heat` lies on: what the model was shown, where that is not the whole image."""
    gridded, kind = [span for span in spans if span.rows and span.columns], model.config.model_type
    crops = _crops(processor.image_processor, inputs["pixel_values"]) if kind in TILES_ARE_CROPS else []
    numbers = [span.image for span in gridded]
    found = []
    for index, span in enumerate(gridded):
        part, parts = index - numbers.index(span.image), numbers.count(span.image)
        picture = crops[index] if len(crops) == len(gridded) else images[span.image]
        has_newlines = kind in ROWS_END_WITH_NEWLINE and part > 0
        label = f"image {span.image + 1}" + (f", part {part + 1} of {parts}" if parts > 1 else "")
        found.append(View(picture, int(span.columns or 0) - has_newlines, label))
    return found


def _crops(image_processor: Any, pixels: Tensor) -> list[Image]:
    """Pictures from normalised `[..., 3, height, width]`."""
    from PIL.Image import fromarray

    mean, deviation = (
        torch.tensor(getattr(image_processor, name))[:, None, None] for name in ("image_mean", "image_std")
    )
    shown = (pixels.flatten(0, -4).cpu().float() * deviation + mean).clamp(0, 1) * 255
    return [fromarray(picture.round().byte().permute(1, 2, 0).numpy()) for picture in shown]


def draw_heat(views: Sequence[View], heats: Sequence[Tensor], words: Sequence[str], path: Path, title: str) -> None:
    """Write a PNG: every view, and beside it one panel a token of the answer with its heat over it.

    Args:
        views, heats: alike in number; heats `[tokens, rows, columns]`, see `answer_heat`.
        words: one a token, along the top; of more than `MOST_PANELS` the first are drawn.
        path: where the picture goes.
        title: stands above all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import cm, colors, pyplot

    shown = words[:MOST_PANELS]
    panels = min(PANELS, len(shown))
    lines = [range(start, min(start + panels, len(shown))) for start in range(0, len(shown), panels)]
    rows, columns = len(lines) * len(views), 1 + panels
    size = (CELL_INCHES * columns + 1, 1.12 * CELL_INCHES * rows + 0.8)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for row, (line, index) in enumerate(product(lines, range(len(views)))):
        _draw_row(axes[row], views[index], heats[index], [(token, words[token]) for token in line], index == 0)
    if len(words) > len(shown):
        title = f"{title} (the first {len(shown)} of {len(words)} tokens)"
    title_lines = wrap(title, int(LETTERS_PER_INCH * size[0]), max_lines=3, placeholder=" …")
    figure.suptitle("\n".join(title_lines), parse_math=False)
    scale = cm.ScalarMappable(colors.Normalize(0, 1), COLOURS)
    label = "share of layers x KV heads\nthat read the page"
    figure.colorbar(scale, ax=axes.ravel().tolist(), label=label, alpha=OPACITY, fraction=0.03, aspect=30)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def _draw_row(axes: Sequence[Any], view: View, heat: Tensor, words: Sequence[tuple[int, str]], is_first: bool) -> None:
    """One view, and its heat for some tokens."""
    for panel in axes:
        panel.set_axis_off()
    picture = view.picture.convert("RGB")
    axes[0].imshow(picture)
    axes[0].text(-0.06, 0.5, view.label, transform=axes[0].transAxes, rotation=90, va="center", ha="right")
    grey = picture.convert("L")
    edges = (-0.5, picture.width - 0.5, picture.height - 0.5, -0.5)
    for panel, (token, word) in zip(axes[1:], words, strict=False):
        panel.imshow(grey, cmap="gray", vmin=-30, vmax=255)
        over = heat[token, :, : view.columns].numpy()
        panel.imshow(over, cmap=COLOURS, vmin=0, vmax=1, alpha=OPACITY, extent=edges, interpolation="nearest")
        if is_first:
            panel.set_title(word, fontweight="bold", parse_math=False)
