"""The README's table of optional parts."""

from __future__ import annotations

from typing import Any

from benchmarks.markdown import Result, source, table

HEAD = (
    "router", "tokens a page", "pages read", "bytes / dense", "hit rate", "reused", "KL to dense", "layer [ms]",
    "training [s]",
)  # fmt: skip


def routers_table(result: Result) -> str:
    """One line a part."""
    lines = [
        (
            row["router"],
            row["pages"],
            _cell(row["budget_pages"], "d"),
            _cell(row["bytes_ratio"], ".1%"),
            _cell(row["hit_rate"], ".1%"),
            _cell(row["reused"], ".0%"),
            _cell(row["kl"], ".4f"),
            _cell(row["step_ms"], ".2f") + ("*" if row["compiled"] else ""),
            _cell(row["train_s"], ".0f"),
        )
        for row in result["rows"]
    ]
    words = (
        f"{result['context']:,} tokens, last {result['positions']} positions, about {result['share']:.0%} of the "
        f"dense bytes, texts: {', '.join(result['texts'])}. Hit rate: share of the attention mass on pages that are "
        "read; what `basis` estimates is not in it. Reused: selections that a selection cache did not make anew. "
        "Layer: selecting and reading at one step; *: compiled, the others in PyTorch. Training: its steps alone"
        f"{''.join(map(_learned_on, result['learned_on']))}.{_weights(result['rows'])}"
    )
    return f"{table(HEAD, lines)}\n\n{source(result)} {words}"


def _weights(rows: list[dict[str, Any]]) -> str:
    found = [f"{row['router']} {row['weights_ratio']:.1%}" for row in rows if row["weights_ratio"] is not None]
    if not found:
        return ""
    return f" A trained head's own weights, read at every step, are not in the bytes: {', '.join(found)} of them."


def _learned_on(settings: dict[str, int]) -> str:
    return (
        f"; {settings['steps']} steps, {settings['passages']} passages of {settings['context_tokens']:,} tokens, "
        f"{settings['asked_tokens']} queries at each stop, hit rates at {settings['budget_pages']} pages"
    )


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)
