"""Texts to learn from, read from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Text files in UTF-8, by name, so that the record of a training names no folders.

    Raises:
        OSError: one cannot be read.
        ValueError: one is no text or empty, or two have the same name.
    """
    texts = {path.name: _read(path) for path in paths}
    if len(texts) < len(paths):
        raise ValueError(f"expected text files of different names, got {', '.join(map(str, paths))}")
    return texts


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None
    if not text.strip():
        raise ValueError(f"{path}: expected a text, got an empty file")
    return text
