"""Texts to learn from, read from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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


def tokens_of(texts: Mapping[str, str], tokenizer: Any) -> dict[str, Tensor]:
    """The token ids of each text, int64 `[t]`; special ones only where the text names them."""
    return {
        name: torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        for name, text in texts.items()
    }


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected text in UTF-8, got {error}") from None
    if not text.strip():
        raise ValueError(f"{path}: expected a text, got an empty file")
    return text
