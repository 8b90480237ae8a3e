"""Image spans against prompts written by hand, and against what transformers' own processors and models make."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from oval_core import OvalConfig
from oval_core.layer import OvalLayer
from oval_core.page_table import TEXT, PageTable
from oval_mm.image_spans import ImageSpan, Part, Picture, blocks_of, find_spans, marks
from oval_mm.picture_counts import any_resolution_picture, count_for, picture_for

IMAGE, WORD, PAD, MARKER = 9, 1, 0, 5
TILES = [[28, 28], [28, 56], [56, 28], [56, 56], [28, 84], [84, 28]]


def ids(*rows: str) -> Tensor:
    """`[B, T]`: i image, t text, m marker, . padding; shorter rows get more of it, on the left."""
    token = {"i": IMAGE, "t": WORD, "m": MARKER, ".": PAD}
    letters = [row.replace(" ", "") for row in rows]
    longest = max(map(len, letters))
    return torch.tensor([[token[letter] for letter in row.rjust(longest, ".")] for row in letters])


def places(spans: list[list[ImageSpan]]) -> list[list[tuple[int, int, int]]]:
    return [[(span.image, span.start, span.stop) for span in row] for row in spans]


def llava_config(
    name: str = "Llava", tower: str = "CLIP", strategy: str = "default", image_size: Any = 28, **settings: Any
) -> Any:
    vision = getattr(transformers, f"{tower}VisionConfig")(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=image_size,
        patch_size=7,
    )
    text = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    config_class = getattr(transformers, f"{name}Config")
    settings = {"vision_feature_layer": -1, "image_token_index": IMAGE, **settings}
    return config_class(vision_config=vision, text_config=text, vision_feature_select_strategy=strategy, **settings)


def processor_for(name: str = "Llava", image_processor: Any = None, **settings: Any) -> Any:
    words = ["<pad>", "what", "is", "this", "here", "and", "?", "<unk>", "a", "<image>"]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_processor = image_processor or transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    settings = {
        "patch_size": 7,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
        **settings,
    }
    return getattr(transformers, f"{name}Processor")(image_processor, tokenizer, **settings)


def photo(height: int = 30, width: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8))


def test_pictures_side_by_side_are_told_apart_by_their_count() -> None:
    assert places(find_spans(ids("t iiii iiii t iiii t"), IMAGE, 4)) == [[(0, 1, 5), (1, 5, 9), (2, 10, 14)]]


def test_every_picture_may_have_its_own_count() -> None:
    prompts = ids("t ii iii t", "iiii t")
    expected = [[(0, 1, 3), (1, 3, 6)], [(0, 2, 6)]]
    assert places(find_spans(prompts, IMAGE, [2, 3, 4])) == expected
    assert places(find_spans(prompts, IMAGE, np.array([2, 3, 4]))) == expected  # type: ignore[arg-type]
    assert places(find_spans(prompts, IMAGE, torch.tensor([2, 3, 4]))) == expected  # type: ignore[arg-type]


def test_without_counts_pictures_are_what_text_separates() -> None:
    assert places(find_spans(ids("iii t ii"), IMAGE)) == [[(0, 0, 3), (1, 4, 6)]]


def test_rows_have_different_numbers_of_pictures_and_padding() -> None:
    prompts = ids("t ii t ii t", "t ii t", "t t t")
    assert places(find_spans(prompts, IMAGE, 2, (prompts != PAD).int())) == [[(0, 1, 3), (1, 4, 6)], [(0, 4, 6)], []]


def test_image_tokens_under_padding_do_not_count() -> None:
    prompts = ids("iit ii t")  # the tokenizer pads with the image token
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert places(find_spans(prompts, IMAGE, 2, mask)) == [[(0, 3, 5)]]


@pytest.mark.parametrize("pictures", [None, 4, Picture((Part(),)), []])
def test_no_image_at_all(pictures: Any) -> None:
    assert find_spans(ids("ttt", "tt"), IMAGE, pictures) == [[], []]
    assert find_spans(torch.zeros(2, 0, dtype=torch.long), IMAGE, pictures) == [[], []]


@pytest.mark.parametrize(
    ("prompts", "pictures", "message"),
    [
        (ids("ttt", "t iiii i"), 4, "expected 4 image tokens for picture 1 of row 1, got 1 image tokens at token 5."),
        (ids("t iii t"), 4, "expected 4 image tokens for picture 0 of row 0, got 3 image tokens at token 1."),
        (ids("iii t iiiii"), 4, "expected 4 image tokens for picture 0 of row 0, got 3 image tokens at token 0."),
        (ids("t ii t iii"), [2, 2], "expected no more than 2 pictures in row 0, got 1 image tokens at token 6."),
        (ids("i i t"), [2, 2, 2], "expected image tokens for 3 pictures, got some for 1."),
        (ids("ttt"), [2], "expected image tokens for 1 pictures, got some for 0."),
        (
            ids("m i m i"),
            [Picture((Part(),) * 3)],
            "expected 1 more runs of image tokens for picture 0 of row 0, got none.",
        ),
    ],
)
def test_a_mismatch_says_what_was_expected_what_came_and_what_to_change(
    prompts: Tensor, pictures: Any, message: str
) -> None:
    with pytest.raises(ValueError, match="the model") as caught:
        find_spans(prompts, IMAGE, pictures)
    assert str(caught.value).startswith(message)
    for setting in ("`patch_size`", "`num_additional_image_tokens`", "`vision_feature_select_strategy`"):
        assert setting in str(caught.value)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"must be \[B, T\], got shapes \[\(3,\)\]"):
        find_spans(ids("itt")[0], IMAGE)
    with pytest.raises(ValueError, match=r"got shapes \[\(1, 3\), \(1, 2\)\]"):
        find_spans(ids("itt"), IMAGE, None, torch.ones(1, 2))


def test_parts_must_make_sense() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        find_spans(ids("itt"), IMAGE, 0)
    with pytest.raises(ValueError, match="a grid of 2 x 3 patches does not have 7 tokens"):
        Part(7, 2, 3)


def test_runs_between_marker_tokens_belong_to_one_picture() -> None:
    """Idefics3: a picture of 1 x 2 tiles and the overview, then one of the overview alone, directly behind it."""
    prompts = ids("t m iiii m iiii m iiii m m iiii m t")
    tile = Part(4, 2, 2)
    spans = find_spans(prompts, IMAGE, [Picture((tile,) * 3), Picture((tile,))])
    assert places(spans) == [[(0, 2, 6), (0, 7, 11), (0, 12, 16), (1, 18, 22)]]
    assert {(span.rows, span.columns) for span in spans[0]} == {(2, 2)}
    by_runs = find_spans(prompts, IMAGE, [Picture((Part(),) * runs) for runs in (3, 1)])
    assert places(by_runs) == places(spans)
    assert by_runs[0][0].rows is None


def test_the_stock_idefics3_processor_writes_a_run_a_tile() -> None:
    image_processor = transformers.Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
    )
    markers = ["<fake_token_around_image>", "<global-img>"]
    tokenizer = processor_for().tokenizer
    tokenizer.add_tokens(markers + [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)])
    processor = transformers.Idefics3Processor(image_processor, tokenizer, image_seq_len=4)
    images = [[photo(28, 56), photo(56, 56)], [photo(56, 28)]]
    batch: Any = processor(images=images, text=["<image> <image> ?", "<image> ?"], padding=True, return_tensors="pt")
    runs = [image_processor.get_number_of_image_patches(*image.size[::-1])[0] for row in images for image in row]
    assert runs == [3, 5, 3]
    spans = find_spans(
        batch["input_ids"], IMAGE, [Picture((Part(4, 2, 2),) * n) for n in runs], batch["attention_mask"]
    )
    assert [[span.image for span in row] for row in spans] == [[0] * 3 + [1] * 5, [0] * 3]
    for row, row_spans in zip(batch["input_ids"], spans, strict=True):
        assert all((row[span.start : span.stop] == IMAGE).all() for span in row_spans)
        assert int((row == IMAGE).sum()) == 4 * len(row_spans)


@pytest.mark.parametrize(
    ("tower", "strategy", "parts"),
    [
        ("CLIP", "default", (Part(16, 4, 4),)),
        ("CLIP", "full", (Part(1), Part(16, 4, 4))),
        ("Siglip", "full", (Part(16, 4, 4),)),
        ("Siglip", "default", (Part(15),)),
    ],
)
def test_stock_llava_makes_the_features_that_are_counted(tower: str, strategy: str, parts: tuple[Part, ...]) -> None:
    config = llava_config(tower=tower, strategy=strategy)
    assert picture_for(config) == Picture(parts)
    model: Any = transformers.LlavaForConditionalGeneration(config).eval()
    features = model.model.get_image_features(torch.zeros(1, 3, 28, 28)).pooler_output
    assert len(features[0]) == count_for(config)


def test_pictures_need_not_be_square() -> None:
    assert picture_for(llava_config(image_size=[14, 28])) == Picture((Part(8, 2, 4),))


def test_llava_15_has_576_tokens() -> None:
    assert count_for(transformers.LlavaConfig()) == 576


@pytest.mark.parametrize(("strategy", "extra", "tokens"), [("default", 1, 16), ("full", 1, 17), ("full", 0, 16)])
def test_the_stock_processor_writes_what_is_counted(strategy: str, extra: int, tokens: int) -> None:
    config = llava_config(tower="CLIP" if extra else "Siglip", strategy=strategy)
    processor = processor_for(num_additional_image_tokens=extra, vision_feature_select_strategy=strategy)
    assert count_for(config, processor) == tokens
    texts = ["<image> <image> what is this ?", "and here <image> ?", "what ?"]
    batch = processor(images=[photo(), photo(), photo()], text=texts, return_tensors="pt", padding=True)
    spans = find_spans(batch["input_ids"], IMAGE, count_for(config, processor), batch["attention_mask"])
    assert places(spans)[0] == [(0, 0, tokens), (1, tokens, 2 * tokens)]
    assert places(spans)[1] == [(0, tokens + 3, 2 * tokens + 3)]
    assert spans[2] == []


@pytest.mark.parametrize(
    ("settings", "tokens", "change"),
    [
        ({"patch_size": 14}, 4, "patch_size = 7 (is 14)"),
        ({"patch_size": None}, 0, "patch_size = 7 (is None)"),
        ({"num_additional_image_tokens": 0}, 15, "num_additional_image_tokens = 1 (is 0)"),
        ({"vision_feature_select_strategy": "full"}, 17, "vision_feature_select_strategy = 'default' (is 'full')"),
    ],
)
def test_a_processor_that_counts_otherwise_is_named(settings: dict[str, Any], tokens: int, change: str) -> None:
    expected = f"expected 16 image tokens a picture, the processor makes {tokens}: set its {change}"
    with pytest.raises(ValueError, match="the processor makes") as caught:
        count_for(llava_config(), processor_for(**settings))
    assert str(caught.value) == expected


def test_settings_that_differ_but_count_alike_are_fine() -> None:
    processor = processor_for(num_additional_image_tokens=0, vision_feature_select_strategy="full")
    assert count_for(llava_config(), processor) == 16


def test_an_unknown_tower_needs_a_processor() -> None:
    config = llava_config()
    config.vision_config.model_type = "new_tower"
    with pytest.raises(ValueError, match="got 'new_tower': state the counts yourself"):
        count_for(config)
    assert count_for(config, processor_for()) == 16


@pytest.mark.parametrize(
    "size", [(28, 28), (40, 60), (61, 40), (20, 100), (100, 20), (51, 50), (13, 29), (1, 1), (1, 90), (90, 1)]
)
def test_any_resolution_pictures_have_the_tokens_of_llava_next(size: tuple[int, int]) -> None:
    config = llava_config("LlavaNext", image_grid_pinpoints=TILES)
    picture = any_resolution_picture(config, *size)
    assert picture.parts[0] == Part(16, 4, 4)
    image_processor = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=TILES
    )
    processor = processor_for("LlavaNext", image_processor)
    texts = ["<image> <image> ?", "here <image>"]
    batch = processor(images=[photo(*size), photo(30, 31), photo(*size)], text=texts, return_tensors="pt", padding=True)
    pictures = [picture, any_resolution_picture(config, 30, 31), picture]
    spans = find_spans(batch["input_ids"], IMAGE, pictures, batch["attention_mask"])
    assert [span.image for span in spans[0]] == [0] * len(picture.parts) + [1, 1]
    assert [Part(span.stop - span.start, span.rows, span.columns) for span in spans[1]] == list(picture.parts)
    assert spans[0][-1].stop == batch["input_ids"].shape[1] - 1
    assert spans[1][-1].stop == batch["input_ids"].shape[1]


def test_newline_tokens_are_the_last_column_of_llava_next() -> None:
    config = llava_config("LlavaNext", image_grid_pinpoints=TILES)
    model: Any = transformers.LlavaNextForConditionalGeneration(config).eval()
    overview, tiles = any_resolution_picture(config, 40, 60).parts
    pixels = torch.zeros(1, 5, 3, 28, 28)
    features = model.model.get_image_features(pixels, torch.tensor([[40, 60]])).pooler_output[0]
    grid = features[overview.tokens :].view(tiles.rows, tiles.columns, -1)
    is_newline = (grid == model.model.image_newline).all(-1)
    assert is_newline[:, -1].all()
    assert not is_newline[:, :-1].any()


sizes = st.integers(1, 13)


@given(rows=sizes, columns=sizes, block=st.integers(1, 6))
def test_blocks_are_rectangles_that_cover_the_grid_once(rows: int, columns: int, block: int) -> None:
    blocks = blocks_of(rows, columns, block)
    assert sorted(token for tokens in blocks for token in tokens) == list(range(rows * columns))
    assert len(blocks) == -(-rows // block) * -(-columns // block)
    for tokens in blocks:
        down, across = {token // columns for token in tokens}, {token % columns for token in tokens}
        assert list(tokens) == sorted(tokens)
        assert len(down) * len(across) == len(tokens)
        for side, total in ((down, rows), (across, columns)):
            assert min(side) % block == 0
            assert side == set(range(min(side), min(min(side) + block, total)))


def test_a_ragged_grid() -> None:
    assert blocks_of(3, 3, 2) == ((0, 1, 3, 4), (2, 5), (6, 7), (8,))
    with pytest.raises(ValueError, match="must be >= 1, got 3, 3, 0"):
        blocks_of(3, 3, 0)


def pages(marked: Any, tokens: int, page_size: int = 16, first: int = 0) -> list[tuple[int, int, int]]:
    """Start, length and tag of the pages of a row with these marks."""
    table = PageTable(page_size, first=first)
    for _, *mark in marked:
        table.mark(*mark)
    table.extend(tokens)
    table.seal()
    return list(zip(table.starts, table.lengths, table.tags, strict=True))


def test_marks_give_pictures_pages_of_their_own() -> None:
    spans = find_spans(ids("..t" + "i" * 36 + "tt"), IMAGE, 18)
    assert list(marks(spans)) == [(0, 3, 21, 0, ()), (0, 21, 39, 1, ())]
    expected = [(2, 1, TEXT), (3, 16, 0), (19, 2, 0), (21, 16, 1), (37, 2, 1)]
    assert pages(marks(spans), 41, first=2) == expected


def test_marks_of_blocks_end_where_blocks_end() -> None:
    spans = find_spans(ids("t" + "i" * 31, "." * 31 + "t"), IMAGE, [Picture((Part(1), Part(30, 6, 5)))])
    assert list(marks(spans)) == [(0, 1, 2, 0, ()), (0, 2, 32, 0, ())]
    assert list(marks(spans, block=4)) == [(0, 1, 2, 0, ()), (0, 2, 32, 0, blocks_of(6, 5, 4))]
    assert [len(tokens) for tokens in blocks_of(6, 5, 4)] == [16, 4, 8, 2]
    assert pages(marks(spans, block=4), 32) == [(0, 1, TEXT), (1, 1, 0), (2, 16, 0), (18, 4, 0), (22, 8, 0), (30, 2, 0)]


def test_rows_are_marked_apart() -> None:
    spans = find_spans(ids("ii t ii", "t t t ii"), IMAGE, 2)
    assert [mark[:4] for mark in marks(spans)] == [(0, 0, 2, 0), (0, 3, 5, 1), (1, 3, 5, 0)]


def test_a_layer_takes_the_marks() -> None:
    spans = find_spans(ids("ii t ii t", "ii t"), IMAGE, 2)
    layer = OvalLayer(OvalConfig(page_size=8, seal_tokens=1, router="box"), None, 0)
    layer.update(torch.randn(2, 1, 6, 8), torch.randn(2, 1, 6, 8))
    for mark in marks(spans):
        layer.mark(*mark)
    layer.attended(None)
    layer.update(torch.randn(2, 1, 1, 8), torch.randn(2, 1, 1, 8))
    assert [table.tags for table in layer.tables] == [[0, TEXT, 1], [TEXT, 0]]
