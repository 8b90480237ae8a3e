"""What is claimed of routing by pages, and what the measurements in `docs/measurements` say to it.

A judge gets the results that a claim rests on and returns what was measured, in words, and a verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from benchmarks.markdown import Result

HOLDS, FAILS, UNKNOWN = "holds", "does not hold", "cannot be measured here"
NEARLY = 0.9  # what "nearly the same pages" has to mean at least
CLOSE = 0.05  # two shares are the same
ROUTER_MS = 0.3

Judged = tuple[str, str]


@dataclass(frozen=True)
class Claim:
    """A claim, the results that it is judged by (names of benchmarks), and its judge."""

    text: str
    results: tuple[str, ...]
    judge: Callable[..., Judged]


def verdict(holds: bool) -> str:
    """The word for it."""
    return HOLDS if holds else FAILS


def needed_on_top(found: Result) -> Judged:
    """Few pages hold nearly all needed pairs."""
    three, five = (found["pairs_on_top"][pages] for pages in ("3", "5"))
    words = f"top 3: {three:.1%}, top 5: {five:.1%} of {found['needed_pairs']:.0f} needed pairs"
    return words, verdict(three >= 0.992 and five >= 0.999)


def mass_on_top(found: Result) -> Judged:
    """Few pages cover most of the mass of the needed pairs."""
    four = found["needed_mass_on_top"]["4"]
    return f"{four:.1%}, with {found['first_token_mass']:.0%} of all mass on the first token", verdict(four >= 0.92)


def same_again(found: Result) -> Judged:
    """Neighbouring steps choose nearly the same pages."""
    again = found["again"]
    words = f"of the top {', '.join(again)} pages {', '.join(f'{share:.0%}' for share in again.values())} again"
    return words, verdict(min(again.values()) >= NEARLY)


def near(found: Result) -> Judged:
    """Most needed pairs are near."""
    return f"{found['near']:.1%} (of all mass {found['near_mass']:.1%})", verdict(found["near"] > 0.76)


def often(found: Result) -> Judged:
    """Few pages are read often."""
    words = f"{found['pages_often']:.1%} hold a needed pair at half of the steps, {found['pages_ever']:.1%} at one"
    return words, verdict(found["pages_often"] <= 0.38)


def humps(found: Result) -> Judged:
    """Self-sized pages are middling or very short."""
    counts = {int(tokens): pages for tokens, pages in found["page_tokens"].items()}
    middle, short, longer = (
        sum(pages for tokens, pages in counts.items() if low <= tokens <= high) / sum(counts.values())
        for low, high in ((8, 16), (1, 4), (17, 32))
    )
    holds = abs(middle - 0.68) <= CLOSE and abs(short - 0.22) <= CLOSE
    return f"{middle:.0%} of 8-16, {short:.1%} of 1-4, {longer:.0%} of 17-32 tokens", verdict(holds)


def locality(found: Result) -> Judged:
    """Locality finds more."""
    plain = _row(found, "basis")["hit_rate"]
    best = max((row for row in found["rows"] if row["router"].startswith("basis +")), key=lambda row: row["hit_rate"])
    gain = best["hit_rate"] / plain - 1
    return f"hit rate {plain:.1%}, at best {best['hit_rate']:.1%} (`{best['router']}`)", verdict(gain >= 0.23)


def repaired(found: Result) -> Judged:
    """Quantising the model costs hits, which a repair brings back."""
    places = ("before repair", "after repair")
    before, after = (
        [row for row in found["rows"] if row["kl"] is None and row["router"].endswith(place)] for place in places
    )
    if not before:
        return "no repair was measured", UNKNOWN
    words = [f"{row['router']}: {row['hit_rate']:.1%}" for pair in zip(before, after, strict=True) for row in pair]
    holds = all(
        row["hit_rate"] <= 0.45 + CLOSE and fixed["hit_rate"] >= 0.89 - CLOSE
        for row, fixed in zip(before, after, strict=True)
    )
    return "; ".join(words), verdict(holds)


def hit_rate(found: Result) -> Judged:
    """Routers find most of the mass."""
    rows = [row for row in found["rows"] if row["kl"] is not None and row["pages"] == "16" and not _around(row)]
    words = ", ".join(f"`{row['router']}` {row['hit_rate']:.1%}" for row in rows)
    share = f"{found['share']:.0%} of the bytes"
    return f"at {share}: {words}", verdict(max(row["hit_rate"] for row in rows) > 0.85)


def cheap(breakdown: Result, found: Result) -> Judged:
    """A router costs little time."""
    steps = {}
    for router in ("box", "basis"):
        rows = [row for row in breakdown["rows"] if row["router"] == router and row["context"] == 8128]
        steps[router] = sum(row["ms"] for row in rows if row["part"] in ("tier 1", "tier 2", "selection"))
    layers = {router: ms / found["layers"] for router, ms in steps.items()}
    words = "; ".join(f"`{router}` {layers[router]:.2f} ms a layer, {ms:.1f} ms a step" for router, ms in steps.items())
    cheap_layers = [f"`{router}`" for router, ms in layers.items() if ms < ROUTER_MS]
    found_verdict = verdict(max(steps.values()) < ROUTER_MS)
    if found_verdict == FAILS and cheap_layers:
        found_verdict = f"does not hold for a step; holds for a layer with {', '.join(cheap_layers)}"
    return f"8,128 tokens, {found['layers']} layers: {words}", found_verdict


def short_prompts(found: Result) -> Judged:
    """Short prompts gain memory and time."""
    row = next(row for row in found["rows"] if row["context"] == 512)
    words = (
        f"{row['context']} tokens, {row['dtype']}: {row['vs_dynamic']:.2f}x as fast as a `DynamicCache`; the cache is "
        f"kept whole by design, {found['basis_bytes_ratio']:.1%} come on top"
    )
    return words, FAILS  # whatever the speed: memory cannot shrink


def page_sets(found: Result) -> Judged:
    """Reading what draft and target agree on makes drafts better and decoding faster."""
    words, gains = [], []
    for row in (row for row in found["rows"] if row["mode"] == "pages, agreed"):
        exact = _exact_twin(found, row)
        gains.append(row["tokens_per_s"] / exact["tokens_per_s"])
        accepted = f"{exact['accepted_mean']:.2f} -> {row['accepted_mean']:.2f}"
        words.append(f"{row['drafter']}, {row['group']}: {accepted} draft tokens, {gains[-1]:.2f}x")
    return "; ".join(words), verdict(mean(gains) >= 1 / (1 - 0.31))


def images(quality: Result, speed: Result) -> Judged:
    """LLaVA needs less memory, is faster and better."""
    dense, basis = (
        {row["dataset"]: row["accuracy"] for row in quality["rows"] if (row["router"], row["read_share"]) == reader}
        for reader in (("dense", 1.0), ("basis", 0.25))
    )
    gains = ", ".join(f"{name} {100 * (basis[name] - dense[name]):+.1f}" for name in dense)
    rows = [row for row in speed["rows"] if (row["read_share"], row["dtype"]) == (0.25, "float32")]
    layer, whole = (
        min(row["vs_dense"] for row in rows if ("one layer" in row["shape"]) == one) for one in (True, False)
    )
    words = (
        f"no weights of LLaVA here; a LLaVA of 2 M parameters that reads 25 % of the image pages: points {gains}; "
        f"{whole:.2f}x as fast, one layer of LLaVA-1.5's shape {layer:.1f}x or more; memory: the cache is kept whole"
    )
    return words, UNKNOWN


def _row(found: Result, router: str) -> dict[str, Any]:
    row: dict[str, Any] = next(row for row in found["rows"] if row["router"] == router and row["pages"] == "16")
    return row


def _around(row: dict[str, Any]) -> bool:
    return row["router"].startswith("basis ") or row["router"].endswith("not compiled")


def _exact_twin(found: Result, row: dict[str, Any]) -> dict[str, Any]:
    alike = ("dtype", "context", "group", "drafter")
    twin: dict[str, Any] = next(
        other for other in found["rows"] if other["mode"] == "exact" and all(other[key] == row[key] for key in alike)
    )
    return twin
