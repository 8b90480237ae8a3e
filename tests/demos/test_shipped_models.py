"""The small LLaVA and CLIP that come with this repository are what their card says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from demos.image_qa import IMAGES, SAMPLES
from demos.tiny_llava import FOLDER, Reader, load
from oval_core import OvalConfig
from oval_mm import IMAGE_CONFIG
from oval_mm.pictures import load_picture
from oval_mm.recipes.answering import ALL, accuracy, packed_answers
from oval_mm.recipes.clip_to_transformers import build_vision_tower
from oval_mm.recipes.llava_batches import scene_pack
from oval_mm.recipes.scenes import make_scene

CLIP = FOLDER.with_name("tiny-clip")


@pytest.fixture(scope="module")
def llava() -> tuple[Any, Any]:
    return load()


def test_they_are_small() -> None:
    assert sum(file.stat().st_size for folder in (FOLDER, CLIP) for file in folder.rglob("*") if file.is_file()) < 30e6


def test_the_tower_is_that_of_the_clip(llava: tuple[Any, Any]) -> None:
    pytest.importorskip("open_clip")
    weights = build_vision_tower(CLIP).state_dict()
    for name, weight in llava[0].model.vision_tower.state_dict().items():
        torch.testing.assert_close(weight, weights[name], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("config", [None, IMAGE_CONFIG], ids=["dense", "OVAL"])
def test_the_samples_are_answered(llava: tuple[Any, Any], config: OvalConfig | None) -> None:
    for name, turns in SAMPLES.items():
        reader, said = Reader(*llava, [load_picture(IMAGES / name)], config), list[tuple[str, str]]()
        for question, right in turns:
            answer = reader.answer(said, question)
            assert answer.text == right, question
            assert (answer.image_pages < 0.3) == (config is not None)
            said.append((question, answer.text))


def test_most_questions_about_new_scenes_are_answered(llava: tuple[Any, Any]) -> None:
    packs = [scene_pack(make_scene(seed)) for seed in range(8_500_000, 8_500_008)]
    assert accuracy(packed_answers(*llava, packs))[ALL] > 0.85
