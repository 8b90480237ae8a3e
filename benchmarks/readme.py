"""Rewrite the tables of the README from the JSON of the last benchmark runs: `python -m benchmarks.readme`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

MEASUREMENTS = Path("docs/measurements")
Result = dict[str, Any]
SETTING = ("router", "page_size", "rank", "shortlist_ratio", "budget_pages")


def main(arguments: list[str] | None = None) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` for every result there is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--results", type=Path, default=MEASUREMENTS, help="where the JSON is")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="what is rewritten")
    options = parser.parse_args(arguments)
    text = options.readme.read_text(encoding="utf-8")
    for name, render in TABLES.items():
        source = options.results / f"{name}.json"
        if source.exists():
            text = _replace(text, name, render(json.loads(source.read_text())))
    options.readme.write_text(text, encoding="utf-8")


def _replace(text: str, name: str, table: str) -> str:
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"expected a section <!-- {name} --> ... <!-- /{name} --> in the README, found none")
    return pattern.sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


def quality_table(result: Result) -> str:
    """Mean over the texts, one line a setting."""
    rows = result["rows"]
    grouped: dict[tuple[Any, ...], list[Result]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in SETTING), []).append(row)
    lines = []
    for (router, page_size, rank, ratio, budget), same in grouped.items():
        name = f"basis r={rank} on {ratio:.0%}" if router == "basis" else router
        share, kl, top1, ppl = (mean(r[key] for r in same) for key in ("bytes_ratio", "kl", "top1", "ppl_ratio"))
        lines.append((name, page_size, budget, f"{share:.1%}", f"{kl:.4f}", f"{top1:.3f}", f"{ppl:.3f}"))
    texts = ", ".join(dict.fromkeys(row["text"] for row in rows))
    head = ("router", "page size", "pages read", "bytes / dense", "KL to dense", "top-1 agrees", "perplexity ratio")
    note = f"{rows[0]['context']:,} tokens, last {result['positions']} positions, mean of the texts: {texts}."
    return f"{_table(head, lines)}\n\n{_source(result)} {note}"


def decode_table(result: Result) -> str:
    """One line a dtype and context."""
    lines = [
        (
            row["dtype"],
            f"{row['context']:,}",
            row["batch"],
            *(f"{row['step_ms'][name]:.1f}" for name in ("dynamic", "static", "oval")),
            f"{row['vs_dynamic']:.2f}x",
            f"{row['vs_static']:.2f}x",
        )
        for row in result["rows"]
    ]
    head = (
        "dtype",
        "context",
        "batch",
        "DynamicCache [ms]",
        "StaticCache [ms]",
        "OVAL [ms]",
        "vs dynamic",
        "vs static",
    )
    costs = (
        f"Summarising all pages takes {result['prefill_overhead']:.1%} of the prefill's time; bases take "
        f"{result['basis_bytes_ratio']:.1%} of the bytes of keys and values (first dtype)."
    )
    return f"{_table(head, lines)}\n\n{_source(result)} {costs}"


def layer_table(result: Result) -> str:
    """One line a shape, dtype and context."""
    lines = [
        (
            row["shape"],
            row["dtype"],
            f"{row['context']:,}",
            f"{row['sdpa_ms']:.2f}",
            f"{row['oval_ms']:.2f}",
            f"{row['floor_ms']:.2f}",
            f"{row['vs_sdpa']:.1f}x",
            f"{row['vs_floor']:.1f}x",
        )
        for row in result["rows"]
    ]
    head = (
        "shape",
        "dtype",
        "context",
        "SDPA [ms]",
        "OVAL [ms]",
        "floor [ms]",
        "faster than SDPA",
        "slower than floor",
    )
    bandwidth = f"Floor: bytes read over {result['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s, what a large copy reaches."
    return f"{_table(head, lines)}\n\n{_source(result)} {bandwidth}"


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in cells)


def _source(result: Result) -> str:
    machine = result["machine"]
    return (
        f"`{result['command']}` on {machine['cpu']}, {machine['threads']} threads, "
        f"{machine['simd']}, torch {machine['torch']}, transformers {machine['transformers']}."
    )


TABLES: dict[str, Callable[[Result], str]] = {"quality": quality_table, "decode": decode_table, "layer": layer_table}

if __name__ == "__main__":
    main()
