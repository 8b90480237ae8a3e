"""README tables of `benchmarks.quality`: the frontier, equal bytes, one choice changed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.markdown import Result, source, table

SETTING = ("router", "page_size", "rank", "shortlist_ratio", "estimate_tail", "budget_pages")
OURS, REFERENCE_ROUTERS = "basis", ("basis", "oracle")  # the oracle reads every key to decide: no rival
Rows = list[dict[str, Any]]


def quality_table(result: Result) -> str:
    """Mean over the texts, one line a setting."""
    rows: Rows = result["rows"]
    lines = []
    for same in _grouped(rows, SETTING):
        share, kl, top1, ppl = (_mean(same, key) for key in ("bytes_ratio", "kl", "top1", "ppl_ratio"))
        pages = f"{_mean(same, 'pages_read_mean'):.0f}"
        lines.append((_name(same[0]), pages, f"{share:.1%}", f"{kl:.4f}", f"{top1:.3f}", f"{ppl:.3f}", _layer_ms(same)))
    head = ("router", "pages read", "bytes / dense", "KL to dense", "top-1 agrees", "perplexity ratio", "layer [ms]")
    return f"{table(head, lines)}\n\n{source(result)} {_conditions(result)}"


def quality_equal_table(result: Result) -> str:
    """KL of every router by share of the bytes, text and context, and how OVAL's compares with the best rival's."""
    rows: Rows = result["rows"]
    columns = list(dict.fromkeys((row["text"], row["context"]) for row in rows))
    lines: list[tuple[Any, ...]] = []
    for share in dict.fromkeys(row["share"] for row in rows):
        same_share = [row for row in rows if row["share"] == share]
        kinds = _grouped(same_share, ("router", "page_size"))
        for kind in kinds:
            bytes_ratio = f"{_mean(kind, 'bytes_ratio'):.1%}"
            lines.append((_name(kind[0]), bytes_ratio, *(f"{_at(kind, column)['kl']:.4f}" for column in columns)))
        for name, rivals in (("best rival", None), ("best quest", "quest")):
            ratios = [f"**{_ratio(same_share, column, rivals):.2f}**" for column in columns]
            lines.append((f"**basis / {name}**", f"{share:.0%}", *ratios))
    head = ("router", "bytes / dense", *(f"{text} {context:,}" for text, context in columns))
    return f"{table(head, lines)}\n\n{source(result)} KL to dense, {_positions(result)}."


def quality_ablation_table(result: Result) -> str:
    """One line a setting."""
    rows: Rows = result["rows"]
    texts = list(dict.fromkeys(row["text"] for row in rows))
    lines = []
    for same in _grouped(rows, SETTING):
        kl = (f"{mean(row['kl'] for row in same if row['text'] == text):.4f}" for text in texts)
        lines.append(
            (
                _name(same[0]),
                f"{_mean(same, 'pages_read_mean'):.1f}",
                f"{_mean(same, 'bytes_ratio'):.1%}",
                *kl,
                _layer_ms(same),
            )
        )
    head = ("setting", "pages read", "bytes / dense", *(f"KL, {text}" for text in texts), "layer [ms]")
    return f"{table(head, lines)}\n\n{source(result)} {_conditions(result)}"


def _grouped(rows: Rows, keys: Sequence[str]) -> list[Rows]:
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return list(groups.values())


def _name(row: dict[str, Any]) -> str:
    name = row["router"]
    if name.startswith("basis"):
        name += f", rank {row['rank']}, {row['shortlist_ratio']:.0%} shortlisted"
        name += ", tail dropped" if row["estimate_tail"] == "none" else ""
    return name if row["page_size"] == 16 else f"{name}, page {row['page_size']}"


def _layer_ms(rows: Rows) -> str:
    """Time of a layer; the dash is for routers that do not run as compiled code."""
    return "–" if rows[0].get("layer_ms") is None else f"{_mean(rows, 'layer_ms'):.2f}"


def _mean(rows: Rows, key: str) -> float:
    return mean(row[key] for row in rows)


def _at(rows: Rows, column: tuple[str, int]) -> dict[str, Any]:
    return next(row for row in rows if (row["text"], row["context"]) == column)


def _ratio(rows: Rows, column: tuple[str, int], rivals: str | None) -> float:
    """KL of OVAL over the smallest of its rivals' (those whose name begins with `rivals`)."""
    here = [row for row in rows if (row["text"], row["context"]) == column]
    theirs = [
        row["kl"] for row in here if row["router"] not in REFERENCE_ROUTERS and row["router"].startswith(rivals or "")
    ]
    return float(next(row["kl"] for row in here if row["router"] == OURS) / min(theirs))


def _conditions(result: Result) -> str:
    rows: Rows = result["rows"]
    texts = ", ".join(dict.fromkeys(row["text"] for row in rows))
    contexts = ", ".join(dict.fromkeys(f"{row['context']:,}" for row in rows))
    return f"{contexts} tokens, {_positions(result)}, page size 16 unless named, texts: {texts}."


def _positions(result: Result) -> str:
    """Results from before texts were read at several places have one."""
    return f"last {result['positions']} positions at {result.get('places', 1)} place(s) of each text"
