"""Quality against bytes: KL, top-1 agreement and perplexity change against dense attention, for every router.

Every text is read at several places (stretches of `context` tokens one after the other); the last positions of each are
re-read token by token under each setting, in all layers, with errors propagating. Bytes are those of one KV head and
decoding step, all metadata counted, as if keys, values and page features were bfloat16 (bases as they are stored);
`bytes_ratio` is their share of a dense read. Bytes, pages and hit rate are means over the texts.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from benchmarks.layer import time_configs
from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.settings import Setting, ablations, equal_bytes, frontier, page_sizes, quick
from benchmarks.teacher_forcing import Comparison, compare, positions_fit, prefill, text_tokens
from demos.smollm2 import load_model
from demos.texts import TEXTS
from oval_core.kernels.cpu import FUSED_ROUTERS
from oval_core.model_shape import head_dim_of

COMPILED = tuple(router.name for router in FUSED_ROUTERS)
GROUPS = ("frontier", "equal", "pages", "ablation", "quick")
_GROUPS_HELP = (
    "settings: from few to many pages; OVAL and rivals at 12, 16 and 20 %% of the bytes; pages of other sizes at equal "
    "bytes; one choice changed"
)
Entry = tuple[str, float | None, Setting]  # group, share of the bytes that it was made for, setting
Plan = list[Entry]


@dataclass(frozen=True)
class Row:
    """One text under one setting.

    `kl`, `top1` and `ppl_ratio` are means over the places, `kl_places` has one KL a place. `layer_ms` is the time of an
    attention layer, for routers that run as compiled code. `router_counts` are those of all texts together.
    """

    group: str
    share: float | None
    text: str
    context: int
    router: str
    page_size: int
    budget_pages: int
    rank: int
    shortlist_ratio: float
    estimate_tail: str
    pages_read_mean: float
    bytes_ratio: float
    kl: float
    kl_places: list[float]
    top1: float
    ppl_ratio: float
    hit_rate: float | None
    router_counts: dict[str, int]
    layer_ms: float | None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    rows: list[Row] = []
    plans = {context: _plan(options, context, model) for context in options.contexts}
    layer_ms = {context: _time_layer(plan, model, context) for context, plan in plans.items()}
    texts = [text_tokens(tokenizer, text) for text in options.texts]
    rows_read = len(texts) * options.places
    work = sum(rows_read * (context + (options.positions + 1) * len(plan)) for context, plan in plans.items())
    with tqdm(total=work, unit="token") as progress:
        for context, plan in plans.items():
            progress.set_description(f"{context} tokens: dense")
            prefix = prefill(model, _stretches(texts, options.places, context), options.positions, progress.update)
            for entry in plan:
                setting = entry[2]
                progress.set_description(f"{context} tokens: {setting.router}/{setting.budget_pages}")
                result = compare(model, prefix, setting.config(), progress.update)
                new = _rows(entry, options.texts, context, result, layer_ms[context].get(setting))
                tqdm.write("\n".join(map(_line, new)))
                rows += new
    _report(rows, options)


def _stretches(texts: list[Tensor], places: int, context: int) -> Tensor:
    """The first `places` stretches of `context` tokens of each text: int64 `[texts * places, context]`."""
    short = min(len(text) for text in texts)
    if short < places * context:
        raise SystemExit(f"{places} places of {context} tokens do not fit into a text of {short} tokens")
    return torch.cat([text[: places * context].view(places, context) for text in texts])


def _plan(options: argparse.Namespace, context: int, model: PreTrainedModel) -> Plan:
    head_dim = head_dim_of(model.config)
    groups: dict[str, Plan] = {
        "quick": [("quick", None, setting) for setting in quick()],
        "frontier": [("frontier", None, setting) for setting in frontier()],
        "equal": [("equal", share, setting) for share, setting in equal_bytes(context, head_dim)],
        "pages": [("pages", share, setting) for share, setting in page_sizes(context, head_dim)],
        "ablation": [("ablation", None, setting) for setting in ablations()],
    }
    return [entry for name in options.groups for entry in groups[name]]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[6144], help="tokens of each text (default: 6144)")
    parser.add_argument("--places", type=int, default=2, help="stretches of each text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=48, help="last positions of each (default: %(default)s)")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=["frontier"], help=_GROUPS_HELP)
    parser.add_argument("--name", default="quality", help="of the JSON and the plot (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where JSON and plot go")
    options = parser.parse_args(arguments)
    if options.places < 1 or not positions_fit(options.positions, min(options.contexts)):
        parser.error(
            f"--places takes 1 or more, --positions 2 or more and fewer than the tokens of a context, got "
            f"{options.places} and {options.positions}"
        )
    options.command = command_line("quality", arguments)
    return options


def _rows(entry: Entry, texts: list[str], context: int, result: Comparison, layer_ms: float | None) -> list[Row]:
    """One row a text."""
    group, share, setting = entry
    places = len(result.kl) // len(texts)
    pages_read = result.stats["pages_read_mean"] or context / setting.page_size  # None: the budget covered every page

    def of_text(values: list[float], text: int) -> list[float]:
        return values[text * places : (text + 1) * places]

    return [
        Row(
            group=group,
            share=share,
            text=name,
            context=context,
            **asdict(setting),
            pages_read_mean=pages_read,
            bytes_ratio=result.bytes_ratio,
            kl=mean(of_text(result.kl, text)),
            kl_places=of_text(result.kl, text),
            top1=mean(of_text(result.top1, text)),
            ppl_ratio=mean(of_text(result.ppl_ratio, text)),
            hit_rate=result.stats["route_hit_rate"],
            router_counts=result.stats["router_counts"],
            layer_ms=layer_ms,
        )
        for text, name in enumerate(texts)
    ]


def _time_layer(plan: Plan, model: PreTrainedModel, context: int) -> dict[Setting, float]:
    """Milliseconds of one layer of the model's shape, for every setting that runs as compiled code."""
    settings = [setting for _, _, setting in plan if setting.router in COMPILED]
    shape = model.config.num_attention_heads, model.config.num_key_value_heads, head_dim_of(model.config)
    return dict(zip(settings, time_configs([setting.config() for setting in settings], shape, context), strict=True))


def _line(row: Row) -> str:
    return (
        f"{row.text:10} {row.context:6} {row.router:12} page {row.page_size:3} rank {row.rank} of "
        f"{row.shortlist_ratio:.0%}: {row.pages_read_mean:6.1f} pages {row.bytes_ratio:6.1%}  KL {row.kl:.4f}  "
        f"top-1 {row.top1:.3f}  perplexity {row.ppl_ratio:.3f}"
    )


def _report(rows: list[Row], options: argparse.Namespace) -> None:
    """Write plot and JSON, print the JSON line."""
    from benchmarks.quality_plot import plot_quality

    result: dict[str, Any] = {
        "benchmark": options.name,
        "command": options.command,
        "model": options.model or "SmolLM2-135M-Instruct (Q4_1 weights, float32 arithmetic)",
        "places": options.places,
        "positions": options.positions,
        "machine": describe_machine(),
        "rows": [asdict(row) for row in rows],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    plot_quality(result["rows"], options.out / f"{options.name}.png")
    publish(result, options.out)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
