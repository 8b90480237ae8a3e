"""Square blocks of patches as pages: the same text, and every page of a picture is one block of its grid."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from oval_core import OvalConfig
from oval_core.page_table import TEXT, PageTable, Span
from oval_mm import attach
from oval_mm.image_spans import blocks_of
from tests.mm.tiny_vlms import NAMES, batch, generate, photo, tiny, two_turns, words

FULL = OvalConfig(page_size=16, budget_ratio=1.0, always_paged=True, seal_tokens=1, impl="reference")
SPARSE = OvalConfig(page_size=16, budget_pages=3, always_paged=True, seal_tokens=1, sink_pages=0)
GRIDS = {  # of the parts of photo(0), in patches; None: not known. Newlines are a column of their own
    "llava": [(5, 5)],
    "llava_next": [(4, 4), (8, 13)],
    "llava_onevision": [(4, 4), (4, 7)],
    "qwen2_vl": [(3, 4)],
    "qwen2_5_vl": [(3, 4)],
    "idefics3": [(3, 3)],
    "smolvlm": [(3, 3)],
}
GRIDS_OF_A_SQUARE = {"llava": [(5, 5)], "llava_next": [(4, 4), (8, 9)], "qwen2_vl": [(4, 4)], "idefics3": [(3, 3)]}


def assert_same(got: Any, expected: Any) -> None:
    """The same text, and logits that differ by no more than 1e-5 of the largest."""
    assert got.sequences.tolist() == expected.sequences.tolist()
    got_logits, logits = (torch.stack(output.logits) for output in (got, expected))
    finite = logits.isfinite()
    assert torch.equal(finite, got_logits.isfinite())
    assert_close(got_logits[finite], logits[finite], rtol=0, atol=1e-5 * float(logits[finite].abs().max()))


def blocked(table: PageTable) -> list[Span]:
    return [span for span in table.spans if span.blocks]


def all_blocked(output: Any) -> list[Span]:
    return [span for layer in output.cache.layers for table in layer.tables for span in blocked(table)]


def continued(output: Any, ids: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """A later turn of text `[B, n]` over the cache of `output`."""
    ids = torch.cat([output.sequences, ids], dim=1)
    mask = torch.ones_like(ids) if mask is None else mask
    return {"input_ids": ids, "attention_mask": mask, "cache": output.cache}


@pytest.mark.parametrize("name", NAMES)
def test_same_text(name: str) -> None:
    vlm = tiny(name)
    inputs = batch(vlm)
    plain = generate(vlm, inputs)
    with attach(vlm.model, vlm.processor, FULL, block=2) as handle:
        paged = generate(vlm, inputs)
        assert handle.stats()["dense_steps"] == {"empty cache": 1}
    assert_same(paged, plain)
    for layer, in_order in zip(paged.cache.layers, plain.cache.layers, strict=True):
        for row, table in enumerate(layer.tables):
            places = [place for page in range(table.num_pages) for place in table.positions(page)]
            assert sorted(places) == [*range(table.first, table.sealed_end)]
            assert places != sorted(places)
            keys = in_order.keys[row, :, places]
            assert_close(layer.keys[row, :, table.first : table.sealed_end], keys, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_grids_that_are_known(name: str) -> None:
    vlm = tiny(name)
    with attach(vlm.model, vlm.processor, FULL, block=4):
        table = generate(vlm, vlm.inputs((f"{words(5)} * {words(5)}", [photo(0)]))).cache.layers[0].tables[0]
    known = [blocks_of(*grid, 4) for grid in GRIDS[name]]
    parts = [span.blocks for span in table.spans]
    assert parts[: len(known)] == known
    assert all(parts), "a part without a grid"


def rectangle(tokens: Sequence[int], columns: int) -> tuple[int, int, int, int]:
    """Upper row, left column, height and width of patches that fill a rectangle."""
    down, across = sorted({token // columns for token in tokens}), sorted({token % columns for token in tokens})
    assert sorted(tokens) == [row * columns + column for row in down for column in across]
    assert down == [*range(down[0], down[-1] + 1)]
    assert across == [*range(across[0], across[-1] + 1)]
    return down[0], across[0], len(down), len(across)


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl", "idefics3"])
@pytest.mark.parametrize("block", [2, 4])
def test_every_page_that_is_read_is_one_block(name: str, block: int) -> None:
    vlm = tiny(name)
    picture = photo(0, 56, 56)
    with attach(vlm.model, vlm.processor, SPARSE, block) as handle, handle.trace() as entries:
        output = generate(vlm, vlm.inputs((f"{words(5)} * {words(20)}", [picture])), max_new_tokens=12)
    read = 0
    for entry in entries:
        table = output.cache.layers[entry.layer_idx].tables[0]
        for page in entry.read[0].any(0).nonzero().flatten().tolist():
            if table.tags[page] == TEXT:
                continue
            read += 1
            span = next(span for span in table.spans if span.start <= table.starts[page] < span.stop)
            (rows, columns) = next(
                grid for grid in GRIDS_OF_A_SQUARE[name] if grid[0] * grid[1] == span.stop - span.start
            )
            up, left, height, width = rectangle([at - span.start for at in table.positions(page)], columns)
            assert (up % block, left % block) == (0, 0)
            assert (height, width) == (min(block, rows - up), min(block, columns - left))
    assert len({entry.layer_idx for entry in entries}) == 2
    assert read > 10


def test_a_second_turn_of_a_padded_batch() -> None:
    vlm = tiny("llava")

    plain = two_turns(vlm)
    with attach(vlm.model, vlm.processor, FULL, block=4):
        paged = two_turns(vlm)
    assert_same(paged, plain)
    tables = paged.cache.layers[1].tables
    assert [[span.tag for span in blocked(table)] for table in tables] == [[0, 1, 2], [0]]
    assert all(span.stop <= table.sealed_end for table in tables for span in table.spans)


@pytest.mark.parametrize("options", [{"num_beams": 2}, {"prompt_lookup_num_tokens": 2}, {"assistant_model": True}])
def test_rows_move_and_drafts_are_rejected(options: dict[str, Any]) -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} * word7 word8 word7 word8", [photo(0)]))
    options = {"max_new_tokens": 8, **options}
    if "assistant_model" in options:
        assistant = options["assistant_model"] = copy.deepcopy(vlm.model)
        with torch.no_grad():
            assistant.lm_head.weight.add_(0.2 * torch.randn_like(assistant.lm_head.weight))  # some drafts are rejected
    plain = generate(vlm, inputs, **options)
    with attach(vlm.model, vlm.processor, FULL, block=4):
        paged = generate(vlm, inputs, **options)
    assert paged.sequences.tolist() == plain.sequences.tolist()
    assert {(span.start, span.stop, span.blocks) for span in all_blocked(paged)} == {(5, 30, blocks_of(5, 5, 4))}


@pytest.mark.parametrize(("name", "chunk"), [("llava", 7), ("llava_next", 30), ("qwen2_vl", 7)])
def test_a_picture_that_arrives_in_several_passes(name: str, chunk: int) -> None:
    vlm = tiny(name)
    inputs = vlm.inputs((f"{words(5)} * and {words(9)} * word1", [photo(0), photo(1, 60, 30)]))
    plain = generate(vlm, inputs)
    with attach(vlm.model, vlm.processor, FULL, block=4):
        whole, cut = generate(vlm, inputs), generate(vlm, inputs, prefill_chunk_size=chunk)
    assert_same(cut, plain)
    assert len(all_blocked(cut)) >= 4
    assert [layer.tables for layer in cut.cache.layers] == [layer.tables for layer in whole.cache.layers]


@pytest.mark.parametrize(("left", "spans"), [(17, []), (30, [(5, 30)]), (3, [])])
def test_a_crop_goes_back_to_any_token(left: int, spans: list[tuple[int, int]]) -> None:
    """Tokens 5 to 29 are the picture; only what is left of it can be seen afterwards."""
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)]))

    def talk() -> Any:
        first = generate(vlm, inputs)
        first.cache.crop(left - first.cache.get_seq_length())
        first.sequences = first.sequences[:, :left]
        return generate(vlm, continued(first, vlm.inputs((words(9, 2), []))["input_ids"]))

    plain = talk()
    with attach(vlm.model, vlm.processor, FULL, block=4):
        paged = talk()
    assert_same(paged, plain)
    assert [(span.start, span.stop) for span in blocked(paged.cache.layers[0].tables[0])] == spans


def test_a_picture_is_read_again_after_a_crop() -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)]))
    with attach(vlm.model, vlm.processor, FULL, block=4):
        first = generate(vlm, inputs)
        tables = [copy.deepcopy(layer.tables) for layer in first.cache.layers]
        first.cache.crop(3 - first.cache.get_seq_length())
        again = generate(vlm, inputs, cache=first.cache)
    assert_same(again, first)
    assert [layer.tables for layer in again.cache.layers] == tables


def test_a_copy_of_the_cache_goes_on_by_itself() -> None:
    vlm = tiny("llava")
    with attach(vlm.model, vlm.processor, FULL, block=4):
        first = generate(vlm, vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)])))
        kept = copy.deepcopy(first.cache)
        more = vlm.inputs((words(9, 2), []))["input_ids"]
        expected = generate(vlm, continued(first, more))
        first.cache.crop(12 - first.cache.get_seq_length())
        first.cache = kept
        assert_same(generate(vlm, continued(first, more)), expected)


@pytest.mark.parametrize(("page_size", "side"), [(16, 4), (8, None), (32, None)])
def test_squares_that_fill_a_page_are_the_default(page_size: int, side: int | None) -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)]))
    config = OvalConfig(page_size=page_size, budget_ratio=1.0, always_paged=True, seal_tokens=1)
    found = []
    for how in ({}, {"block": side}):
        with attach(vlm.model, vlm.processor, config, **how):
            found.append(all_blocked(generate(vlm, inputs)))
    assert found[0] == found[1]
    assert bool(found[0]) == (side is not None)


@pytest.mark.parametrize(("hidden", "stays"), [(slice(8, 20), False), (slice(5, 30), True), (slice(0, 4), True)])
@pytest.mark.parametrize("config", [FULL, OvalConfig(page_size=16, seal_tokens=1)], ids=["paged", "dense"])
def test_a_mask_that_hides_tokens_in_a_later_turn(config: OvalConfig, hidden: slice, stays: bool) -> None:
    """Tokens 5 to 29 are the picture; a mask goes by position."""
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)]))

    def talk() -> Any:
        first = generate(vlm, inputs)
        more = vlm.inputs((words(9, 2), []))["input_ids"]
        mask = torch.ones(1, first.sequences.shape[1] + more.shape[1], dtype=torch.long)
        mask[:, hidden] = 0
        return generate(vlm, continued(first, more, mask))

    plain = talk()
    with attach(vlm.model, vlm.processor, config, block=4):
        paged = talk()
    assert_same(paged, plain)
    assert bool(all_blocked(paged)) == stays


def test_a_mask_for_every_query() -> None:
    """It hides one token of a picture, from the prompt and from what follows."""
    vlm = tiny("idefics3")
    inputs = vlm.inputs((f"{words(5)} * {words(6)}", [photo(0)]))
    at = int((inputs["input_ids"] == vlm.model.config.image_token_id).nonzero()[0, 1])
    total = inputs["input_ids"].shape[1]
    causal = torch.ones(total, total, dtype=torch.bool).tril()[None, None]
    causal[..., at + 2] = False
    with torch.no_grad():
        plain = vlm.model(**{**inputs, "attention_mask": causal})
        with attach(vlm.model, vlm.processor, FULL, block=2):
            paged = vlm.model(**{**inputs, "attention_mask": causal})
            assert len(all_blocked(paged)) > 2
            token = torch.ones(1, 1, 1, total + 1, dtype=torch.bool)
            token[..., at + 2] = False
            step: dict[str, Any] = {"input_ids": inputs["input_ids"][:, :1], "attention_mask": token}
            paged = vlm.model(**step, cache=paged.cache)
        plain = vlm.model(**step, cache=plain.cache)
    assert_close(paged.logits, plain.logits, rtol=0, atol=1e-5 * float(plain.logits.abs().max()))
    assert all(at not in range(span.start, span.stop) for span in all_blocked(paged))


@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (0, ValueError, "an integer >= 1 whose square is at most page_size = 16, got 0"),
        (5, ValueError, "an integer >= 1 whose square is at most page_size = 16, got 5"),
        (True, TypeError, r"an integer >= 1, 'auto' or None, got True \(bool\)"),
        (4.0, TypeError, r"an integer >= 1, 'auto' or None, got 4.0 \(float\)"),
        ("4", TypeError, r"an integer >= 1, 'auto' or None, got '4' \(str\)"),
    ],
)
def test_what_is_no_block_is_refused(block: Any, error: type[Exception], message: str) -> None:
    vlm = tiny("llava")
    for _ in range(2):  # the model is as before
        with pytest.raises(error, match=f"block must be {message}"):
            attach(vlm.model, vlm.processor, block=block)
    with pytest.raises(ValueError, match="page_size = 8, got 3"):
        attach(vlm.model, vlm.processor, OvalConfig(page_size=8), block=3)
