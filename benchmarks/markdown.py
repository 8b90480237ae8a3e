"""Pieces of the README's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]


def table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a table; cells are written as `str` writes them."""
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in cells)


def source(result: Result) -> str:
    """Return the command that made `result`, and on what."""
    machine = result["machine"]
    return (
        f"`{result['command']}` on {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['simd']}, torch {machine['torch']}, transformers {machine['transformers']}."
    )


def bytes_share(ratio: float | None) -> str:
    """Return a share of the dense bytes for a table; None: everything was read."""
    return "all" if ratio is None else f"{ratio:.1%}"
