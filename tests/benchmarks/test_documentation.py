"""The pages of the documentation get their tables from results, and their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "demos", "benchmarks", "oval_core", "oval_mm", "oval_spec")
MACHINE = {"cpu": "C", "threads": 2, "simd": "S", "torch": "1", "transformers": "2"}
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(name="results")
def _results(tmp_path: Path) -> Path:
    """A folder with the result of one benchmark."""
    row = {"shape": "X", "dtype": "float32", "context": 8192, "sdpa_ms": 2, "oval_ms": 1, "floor_ms": 0.5}
    row |= {"vs_sdpa": 2, "vs_floor": 2}
    result = {"command": "python -m benchmarks.layer", "machine": MACHINE, "bandwidth_bytes_per_s": 1e10, "rows": [row]}
    (tmp_path / "layer.json").write_text(json.dumps(result))
    return tmp_path


def rewrite(results: Path, *pages: str) -> list[str]:
    """What becomes of pages."""
    files = [results / f"{number}.md" for number in range(len(pages))]
    for file, page in zip(files, pages, strict=True):
        file.write_text(page)
    readme.main(["--results", str(results), "--pages", *map(str, files)])
    return [file.read_text() for file in files]


def test_pages_are_rewritten_between_their_markers(results: Path) -> None:
    other, text = rewrite(results, "nothing", "before\n<!-- layer -->\nold\n<!-- /layer -->\nafter\n")
    assert other == "nothing"
    assert text.startswith("before\n<!-- layer -->\n| shape |")
    assert "| X | float32 | 8,192 | 2.00 | 1.00 | 0.50 | 2.0x | 2.0x |" in text
    assert text.endswith("<!-- /layer -->\nafter\n")
    assert "old" not in text


@pytest.mark.parametrize("pages", [("nothing",), ("<!-- layer -->\n<!-- /layer -->\n",) * 2])
def test_a_section_that_is_nowhere_or_twice_is_refused(results: Path, pages: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected a section <!-- layer --> ... <!-- /layer --> in one of"):
        rewrite(results, *pages)
    assert tuple((results / f"{number}.md").read_text() for number in range(len(pages))) == pages


def test_this_repository_has_every_section_once() -> None:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in readme.PAGES)
    for name in readme.TABLES:
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- /{name} -->") == 1


def test_links_inside_the_repository_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]
    assert pages
    for page in pages:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            if ":" in path:
                continue
            there = page.parent / path if path else page
            assert there.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors(there), f"{page}: {link}"


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
