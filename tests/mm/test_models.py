"""The pictures of every family against the features and prompts of the stock models and processors."""

from typing import Any

import pytest
import torch
from torch import Tensor

from oval_mm.image_spans import Part, Picture, find_spans
from oval_mm.models import FAMILIES, family_of
from tests.mm.tiny_vlms import NAMES, TinyVlm, photo, tiny

SIZES = [(28, 28), (40, 60), (100, 20), (20, 100), (84, 80), (13, 29)]


def tokens(picture: Picture) -> int:
    return sum(part.tokens or 0 for part in picture.parts)


def features(vlm: TinyVlm, inputs: dict[str, Any]) -> list[Tensor]:
    """What the model makes of each picture."""
    names = ("pixel_values", "image_sizes", "image_grid_thw", "batch_num_images")
    with torch.no_grad():
        output = vlm.model.base_model.get_image_features(**{name: inputs[name] for name in names if name in inputs})
    return list(output.pooler_output)


def test_every_supported_model_is_tested() -> None:
    assert set(NAMES) == set(FAMILIES)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("idefics3", "smolvlm")])
def test_pictures_have_as_many_tokens_as_features(name: str) -> None:
    vlm = tiny(name)
    family = family_of(vlm.model, vlm.processor)
    rows = [("*", [photo(0, *size)]) for size in SIZES]
    inputs = vlm.inputs(*rows, ("* and *", [photo(1), photo(2, 90, 30)]))
    pictures = family.encoded(inputs)
    assert [tokens(picture) for picture in pictures] == [len(feature) for feature in features(vlm, inputs)]
    assert all(tokens(family.counted(tokens(picture))) == tokens(picture) for picture in pictures)
    spans = find_spans(inputs["input_ids"], family.image_token_id, pictures, inputs["attention_mask"])
    assert [max(span.image for span in row) for row in spans] == [0] * len(SIZES) + [1]


def test_the_pictures_of_onevision() -> None:
    """Alone: an overview and tiles, made smaller where they are too many. With others: an overview and a newline."""
    vlm = tiny("llava_onevision")
    family = family_of(vlm.model)
    given = {"pixel_values": None, "image_sizes": torch.tensor([[28, 56], [84, 84], [9, 9], [9, 9]])}
    overview = Part(16, 4, 4)
    wide, large, *small = family.encoded({**given, "batch_num_images": torch.tensor([1, 1, 2])})
    assert wide == Picture((overview, Part(4 * 9, 4, 9)))
    assert large == Picture((overview, Part(5 * 6, 5, 6)))  # of 12 x 12 patches: at most 2 tiles of 16
    assert small == [Picture((overview, Part(1)))] * 2


def test_newlines_are_the_last_column_of_onevision() -> None:
    vlm = tiny("llava_onevision")
    inputs = vlm.inputs(("*", [photo(0, 84, 84)]))
    overview, tiles = family_of(vlm.model).encoded(inputs)[0].parts
    grid = features(vlm, inputs)[0][overview.tokens :].view(tiles.rows or 0, tiles.columns or 0, -1)
    is_newline = (grid == vlm.model.base_model.image_newline).all(-1)
    assert is_newline[:, -1].all()
    assert not is_newline[:, :-1].any()


def test_frames_of_qwen_are_parts() -> None:
    family = family_of(tiny("qwen2_vl").model)
    frame = Part(6, 2, 3)
    assert family.encoded({"image_grid_thw": torch.tensor([[2, 4, 6], [1, 4, 4]])}) == [
        Picture((frame, frame)),
        Picture((Part(4, 2, 2),)),
    ]


def test_a_strategy_given_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = tiny("llava")
    monkeypatch.setattr(vlm.processor, "vision_feature_select_strategy", "full")
    given = {**vlm.inputs(("*", [photo(0)])), "vision_feature_select_strategy": "full"}
    family = family_of(vlm.model)
    assert family.encoded(given) == [Picture((Part(1), Part(25, 5, 5)))]
    assert family.counted(26) == Picture((Part(26),))


@pytest.mark.parametrize("name", ["idefics3", "smolvlm"])
def test_tiles_and_overview_are_one_picture(name: str) -> None:
    vlm = tiny(name)
    family = family_of(vlm.model, vlm.processor)
    inputs = vlm.inputs(("* word1 **", [photo(0, 84, 84), photo(1, 42, 84), photo(2, 84, 84)]), ("word2 *", [photo(3)]))
    tile = Part(9, 3, 3)
    pictures = family.in_prompt(inputs["input_ids"], [])
    tiles = [len(picture.parts) for picture in pictures]
    assert {part for picture in pictures for part in picture.parts} == {tile}
    assert len(tiles) == 4
    assert tiles[0] == tiles[2] == 5
    assert 9 * sum(tiles) == sum(len(feature) for feature in features(vlm, inputs))


@pytest.mark.parametrize(
    ("name", "setting", "value", "message"),
    [
        ("llava", "patch_size", 5, r"set its patch_size = 7 \(is 5\)"),
        ("llava_next", "num_additional_image_tokens", 0, r"num_additional_image_tokens = 1 \(is 0\)"),
        ("llava_onevision", "vision_aspect_ratio", "anyres_max_9", r"vision_aspect_ratio = 'anyres_max_2' \(is"),
        ("llava_onevision", "num_image_tokens", 17, r"num_image_tokens = 16 \(is 17\)"),
        ("llava_next", "image_processor.image_grid_pinpoints", [[28, 28]], r"image_grid_pinpoints = .*\(is \[\[28, 28"),
        ("qwen2_vl", "image_processor.merge_size", 1, r"image_processor.merge_size = 2 \(is 1\)"),
        ("idefics3", "image_seq_len", 169, r"image_seq_len = 9 \(is 169\)"),
    ],
)
def test_a_processor_that_does_not_fit(
    name: str, setting: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = tiny(name)
    *path, last = setting.split(".")
    monkeypatch.setattr(vlm.processor.image_processor if path else vlm.processor, last, value)
    with pytest.raises(ValueError, match=message):
        family_of(vlm.model, vlm.processor)
