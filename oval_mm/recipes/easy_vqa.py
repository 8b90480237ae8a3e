"""The images and questions of easy-vqa (Victor Zhou, MIT licence), read from its PyPI package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

SPLITS = ("train", "test")


@dataclass(frozen=True)
class ImageQuestions:
    """One image, 64 x 64 pixels of one shape, and the (question, answer) pairs about it."""

    image_id: int
    path: Path
    questions: tuple[tuple[str, str], ...]


def load_easy_vqa(split: str) -> list[ImageQuestions]:
    """The images of a split ("train" or "test") that have questions, by their number.

    Raises:
        ValueError: no such split.
        ImportError: the package `easy-vqa` is not installed.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {list(SPLITS)}, got {split!r}")
    package = _package()
    questions, answers, ids = getattr(package, f"get_{split}_questions")()
    paths = getattr(package, f"get_{split}_image_paths")()
    grouped: dict[int, list[tuple[str, str]]] = {}
    for question, answer, image_id in zip(questions, answers, ids, strict=True):
        grouped.setdefault(image_id, []).append((question, answer))
    return [ImageQuestions(number, Path(paths[number]), tuple(grouped[number])) for number in sorted(grouped)]


def easy_vqa_answers() -> list[str]:
    """The 13 possible answers. Raises ImportError where the package `easy-vqa` is not installed."""
    return list(_package().get_answers())


def _package() -> Any:
    try:
        import easy_vqa
    except ImportError as error:
        raise ImportError("the easy-vqa questions need the package easy-vqa: pip install easy-vqa") from error
    return easy_vqa
