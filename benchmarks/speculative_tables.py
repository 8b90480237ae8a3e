"""The README's tables of speculative decoding."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import Result, source, table

SETS = ("D", "T", "D & T", "D | T")


def speculative_table(result: Result) -> str:
    """One line a variant, one column a context and group: speed-up, tokens a pass and share of identical texts."""
    rows = result["rows"]
    columns = list(dict.fromkeys((row["dtype"], row["context"], row["group"]) for row in rows))
    cells = {(_title(row), row["dtype"], row["context"], row["group"]): _cell(row) for row in rows}
    lines = [
        (title, *(cells.get((title, *column), "–") for column in columns)) for title in dict.fromkeys(map(_title, rows))
    ]
    head = ("speed-up, tokens a pass", *(f"{group}, {context:,}, {dtype}" for dtype, context, group in columns))
    words = (
        f"{result['prompts']} prompts of each kind, {result['new_tokens']} new tokens. In brackets: share of the texts "
        "that are identical to those of `generate`, where it is not all."
    )
    return f"{table(head, lines)}\n\n{source(result)} {words}"


def page_sets_table(result: Result) -> str:
    """One line a drafter, context and group: sizes of the sets and the attention mass on them."""
    lines = [
        (
            row["drafter"],
            f"{row['context']:,}",
            row["group"],
            f"{row['pages']['context']:.0f}",
            *(f"{row['pages'][name]:.0f} ({row['covered'][name]:.0%})" for name in SETS),
        )
        for row in result["rows"]
        if row["pages"] is not None
    ]
    head = ("drafter", "context", "prompts", "pages", *(f"{name} (covers)".replace("|", "\\|") for name in SETS))
    return f"{table(head, lines)}\n\n{source(result)}"


def _title(row: dict[str, Any]) -> str:
    return row["drafter"] if row["mode"] == "dense" else f"{row['drafter']}, {row['mode']}"


def _cell(row: dict[str, Any]) -> str:
    passes = "" if row["step_tokens"] is None else f", {row['step_tokens']:.2f}"
    same = "" if row["identical"] == 1 else f" ({row['identical']:.0%})"
    return f"{row['speedup']:.2f}x{passes}{same}"
