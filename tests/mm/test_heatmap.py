"""From what was read to a picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from oval_core import OvalConfig
from oval_core.layer import OvalLayer
from oval_core.page_table import PageTable
from oval_core.stats import TraceEntry
from oval_mm import attach
from oval_mm.heatmap import MOST_PANELS, View, answer_heat, draw_heat, image_share, patch_places, prompt_spans, views
from oval_mm.image_spans import ImageSpan, blocks_of
from tests.mm.tiny_vlms import NAMES, photo, tiny, words

ROWS, COLUMNS, START = 4, 6, 3
SPAN = ImageSpan(0, START, START + ROWS * COLUMNS, ROWS, COLUMNS)


def page_table(block: int | None = None, sealed_tokens: int | None = None) -> PageTable:
    """3 tokens of text, 24 patches, 2 tokens of text; pages of 8."""
    table = PageTable(8)
    table.extend(START + ROWS * COLUMNS + 2)
    table.mark(SPAN.start, SPAN.stop, 0, blocks_of(ROWS, COLUMNS, block) if block else ())
    table.seal(sealed_tokens)
    return table


def entry(step: int, layer: int, *heads: list[int], pages: int = 4) -> TraceEntry:
    """Which pages each KV head read."""
    read = torch.zeros(1, len(heads), pages, dtype=torch.bool)
    for head, numbers in enumerate(heads):
        read[0, head, numbers] = True
    return TraceEntry(step, layer, read, (pages,))


def test_runs_of_patches_get_the_share_of_layers_and_heads() -> None:
    tables = {0: page_table(), 2: page_table()}
    trace = [entry(7, 0, [0, 1], [1, 3]), entry(7, 2, [1], [2])]
    (heat,) = answer_heat(trace, tables, [SPAN], [7])
    expected = torch.tensor([0.75, 0.25, 0.25]).repeat_interleave(8).view(1, ROWS, COLUMNS)
    assert torch.equal(heat, expected)


def test_square_blocks_lie_where_their_patches_are() -> None:
    tables = {0: page_table(block=2)}
    assert tables[0].num_pages == 7
    (heat,) = answer_heat([entry(1, 0, [0, 2, 6], pages=7)], tables, [SPAN], [1])
    expected = torch.zeros(ROWS, COLUMNS)
    expected[:2, 2:4] = 1  # the second block
    expected[2:, 4:] = 1  # the last one
    assert torch.equal(heat[0], expected)


@pytest.mark.parametrize("block", [None, 2])
def test_every_page_covers_its_own_patches(block: int | None) -> None:
    table = page_table(block)
    places = patch_places(table, SPAN)
    assert sorted(places.tolist()) == [*range(SPAN.start, SPAN.stop)]
    covered = torch.zeros(ROWS * COLUMNS)
    for page in range(1, table.num_pages):
        (heat,) = answer_heat([entry(1, 0, [page], pages=table.num_pages)], {0: table}, [SPAN], [1])
        assert heat.sum() == table.lengths[page]
        covered += heat.flatten()
    assert torch.equal(covered, torch.ones(ROWS * COLUMNS))


def test_tokens_that_are_not_sealed_count_as_read() -> None:
    (heat,) = answer_heat([entry(1, 0, [1], pages=2)], {0: page_table(sealed_tokens=START + 8)}, [SPAN], [1])
    assert heat.all()
    (heat,) = answer_heat([entry(1, 0, [0], pages=2)], {0: page_table(sealed_tokens=START + 8)}, [SPAN], [1])
    assert heat.flatten().tolist() == [0] * 8 + [1] * 16


def test_dense_steps_and_layers_count_as_read() -> None:
    tables = {0: page_table(), 1: page_table()}
    (heat,) = answer_heat([entry(2, 0, [0])], tables, [SPAN], [1, 2])
    assert heat[0].eq(1).all()
    assert heat[1].eq(0.5).all()


def test_padding_before_the_pages_is_left_out() -> None:
    table = PageTable(8)
    table.extend(4 + SPAN.stop)
    table.skip(4)
    table.mark(4 + SPAN.start, 4 + SPAN.stop, 0)
    table.seal()
    span = ImageSpan(0, 4 + SPAN.start, 4 + SPAN.stop, ROWS, COLUMNS)
    (heat,) = answer_heat([entry(1, 0, [3])], {0: table}, [span], [1])
    assert heat.flatten().tolist() == [0] * 16 + [1] * 8


def test_spans_without_a_grid_have_no_heat_and_several_rows_are_refused() -> None:
    assert answer_heat([], {0: page_table()}, [ImageSpan(0, 3, 27)], [1]) == []
    two_rows = TraceEntry(1, 0, torch.ones(2, 1, 4, dtype=torch.bool), (4, 4))
    with pytest.raises(ValueError, match="the trace of one row, got 2"):
        answer_heat([two_rows], {0: page_table()}, [SPAN], [1])
    with pytest.raises(ValueError, match=r"with the span \[3, 99\), got 29 tokens"):
        answer_heat([], {0: page_table()}, [ImageSpan(0, 3, 99, 8, 12)], [1])


def test_the_share_of_image_pages_leaves_text_out() -> None:
    table = page_table()
    assert image_share([entry(1, 0, [0, 1], [2, 3])], {0: table}, [1]) == 0.5
    assert image_share([entry(1, 0, [0, 1], [2, 3])], {0: table}, [1, 2]) == 0.75
    text = PageTable(8)
    text.extend(20)
    text.seal()
    assert image_share([], {0: text}, [1]) is None


@pytest.mark.parametrize("block", [None, 2])
@pytest.mark.parametrize("name", NAMES)
def test_what_a_model_read_lies_on_what_it_was_shown(name: str, block: int | None, tmp_path: Path) -> None:
    vlm, images = tiny(name), [photo(0), photo(1, 70, 30)]
    inputs = vlm.inputs((f"{words(9)} * {words(2)} * {words(3)}", images))
    config = OvalConfig(page_size=8, budget_pages=4, seal_tokens=1, impl="reference")
    with attach(vlm.model, vlm.processor, config, block=block) as handle, handle.trace() as trace:
        output = vlm.model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    spans, tables = prompt_spans(vlm.model, inputs), layer_tables(output.past_key_values)
    heats = answer_heat(trace, tables, spans, [2, 3, 4])
    shown = views(vlm.model, vlm.processor, inputs, spans, images)
    assert len(heats) == len(shown) >= 2
    assert all(float(heat.min()) >= 0 and float(heat.max()) <= 1 for heat in heats)
    assert_mean_is_share(heats, tables, trace, spans)
    draw_heat(shown[:2], heats[:2], ["$one", "two", "_"], tmp_path / "heat.png", "title")
    assert (tmp_path / "heat.png").read_bytes().startswith(b"\x89PNG")


def layer_tables(cache: Any) -> dict[int, PageTable]:
    return {layer.layer_idx: layer.tables[0] for layer in cache.layers if isinstance(layer, OvalLayer)}


def assert_mean_is_share(heats: list[Tensor], tables: Any, trace: list[TraceEntry], spans: list[ImageSpan]) -> None:
    """The patches that are hot are as many as the tokens of the gridded pages that were read."""
    starts = {token for span in spans if span.rows for token in range(span.start, span.stop)}
    tokens = 0.0
    for one in trace:
        table = tables[one.layer_idx]
        lengths = [length * (start in starts) for start, length in zip(table.starts, table.lengths, strict=True)]
        tokens += float((one.read[0].float().mean(0) * torch.tensor(lengths[: one.read.shape[-1]])).sum())
    assert sum(float(heat.sum()) for heat in heats) * len(tables) == pytest.approx(tokens, rel=1e-4)


def test_llava_is_shown_the_middle_of_a_wide_picture() -> None:
    vlm = tiny("llava")
    wide = Image.new("RGB", (100, 50), "red")
    wide.paste("blue", (25, 0, 75, 50))
    inputs = vlm.inputs((f"{words(2)} *", [wide]))
    spans = prompt_spans(vlm.model, inputs)
    (view,) = views(vlm.model, vlm.processor, inputs, spans, [wide])
    assert view.picture.size == (35, 35)
    red, _, blue = view.picture.getpixel((17, 17))  # type: ignore[misc]
    assert red < 10 < 245 < blue
    assert (view.columns, view.label) == (5, "image 1")


def test_newline_tokens_lie_beside_the_picture() -> None:
    vlm = tiny("llava_next")
    inputs = vlm.inputs((f"{words(2)} *", [photo(0)]))
    spans = prompt_spans(vlm.model, inputs)
    overview, tiles = views(vlm.model, vlm.processor, inputs, spans, [photo(0)])
    assert overview.columns == spans[0].columns
    assert tiles.columns == (spans[1].columns or 0) - 1
    assert tiles.label == "image 1, part 2 of 2"


def test_long_answers_are_cut_in_lines(tmp_path: Path) -> None:
    view, heat = View(photo(0), 3, "image 1"), torch.rand(MOST_PANELS + 8, 2, 3)
    sizes = {}
    for tokens in (1, 8, 9, MOST_PANELS, MOST_PANELS + 8):
        path = tmp_path / f"{tokens}.png"
        draw_heat([view], [heat], ["word"] * tokens, path, "why " * 60)
        with Image.open(path) as drawn:
            sizes[tokens] = drawn.size
    assert sizes[1][0] < sizes[8][0] == sizes[9][0]
    assert sizes[8][1] < sizes[9][1] < sizes[MOST_PANELS][1] == sizes[MOST_PANELS + 8][1]
