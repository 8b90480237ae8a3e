"""Pages that size themselves against fixed ones: KL to dense attention at equal bytes, and how long the pages are.

Every kind of page reads the same text with several budgets, as `benchmarks.quality` does; its KL at a share of the
dense bytes is interpolated (the logarithms, in a line) between the budgets around it. Bytes count the tokens that were
read, not pages.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from torch import Tensor
from tqdm import tqdm

from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.teacher_forcing import Prefix, compare, prefill, text_tokens
from demos.smollm2 import load_model
from demos.texts import TEXTS
from oval_core import OvalConfig
from oval_core.page_policy import PagePolicy
from oval_core.page_sizing import ByScore, SelfSizedPages
from oval_core.page_sizing.head import SizingHead
from oval_core.page_sizing.self_sized import SHARPNESS

FIXED = (8, 16, 32, 64)
MOST_TOKENS = 32  # of a page that sizes itself
Kind = tuple[int, int, PagePolicy | None]  # page size, tokens of a page on average, policy


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    tokens = text_tokens(tokenizer, options.text)[None, : options.context]
    kinds = _kinds(options)
    rows = []
    with tqdm(total=len(kinds) * len(options.tokens_read) * (options.positions + 1)) as progress:
        prefix = prefill(model, tokens, options.positions, lambda _: None)
        for name, (page_size, average, policy) in kinds.items():
            for tokens_read in options.tokens_read:
                paging = {"page_size": page_size, "page_policy": policy, "budget_pages": tokens_read // average}
                config = OvalConfig(router=options.router, stats_every=32, always_paged=True, **paging)
                result = compare(model, prefix, config, progress.update)
                rows.append({"pages": name, "budget_pages": config.budget_pages, "bytes_ratio": result.bytes_ratio})
                rows[-1] |= {"kl": mean(result.kl), "hit_rate": result.stats["route_hit_rate"]}
                tqdm.write(str(rows[-1]))
    found: dict[str, Any] = {
        "benchmark": options.name, "command": options.command, "machine": describe_machine(), "rows": rows,
        "kl": {name: {share: kl_at(share, _curve(rows, name)) for share in options.shares} for name in kinds},
        "sizes": {name: page_sizes(prefix, policy) for name, (_, _, policy) in kinds.items() if policy},
    }  # fmt: skip
    options.out.mkdir(parents=True, exist_ok=True)
    publish(found, options.out)


def kl_at(share: float, curve: list[tuple[float, float]]) -> float | None:
    """KL at a share of the bytes, between the points (share, KL) of `curve` around it; None outside of them."""
    for (low, more), (high, less) in pairwise(sorted(curve)):
        if low <= share <= high:
            along = math.log(share / low) / math.log(high / low)
            return math.exp(math.log(more) + along * math.log(less / more))
    return None


def page_sizes(prefix: Prefix, policy: PagePolicy) -> dict[int, int]:
    """How many pages of how many tokens the first row has, all layers together."""
    layers: Any = prefix.cache.layers
    keys: list[Tensor] = [layer.keys[0] for layer in layers]
    counts = Counter(length for own in keys for length in policy.lengths(own, MOST_TOKENS))
    return dict(sorted(counts.items()))


def _kinds(options: argparse.Namespace) -> dict[str, Kind]:
    kinds: dict[str, Kind] = {f"{size} tokens": (size, size, None) for size in options.fixed}
    ways: dict[str, Any] = {
        f"{score}, sharpness {sharpness:g}": ByScore(score, sharpness)
        for score in ("spread", "entropy")
        for sharpness in options.sharpness
    }
    if options.head is not None:
        ways["head"] = SizingHead.load(options.head)
    average = options.mean_tokens
    return kinds | {name: (MOST_TOKENS, average, SelfSizedPages(way, average)) for name, way in ways.items()}


def _curve(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(row["bytes_ratio"], row["kl"]) for row in rows if row["pages"] == name]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_sizes", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--head", type=Path, help="trained by oval_core.page_sizing.training (default: none)")
    parser.add_argument("--text", choices=TEXTS, default=TEXTS[0], help="(default: %(default)s)")
    parser.add_argument("--router", default="box", help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=32, help="last positions of it (default: %(default)s)")
    parser.add_argument("--fixed", nargs="+", type=int, default=FIXED, help="tokens of fixed pages (default: 8 to 64)")
    parser.add_argument("--mean-tokens", type=int, default=16, help="of a page that sizes itself (default: 16)")
    parser.add_argument("--sharpness", nargs="+", type=float, default=[SHARPNESS], help="of the weights (default: 0.5)")
    parser.add_argument("--tokens-read", nargs="+", type=int, default=[384, 768, 1536], help="budgets, in tokens")
    parser.add_argument("--shares", nargs="+", type=float, default=[0.15, 0.20, 0.30], help="of the dense bytes")
    parser.add_argument("--name", default="page_sizes", help="of the JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    options.command = command_line("page_sizes", arguments)
    return options


if __name__ == "__main__":
    main()
