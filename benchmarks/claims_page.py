"""Write `docs/claims.md` from the results of the last benchmark runs: `python -m benchmarks.claims_page`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import claim_judges as judges
from benchmarks.claim_judges import Claim
from benchmarks.markdown import Result, table
from benchmarks.readme import MEASUREMENTS

CLAIMS = (
    Claim(
        "the top 3 pages of 32 tokens hold 99.2 % of the needed KV pairs, the top 5 99.9 %",
        ("claims",),
        judges.needed_on_top,
    ),
    Claim("the top 4 pages cover 92 % of the high-weight attention", ("claims",), judges.mass_on_top),
    Claim("neighbouring steps choose nearly the same pages", ("claims",), judges.same_again),
    Claim("more than 76 % of the high-weight pairs lie within 32 tokens", ("claims",), judges.near),
    Claim("only 38 % of the pages are read often", ("claims",), judges.often),
    Claim("self-sized pages: 68 % have 8-16 tokens, 22 % have 1-4", ("claims",), judges.humps),
    Claim("locality raises the accuracy of page retrieval by 23 %", ("routers",), judges.locality),
    Claim("quantising drops the hit rate to 45 %, a repair head brings it to 89 %", ("routers",), judges.repaired),
    Claim("hit rate above 85 %", ("routers",), judges.hit_rate),
    Claim("the router adds under 0.3 ms", ("breakdown", "claims"), judges.cheap),
    Claim("short prompt, 100 new tokens: memory -31.5 %, latency -22.3 %", ("decode",), judges.short_prompts),
    Claim("page sets: accept rate 58 -> 73 %, latency -31 %", ("speculative_long",), judges.page_sets),
    Claim("LLaVA: memory -28 %, speed +27 %, VQA +0.8 points", ("image_qa", "image_speed"), judges.images),
)
HEAD = ("claim", "what was measured here", "command", "verdict")
WORDS = """# Claims about paged attention, measured

Figures that were promised for routing by pages, and what this repository measures: with SmolLM2-135M-Instruct on a CPU
unless a line says otherwise. It is a small model; what fails here may hold for another one. *Needed* or *high-weight*
pairs are the fewest keys and values that hold 90 % of a query's attention mass. Pages "on top" are chosen with
hindsight, each query head its own: no router can do better. `python -m benchmarks.claims --help` defines the rest, and
`python -m benchmarks.claims_page` writes this page from the results in `docs/measurements`.

"""


def main(arguments: list[str] | None = None) -> None:
    """Write the page; see `--help`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.claims_page", description=__doc__)
    parser.add_argument("--results", type=Path, default=MEASUREMENTS, help="where the JSON is")
    parser.add_argument("--page", type=Path, default=Path("docs/claims.md"), help="what is written")
    options = parser.parse_args(arguments)
    found = {path.stem: json.loads(path.read_text()) for path in options.results.glob("*.json")}
    options.page.write_text(WORDS + table(HEAD, [line(claim, found) for claim in CLAIMS]) + "\n", encoding="utf-8")


def line(claim: Claim, found: dict[str, Result]) -> tuple[str, str, str, str]:
    """One line of the page; without the results that a claim rests on it says that they are missing."""
    lacking = [name for name in claim.results if name not in found]
    if lacking:
        return claim.text, f"no results of {', '.join(lacking)}", "`make bench`", "not measured yet"
    results = [found[name] for name in claim.results]
    measured, verdict = claim.judge(*results)
    return claim.text, measured, ", ".join(f"`{result['command']}`" for result in results), verdict


if __name__ == "__main__":
    main()
