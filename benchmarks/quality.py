"""Quality against bytes: KL, top-1 agreement and perplexity change against dense attention, for every router.

The last positions of each text are re-read token by token under each setting, in all layers, with errors propagating.
Bytes are those of one KV head and decoding step, all metadata counted, as if keys, values and page features were
bfloat16 (int8 bases stay int8); `bytes_ratio` is their share of a dense read. Sinks, window and the open page are
inside every budget.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.teacher_forcing import Comparison, Prefix, compare, prefill
from demos.smollm2 import load_model
from demos.texts import TEXTS, load_text
from oval_core import OvalConfig

BYTES_PER_ELEMENT = 2  # bfloat16


@dataclass(frozen=True)
class Setting:
    """One way to read the cache."""

    router: str
    page_size: int
    budget_pages: int
    rank: int = 4
    shortlist_ratio: float = 0.25

    def config(self) -> OvalConfig:
        """The setting as a config that never skips paging."""
        return OvalConfig(**asdict(self), stats_every=32)


@dataclass(frozen=True)
class Row:
    """One line of the result."""

    text: str
    context: int
    router: str
    page_size: int
    budget_pages: int
    rank: int
    shortlist_ratio: float
    bytes_ratio: float
    kl: float
    top1: float
    ppl_ratio: float
    hit_rate: float | None


SETTINGS = (
    *(Setting("basis", 16, budget) for budget in (12, 18, 24, 48, 96)),
    Setting("basis", 16, 24, rank=2),
    Setting("basis", 16, 24, shortlist_ratio=0.15),
    Setting("basis", 32, 12, rank=8),
    Setting("basis", 8, 24, rank=2),
    *(Setting("quest", 16, budget) for budget in (36, 48)),
    *(Setting("box", 16, budget) for budget in (36, 48, 72, 96)),
    *(Setting("mean", 16, budget) for budget in (36, 72)),
    *(Setting("oracle", 16, budget) for budget in (24, 48)),
    *(Setting(router, 16, 48) for router in ("window", "random")),
    *(Setting(router, 32, 24) for router in ("quest", "box", "window")),
)
QUICK = (Setting("basis", 16, 12), Setting("box", 16, 12), Setting("random", 16, 12))


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    settings = QUICK if options.quick else SETTINGS
    work = options.context + (options.positions + 1) * len(settings)
    rows: list[Row] = []
    with tqdm(total=work * len(options.texts), unit="token") as progress:
        for text in options.texts:
            tokens = tokenizer(load_text(text), return_tensors="pt", verbose=False).input_ids[:, : options.context]
            progress.set_description(f"{text}: dense")
            prefix = prefill(model, tokens, options.positions, progress.update)
            for setting in settings:
                progress.set_description(f"{text}: {setting.router}/{setting.budget_pages}")
                result = compare(model, prefix, setting.config(), progress.update)
                rows.append(_row(text, setting, prefix, result, model))
    _report(rows, options, model)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=["reference", "novel"])
    parser.add_argument("--context", type=int, default=6144, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=96, help="last positions compared (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="three settings only")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where JSON and plot go")
    options = parser.parse_args(arguments)
    options.command = command_line("quality", arguments)
    return options


def _row(text: str, setting: Setting, prefix: Prefix, result: Comparison, model: PreTrainedModel) -> Row:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    token_bytes = 2 * head_dim * BYTES_PER_ELEMENT
    context = prefix.tokens.shape[1]
    exact = result.stats["pages_read_mean"] * setting.page_size * token_bytes
    return Row(
        text=text,
        context=context,
        **asdict(setting),
        bytes_ratio=(exact + result.metadata_bytes) / (context * token_bytes),
        kl=result.kl,
        top1=result.top1,
        ppl_ratio=result.ppl_ratio,
        hit_rate=result.stats["route_hit_rate"],
    )


def _report(rows: list[Row], options: argparse.Namespace, model: PreTrainedModel) -> None:
    """Print the table, write plot and JSON, print the JSON line."""
    from benchmarks.quality_plot import plot_quality

    print(
        f"{'text':10} {'router':7} {'page':>4} {'rank':>4} {'budget':>6} {'bytes':>7} {'KL':>8} {'top-1':>6} {'ppl':>6}"
    )
    for row in sorted(rows, key=lambda row: (row.text, row.router, row.bytes_ratio)):
        print(
            f"{row.text:10} {row.router:7} {row.page_size:4} {row.rank:4} {row.budget_pages:6} {row.bytes_ratio:7.1%} "
            f"{row.kl:8.4f} {row.top1:6.3f} {row.ppl_ratio:6.3f}"
        )
    result: dict[str, Any] = {
        "benchmark": "quality",
        "command": options.command,
        "model": options.model or "SmolLM2-135M-Instruct (Q4_1 weights, float32 arithmetic)",
        "positions": options.positions,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    plot_quality(result["rows"], options.out / "quality.png")
    publish(result, options.out)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
