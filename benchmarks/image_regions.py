"""Whether the pages that were read show the asked-about object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.image_questions import Region, Rows
from oval_core.page_table import PageTable
from oval_core.stats import TraceEntry
from oval_mm.recipes.patches import patches_a_side
from oval_mm.recipes.shapes import Box


@dataclass(frozen=True)
class Grid:
    """The patches of an image: `side` x `side` of `patch_px` pixels, stored row after row."""

    side: int
    patch_px: int

    def patches(self, box: Box) -> list[int]:
        """Numbers of the patches that show a part of a box in pixels."""
        x0, y0, x1, y1 = (edge / self.patch_px for edge in box)
        rows, columns = (range(int(low), min(-int(-high // 1), self.side)) for low, high in ((y0, y1), (x0, x1)))
        return [row * self.side + column for row in rows for column in columns]


@dataclass(frozen=True)
class RegionsRead:
    """Sums over `selections`: one selection a word of an answer that is in one place, layer and KV head.

    Args:
        hits: selections with at least one page that shows a part of the object.
        shares: shares of the object's patches that the selected pages hold.
    """

    hits: float = 0.0
    shares: float = 0.0
    selections: int = 0

    def __add__(self, other: RegionsRead) -> RegionsRead:
        return RegionsRead(self.hits + other.hits, self.shares + other.shares, self.selections + other.selections)


def make_grid(processor: Any) -> Grid:
    """The grid of a `LlavaProcessor`'s images."""
    return Grid(patches_a_side(processor), processor.patch_size)


def shares_of_pages(table: PageTable, region: Region, grid: Grid) -> Tensor:
    """Share of the patches of a region that each page holds: float32 `[P]`."""
    spans = [span for span in table.spans if span.tag == region.image and span.stop - span.start == grid.side**2]
    patches = {spans[0].start + patch for patch in grid.patches(region.box)}
    pages = [page for page in range(table.num_pages) if table.tags[page] == region.image]
    shares = torch.zeros(table.num_pages)
    for page in pages:
        shares[page] = len(patches.intersection(table.positions(page))) / len(patches)
    return shares


def regions_read(rows: Rows, tables: Sequence[PageTable], entries: Sequence[TraceEntry], grid: Grid) -> RegionsRead:
    """What was read at the steps that chose the words of answers.

    Args:
        rows: read token by token, one step each.
        tables: one a row.
        entries: all of the same layers at every step, from the first token of the rows on.
        grid: of the images.
    """
    at, in_pages = list[tuple[int, int]](), list[Tensor]()
    for row, step in rows.is_word.nonzero().tolist():
        region = rows.talks[row].regions[int(rows.turn[row, step])]
        if region is not None:
            at.append((row, step))
            in_pages.append(shares_of_pages(tables[row], region, grid))
    if not at:
        return RegionsRead()
    row_of, step_of = torch.tensor(at).unbind(1)
    pages = entries[0].read.shape[-1]  # those sealed later are of text
    shares = torch.stack([one[:pages] for one in in_pages])[:, None, None]  # [n, 1, 1, P]
    read = torch.stack([entry.read[..., :pages] for entry in entries])
    read = read.unflatten(0, (rows.tokens.shape[1], -1))[step_of, :, row_of]  # [n, L, H, P]
    hits = (read & (shares > 0)).any(-1)
    return RegionsRead(float(hits.sum()), float((read * shares).sum()), hits.numel())
