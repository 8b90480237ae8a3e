"""The README's tables of kvpress and OVAL side by side."""

from __future__ import annotations

from collections import defaultdict
from statistics import mean
from typing import Any

from benchmarks.markdown import Result, source, table

Rows = list[dict[str, Any]]


def rivals_table(evicting: Result, retrieving: Result, quality: Result) -> str:
    """Two tables, one column a share of the bytes: KL on long texts, and answers to questions that come late.

    Args:
        evicting, retrieving: of `kvpress_quality` and `oval_quality`.
        quality: of `benchmarks.quality`, with its group "equal" at the context of the others.
    """
    for key in ("places", "positions"):
        if evicting[key] != quality[key]:
            raise ValueError(f"{key} differ: {evicting[key]} with kvpress, {quality[key]} with OVAL")
    notes = f"{source(evicting)} kvpress {evicting['machine']['kvpress']}. {source(retrieving)} {source(quality)}"
    return "\n\n".join([_texts(evicting, quality), _late(evicting["rows"] + retrieving["rows"]), notes])


def _texts(evicting: Result, quality: Result) -> str:
    """KL, mean over texts and places."""
    pressed: Rows = [row for row in evicting["rows"] if row["kind"] == "text"]
    contexts, texts = ({row[key] for row in pressed} for key in ("context", "text"))
    ours = [row for row in quality["rows"] if row["group"] == "equal" and row["context"] in contexts]
    ours = [
        row for row in ours if row["text"] in texts and row["router"] in ("basis", "box") and row["page_size"] == 16
    ]
    shares = sorted({row["share"] for row in ours} & {row["kept"] for row in pressed})
    cells: dict[tuple[str, float], list[float]] = defaultdict(list)
    for row in pressed:
        cells[row["press"], row["kept"]].append(row["kl"])
    for row in ours:
        cells[row["router"], row["share"]].append(row["kl"])
    names = dict.fromkeys(name for name, _ in cells)
    lines = [(_label(name), *(f"{mean(cells[name, share]):.4f}" for share in shares)) for name in names]
    return table(("KL to dense", *(f"{share:.0%} of the bytes" for share in shares)), lines)


def _late(rows: Rows) -> str:
    """Mean negative log-likelihood of the answers, and how many greedy decoding would write."""
    rows = [row | {"name": row.get("press") or row["router"]} for row in rows if row["kind"] == "late"]
    names = list(dict.fromkeys(row["name"] for row in rows if row["name"] != "dense"))
    measured = ({row["kept"] for row in rows if row["name"] == name} for name in names)
    shares = sorted(set.intersection(*measured))
    lines = [(_label(name), *(_answers(rows, name, share) for share in shares)) for name in names]
    head = (f"late questions; dense: {_answers(rows, 'dense', 1.0)}", *(f"{share:.0%}" for share in shares))
    return table(head, lines)


def _answers(rows: Rows, name: str, share: float) -> str:
    same = {row["digest"]: row for row in rows if (row["name"], row["kept"]) == (name, share)}.values()
    right = [answer for row in same for answer in row["greedy"]]
    return f"{sum(right)} of {len(right)}, NLL {mean(nll for row in same for nll in row['nll']):.2f}"


def _label(name: str) -> str:
    return f"OVAL, `{name}`" if name in ("basis", "box") else f"kvpress, `{name}`"
