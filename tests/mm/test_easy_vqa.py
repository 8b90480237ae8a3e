import sys
import types
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from oval_mm.recipes.easy_vqa import easy_vqa_answers, load_easy_vqa


@pytest.fixture
def _small_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the package, with the functions that the real one has."""
    package = types.ModuleType("easy_vqa")
    train_questions = ["what color is the shape?", "is there a circle?", "what is the red shape?"]
    contents = {
        "get_train_questions": (train_questions, ["red", "yes", "circle"], [7, 2, 7]),
        "get_train_image_paths": {2: "train/2.png", 7: "train/7.png", 9: "train/9.png"},
        "get_test_questions": (["is there a circle?"], ["no"], [0]),
        "get_test_image_paths": {0: "test/0.png"},
        "get_answers": ["circle", "red", "yes", "no"],
    }
    for name, content in contents.items():
        setattr(package, name, lambda content=content: content)
    monkeypatch.setitem(sys.modules, "easy_vqa", package)


@pytest.mark.usefixtures("_small_package")
def test_questions_are_grouped_by_image() -> None:
    circle, red = load_easy_vqa("train")
    assert (circle.image_id, circle.path, circle.questions) == (
        2,
        Path("train/2.png"),
        (("is there a circle?", "yes"),),
    )
    assert red.questions == (("what color is the shape?", "red"), ("what is the red shape?", "circle"))
    assert [image.path for image in load_easy_vqa("test")] == [Path("test/0.png")]
    assert easy_vqa_answers() == ["circle", "red", "yes", "no"]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "easy_vqa", None)
    with pytest.raises(ImportError, match="pip install easy-vqa"):
        load_easy_vqa("train")


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(ValueError, match=r"split must be one of \['train', 'test'\], got 'validation'"):
        load_easy_vqa("validation")


def test_the_real_package() -> None:
    pytest.importorskip("easy_vqa")
    images = load_easy_vqa("test")
    assert len(images) == 1000
    assert sum(len(image.questions) for image in images) == 9673
    assert set(Counter(answer for image in images for _, answer in image.questions)) == set(easy_vqa_answers())
    with Image.open(images[0].path) as image:
        assert image.size == (64, 64)
