"""The README's tables of `benchmarks.generation`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from benchmarks.markdown import Result, bytes_share, source, table


def generation_table(result: Result) -> str:
    """Two tables: one line a continued text and their mean; one line a context in which facts were planted."""
    parts = [_texts_table(result)] if result["rows"] else []
    parts += [_needles_table(result["needles"])] if result["needles"] else []
    total = result["summary"]
    note = (
        f"Router `{result['router']}`, {result['budget_pages']} pages of {result['page_size']}. Of {total['asked']} "
        f"questions the dense model answers {total['dense_answers']}, OVAL {total['oval_answers']}, of those that the "
        f"dense model answers {total['both_answer']}."
    )
    return "\n\n".join([*parts, f"{source(result)} {note}"])


def _texts_table(result: Result) -> str:
    shares = ("same_share", "forced_share", "distinct_4grams")
    lines = [
        (
            f"{row['text']}, from token {row['start']:,}",
            f"{row['context']:,}",
            bytes_share(row["read_ratio"]),
            row["tokens"],
            row["same_tokens"],
            *(f"{row[name]:.1%}" for name in shares),
        )
        for row in result["rows"]
    ]
    means = [result["summary"][name] for name in shares]
    lines.append(("mean", "", "", "", "", *("" if value is None else f"{value:.1%}" for value in means)))
    head = ("text", "context", "bytes / dense", "tokens", "identical before a difference", "their share")
    return table((*head, "predicted in the dense text", "distinct 4-grams"), lines)


def _needles_table(needles: Sequence[Result]) -> str:
    """A cell: how many of the questions that the dense model answers OVAL answers too."""
    depths = sorted({row["depth"] for row in needles})
    lines = []
    for context in dict.fromkeys(row["context"] for row in needles):
        here = [row for row in needles if row["context"] == context]
        cells = [_needles_cell([row for row in here if row["depth"] == depth]) for depth in depths]
        ratios = [row["read_ratio"] for row in here]
        ratio = None if None in ratios else mean(ratios)
        lines.append((f"{context:,}", bytes_share(ratio), *cells, _needles_cell(here)))
    return table(("context", "bytes / dense", *(f"depth {depth:.0%}" for depth in depths), "all"), lines)


def _needles_cell(rows: Sequence[Result]) -> str:
    dense = [row for row in rows if row["dense"]]
    return f"{sum(row['oval'] for row in dense)} of {len(dense)}"
