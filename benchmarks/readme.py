"""Rewrite the tables of the documentation from the JSON of the last benchmark runs: `python -m benchmarks.readme`."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.generation_tables import generation_table
from benchmarks.image_tables import image_qa_table, image_speed_table
from benchmarks.markdown import Result, source, table
from benchmarks.quality_tables import quality_ablation_table, quality_equal_table, quality_table
from benchmarks.rivals.tables import rivals_table
from benchmarks.router_tables import routers_table
from benchmarks.speculative_tables import page_sets_table, speculative_table

MEASUREMENTS = Path("docs/measurements")
PAGES = (Path("README.md"), Path("docs/measurements.md"))


def main(arguments: list[str] | None = None) -> None:
    """Replace what stands between `<!-- name -->` and `<!-- /name -->` for every result there is."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--results", type=Path, default=MEASUREMENTS, help="where the JSON is")
    parser.add_argument("--pages", type=Path, nargs="+", default=PAGES, help="what is rewritten")
    options = parser.parse_args(arguments)
    texts = {page: page.read_text(encoding="utf-8") for page in options.pages}
    for name, (results, render) in TABLES.items():
        files = [options.results / f"{result}.json" for result in results]
        if all(file.exists() for file in files):
            page = _page_with(name, texts)
            texts[page] = _replace(texts[page], name, render(*(json.loads(file.read_text()) for file in files)))
    for page, text in texts.items():
        page.write_text(text, encoding="utf-8")


def _page_with(name: str, texts: dict[Path, str]) -> Path:
    found = [page for page, text in texts.items() if _section(name).search(text)]
    if len(found) != 1:
        raise ValueError(
            f"expected a section <!-- {name} --> ... <!-- /{name} --> in one of {', '.join(map(str, texts))}, "
            f"found it in {', '.join(map(str, found)) or 'none'}"
        )
    return found[0]


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)


def _replace(text: str, name: str, table: str) -> str:
    return _section(name).sub(lambda match: f"{match[1]}{table}\n{match[2]}", text)


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
    return f"{table(head, lines)}\n\n{source(result)} {costs}"


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
    return f"{table(head, lines)}\n\n{source(result)} {bandwidth}"


def breakdown_table(result: Result) -> str:
    """One line a part of the step, two columns a router and context: milliseconds and share."""
    rows = result["rows"]
    columns = list(dict.fromkeys((row["router"], row["context"]) for row in rows))
    cells = {(row["part"], row["router"], row["context"]): f"{row['ms']:.1f} ({row['share']:.0%})" for row in rows}
    parts = dict.fromkeys(row["part"] for row in rows)
    lines = [(part, *(cells.get((part, *column), "–") for column in columns)) for part in parts]
    head = ("milliseconds a step", *(f"{router}, {context:,}" for router, context in columns))
    return f"{table(head, lines)}\n\n{source(result)}"


# Section of a page -> the results that it is made of, and how.
TABLES: dict[str, tuple[tuple[str, ...], Callable[..., str]]] = {
    "quality": (("quality",), quality_table),
    "quality_equal": (("quality_equal",), quality_equal_table),
    "quality_pages": (("quality_pages",), quality_ablation_table),
    "quality_ablation": (("quality_ablation",), quality_ablation_table),
    "routers": (("routers",), routers_table),
    "rivals": (("rivals_kvpress", "rivals_oval", "quality_equal"), rivals_table),
    "generation": (("generation",), generation_table),
    "decode": (("decode",), decode_table),
    "layer": (("layer",), layer_table),
    "breakdown": (("breakdown",), breakdown_table),
    "image_qa": (("image_qa",), image_qa_table),
    "image_qa_runs": (("image_qa_runs",), image_qa_table),
    "speculative": (("speculative",), speculative_table),
    "speculative_long": (("speculative_long",), speculative_table),
    "page_sets": (("speculative_long",), page_sets_table),
    "image_speed": (("image_speed",), image_speed_table),
}

if __name__ == "__main__":
    main()
