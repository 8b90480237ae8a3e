"""Speculative decoding against `model.generate`: speed, accepted tokens, and whether the text is the same.

All variants continue the same prompts greedily (noise: at random, from one seed), in turns, from the same prefilled
cache; the clock runs from the first new token to the last. `speedup` is the median over the prompts of a group of the
seconds a token that `generate` with a `DynamicCache` takes, over those of the variant. Page sets are measured in runs
of their own, which are not timed.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.readme import MEASUREMENTS
from benchmarks.speculative_prompts import GROUPS, make_group
from benchmarks.speculative_variants import BASELINE, Run, Variant, make_variants
from demos.smollm2 import load_model
from oval_spec import SpeculativeStats

PREFILL_CHUNK_TOKENS = 1024
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Row:
    """A variant on a group of prompts.

    `accepted_mean` are draft tokens a drafted step, `step_tokens` new tokens a pass of the target, `identical` the
    share of prompts whose whole text is that of `generate`, `agreement` the mean share before the first difference.
    `pages` and `covered` are means over KV heads, see `oval_spec.page_sets`.
    """

    dtype: str
    context: int
    group: str
    drafter: str
    mode: str
    speedup: float
    tokens_per_s: float
    accepted_mean: float | None
    step_tokens: float | None
    identical: float
    agreement: float
    retracted: float | None
    drafted_share: float | None
    pages: dict[str, float] | None = None
    covered: dict[str, float] | None = None


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    rows: list[Row] = []
    for dtype in options.dtypes:
        model, tokenizer = load_model(options.model, DTYPES[dtype])
        for context in options.contexts:
            for group in options.groups:
                rows += _measure(model, tokenizer, dtype, context, group, options)
                print("\n".join(map(_line, rows[-len(options.variants) :])), flush=True)
    result = {
        "benchmark": options.name,
        "command": command_line("speculative", arguments),
        "machine": describe_machine(),
        "model": options.model or "SmolLM2-135M-Instruct",
        "new_tokens": options.new_tokens,
        "prompts": options.prompts,
        "rows": [asdict(row) for row in rows],
    }
    publish(result, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speculative", description=__doc__)
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--heads", type=Path, help="Medusa heads of the model (default: those of SmolLM2)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[512], help="tokens of a prompt (default: 512)")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--prompts", type=int, default=4, help="of each group (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=256, help="of each text (default: %(default)s)")
    parser.add_argument("--variants", nargs="+", help="names, default: all that suit the context", metavar="NAME")
    parser.add_argument("--look-every", type=int, help="measure page sets at every n-th verification, in other runs")
    parser.add_argument("--name", default="speculative", help="of the JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if min(options.prompts, options.new_tokens, *options.contexts) < 2:
        parser.error("--prompts, --new-tokens and --contexts take 2 or more")
    return options


def _measure(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    context: int,
    group: str,
    options: argparse.Namespace,
) -> list[Row]:
    variants = make_variants(model, options.heads, context, options.variants)
    options.variants = [variant.title for variant in variants]
    prompts = make_group(tokenizer, group, options.prompts, context)
    runs: dict[str, list[Run]] = {variant.title: [] for variant in variants}
    looks: dict[str, list[SpeculativeStats]] = {variant.title: [] for variant in variants}
    with tqdm(total=len(prompts) * len(variants), unit="text") as progress:
        for prompt in prompts:
            cache = _prefilled(model, prompt.tokens[:, :-1])
            for variant in variants:
                progress.set_description(f"{dtype}, {context} tokens, {group}: {variant.title}")
                runs[variant.title].append(variant.run(prompt, copy.deepcopy(cache), options.new_tokens))
                progress.update()
                if options.look_every is not None and variant.look is not None:
                    arguments = (prompt, copy.deepcopy(cache), options.new_tokens, options.look_every)
                    looks[variant.title].append(variant.look(*arguments))
    return [
        replace(_row(variant, runs, dtype, context, group), **_page_sets(looks[variant.title])) for variant in variants
    ]


def _page_sets(looks: list[SpeculativeStats]) -> dict[str, Any]:
    """Means over the prompts, by KV head."""
    found = [look.page_sets.means() for look in looks if look.page_sets is not None]
    if not found:
        return {}
    return {
        kind: {name: mean(one[kind].get(name, 0.0) for one in found) for name in found[0][kind]}
        for kind in ("pages", "covered")
    }


@torch.inference_mode()
def _prefilled(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    cache: Any = DynamicCache(config=model.config)
    for chunk in tokens.split(PREFILL_CHUNK_TOKENS, dim=1):
        model(chunk, cache=cache, logits_to_keep=1)
    return cache


def _row(variant: Variant, runs: dict[str, list[Run]], dtype: str, context: int, group: str) -> Row:
    own, base = runs[variant.title], runs[BASELINE]
    stats = [run.stats for run in own if run.stats is not None]
    agreement = [_agreement(run.tokens, plain.tokens) for run, plain in zip(own, base, strict=True)]
    return Row(
        dtype=dtype,
        context=context,
        group=group,
        drafter=variant.drafter,
        mode=variant.mode,
        speedup=median(plain.token_s / run.token_s for run, plain in zip(own, base, strict=True)),
        tokens_per_s=median(1 / run.token_s for run in own),
        accepted_mean=mean(one.accepted_mean for one in stats) if stats else None,
        step_tokens=mean(one.tokens / max(1, one.steps) for one in stats) if stats else None,
        identical=mean(share == 1 for share in agreement),
        agreement=mean(agreement),
        retracted=mean(one.retracted / max(1, one.tokens) for one in stats) if stats else None,
        drafted_share=mean(one.drafted_steps / max(1, one.steps) for one in stats) if stats else None,
    )


def _agreement(text: list[int], other: list[int]) -> float:
    """Share of `other` before the first difference."""
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return same / max(len(text), len(other))


def _line(row: Row) -> str:
    accepted = "" if row.step_tokens is None else f", {row.step_tokens:.2f} tokens a step"
    return (
        f"{row.dtype} {row.context:6} {row.group:12} {row.drafter:18} {row.mode:12} {row.speedup:5.2f}x "
        f"{row.tokens_per_s:6.1f} tokens/s, identical {row.identical:.0%} ({row.agreement:.0%}){accepted}"
    )


if __name__ == "__main__":
    main()
