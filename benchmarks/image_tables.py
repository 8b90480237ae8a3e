"""README tables of `benchmarks.image_qa` and `benchmarks.image_speed`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean
from typing import Any

from benchmarks.markdown import Result, source, table

Rows = list[dict[str, Any]]
TITLES = {"one": "one image", "two": "two images", "four": "four images", "easy-vqa": "easy-vqa"}
SECOND_TURN = "second turn"
FIDELITY: dict[str, Callable[[float], str]] = {
    "bytes_ratio": "{:.0%}".format,
    "kl": "{:.3f}".format,
    "top1": "{:.3f}".format,
    "page_recall": "{:.2f}".format,
    "region_read": "{:.2f}".format,
}


def image_qa_table(result: Result) -> str:
    """Two tables, one line a reader, a cell for all its read shares: accuracy of each set; nearness to dense."""
    rows: Rows = result["rows"]
    datasets = list(dict.fromkeys(row["dataset"] for row in rows))
    shares = " / ".join(f"{share:.0%}" for share in _common_shares(rows))
    readers = list(dict.fromkeys(row["router"] for row in rows))
    note = (
        f"{result['split'].capitalize()} split, up to {result['packs']} images or sets of images of each; answers "
        f"asked: {_counts(rows, datasets)}. Cells: {shares} of the image pages; a reader with a share of its own has "
        "one figure."
    )
    parts = (_accuracy_table(result, readers, datasets), _fidelity_table(rows, readers, datasets))
    return "\n\n".join((*parts, f"{source(result)} {note}"))


def _accuracy_table(result: Result, readers: list[str], datasets: list[str]) -> str:
    rows: Rows = result["rows"]
    talks = [dataset for dataset in datasets if _has_second_turn(rows, dataset)]
    lines = []
    for reader in readers:
        cells = [_cell(_of(rows, reader, dataset), lambda row: row["accuracy"], _percent) for dataset in datasets]
        for dataset in talks:
            of_second = _cell(_of(rows, reader, dataset), lambda row: row["kind_accuracy"][SECOND_TURN], _percent)
            cells.append(of_second)
        lines.append((reader, *cells))
    baseline = [_percent(result["majority_baseline"][dataset]["all"]) for dataset in datasets]
    second = [_percent(result["majority_baseline"][dataset][SECOND_TURN]) for dataset in talks]
    lines.append(("most frequent answer", *baseline, *second))
    head = (*(TITLES[dataset] for dataset in datasets), *(f"{TITLES[dataset]}, {SECOND_TURN}" for dataset in talks))
    return table(("accuracy [%]", *head), lines)


def _fidelity_table(rows: Rows, readers: list[str], datasets: list[str]) -> str:
    """Means over the sets; recall over those whose places are known."""
    lines = []
    for reader in readers:
        by_share = [
            [row for row in rows if row["router"] == reader and row["read_share"] == share]
            for share in dict.fromkeys(row["read_share"] for row in rows if row["router"] == reader)
        ]
        cells = [" / ".join(_mean(same, name, write) for same in by_share) for name, write in FIDELITY.items()]
        lines.append((reader, *cells))
    where = ", ".join(TITLES[dataset] for dataset in datasets)
    head = ("bytes / dense", "KL to dense", "top-1 agrees", "page recall", "object's patches read")
    return table((f"mean of {where}", *head), lines)


def image_speed_table(result: Result) -> str:
    """One line a shape, number of images, dtype and read share."""
    lines = [
        (
            row["shape"],
            row["images"],
            f"{row['tokens']:,}",
            row["dtype"],
            f"{row['read_share']:.0%}",
            f"{row['bytes_ratio']:.1%}",
            f"{row['dense_ms']:.2f}",
            f"{row['oval_ms']:.2f}",
            f"{row['vs_dense']:.1f}x",
        )
        for row in result["rows"]
    ]
    head = ("shape", "images", "image tokens", "dtype", "pages read", "bytes / dense", "dense [ms]", "OVAL [ms]")
    return f"{table((*head, 'faster than dense'), lines)}\n\n{source(result)}"


def _common_shares(rows: Rows) -> list[float]:
    """The shares of the reader that has most of them."""
    shares: dict[str, list[float]] = {}
    for row in rows:
        own = shares.setdefault(row["router"], [])
        own += [row["read_share"]] if row["read_share"] not in own else []
    return max(shares.values(), key=len)


def _counts(rows: Rows, datasets: list[str]) -> str:
    answers = {row["dataset"]: row["answers"] for row in rows}
    return ", ".join(f"{answers[dataset]:,} about {TITLES[dataset]}" for dataset in datasets)


def _has_second_turn(rows: Rows, dataset: str) -> bool:
    return any(SECOND_TURN in row["kind_accuracy"] for row in rows if row["dataset"] == dataset)


def _of(rows: Rows, reader: str, dataset: str) -> Rows:
    return [row for row in rows if (row["router"], row["dataset"]) == (reader, dataset)]


def _cell(rows: Rows, value: Callable[[dict[str, Any]], float], write: Callable[[float], str]) -> str:
    return " / ".join(write(value(row)) for row in rows)


def _mean(rows: Rows, name: str, write: Callable[[float], str]) -> str:
    known = [row[name] for row in rows if row[name] is not None]
    return write(mean(known)) if known else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
