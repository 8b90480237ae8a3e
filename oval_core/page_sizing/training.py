"""Train the head that sizes pages, from the keys and values of a model over a text; minutes on one thread.

    python -m oval_core.page_sizing.training --model DIR --text FILE --out sizing.safetensors

The loss is what the means of the pages do not tell of the keys and values in them (share of their variance, pages as
`oval_core.page_sizing` assigns tokens to them softly), at a fixed number of pages, hence of metadata bytes. What is
printed is that error on held-out stretches, with whole tokens: of full pages, and of pages sized by the keys' spread
alone and by the head.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel

from oval_core.page_sizing.head import SizingHead
from oval_core.page_sizing.self_sized import CHUNK_TOKENS, SelfSizedPages, Weigh, assign, page_error, spread
from oval_core.page_sizing.token_scores import token_scores
from oval_core.training.state import share_of_rate, write_whole
from oval_core.training.texts import read_texts, tokens_of

RATE = 0.02
HELD_OUT = 4  # every fourth stretch
Layer = tuple[Tensor, Tensor]  # keys and values of one layer over one stretch, [H, n, D] and [H, n, D_v]


@torch.inference_mode()
def layers_of(model: PreTrainedModel, stretch: Tensor) -> list[Layer]:
    """Keys and values of every attention layer over tokens int64 `[n]`, on the CPU."""
    cache = DynamicCache(config=model.config)
    model(stretch[None].to(model.device), cache=cache, logits_to_keep=1)
    held: Iterable[Any] = cache.layers
    return [(layer.keys[0].cpu(), layer.values[0].cpu()) for layer in held if getattr(layer, "keys", None) is not None]


def loss_of(weigh: Weigh, layer: Layer, mean_tokens: int) -> Tensor:
    """Error of the pages that tokens are softly assigned to, mean of keys and values; `[]`."""
    keys, values = (part.float() for part in layer)
    shares = assign(keys, weigh(token_scores(keys)), mean_tokens)
    return (page_error(_flat(keys), shares) + page_error(_flat(values), shares)) / 2


@torch.no_grad()
def measure(layers: Sequence[Layer], weigh: Weigh | None, mean_tokens: int, page_size: int) -> dict[str, float]:
    """Error and tokens a page of pages with whole tokens, means over `layers`; None: pages of `mean_tokens`."""
    errors, pages, tokens = 0.0, 0, 0
    for layer in layers:
        keys, values = (part.float() for part in layer)
        count = keys.shape[1]
        full = [min(mean_tokens, count - start) for start in range(0, count, mean_tokens)]
        lengths = full if weigh is None else SelfSizedPages(weigh, mean_tokens).lengths(keys, page_size)
        page = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        shares = torch.nn.functional.one_hot(page, len(lengths)).float()
        errors += float(page_error(_flat(keys), shares) + page_error(_flat(values), shares)) / 2
        pages, tokens = pages + len(lengths), tokens + count
    return {"error": errors / len(layers), "mean_tokens": tokens / pages}


def train(layers: Sequence[Layer], steps: int, batch: int, mean_tokens: int, seed: int) -> SizingHead:
    """A head trained for `steps` steps on `batch` of `layers` each. Raises ValueError without layers."""
    if not layers:
        raise ValueError("there must be keys and values to train on, got no layer")
    chance = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = SizingHead()
    optimiser = torch.optim.Adam(head.parameters(), RATE)
    for step in tqdm(range(steps), unit="step"):
        for group in optimiser.param_groups:
            group["lr"] = RATE * share_of_rate(step, steps)
        chosen = torch.randint(len(layers), (batch,), generator=chance).tolist()
        optimiser.zero_grad()
        torch.stack([loss_of(head, layers[i], mean_tokens) for i in chosen]).mean().backward()
        optimiser.step()
    return head.requires_grad_(False)


def main(arguments: list[str] | None = None) -> None:
    """Train and save; see `--help`."""
    options, text = _parse(arguments)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    (tokens,) = tokens_of(text, AutoTokenizer.from_pretrained(options.model)).values()
    if len(tokens) < options.stretches * CHUNK_TOKENS:
        raise SystemExit(f"{options.stretches} stretches of {CHUNK_TOKENS} tokens do not fit into {len(tokens)} tokens")
    apart = len(tokens) // options.stretches
    stretches = [layers_of(model, tokens[i * apart :][:CHUNK_TOKENS]) for i in tqdm(range(options.stretches))]
    held_out = [layer for i, layers in enumerate(stretches) if i % HELD_OUT == 0 for layer in layers]
    learned = [layer for i, layers in enumerate(stretches) if i % HELD_OUT for layer in layers]
    begin = time.perf_counter()
    head = train(learned, options.steps, options.batch, options.mean_tokens, options.seed)
    record: dict[str, Any] = {"mean_tokens": options.mean_tokens, "train_s": time.perf_counter() - begin}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(options.out, head.save)
    ways: dict[str, Weigh | None] = {"full pages": None, "spread": spread, "head": head}
    sizes = options.mean_tokens, options.page_size
    record["measured"] = {name: measure(held_out, weigh, *sizes) for name, weigh in ways.items()}
    write_whole(record_of(options.out), lambda path: path.write_text(json.dumps(record, indent=1) + "\n"))
    print(json.dumps(record["measured"]))


def record_of(head: Path) -> Path:
    """Beside the file of a head: what it was trained for, how long that took, and what was measured."""
    return head.with_suffix(".json")


def _parse(arguments: list[str] | None) -> tuple[argparse.Namespace, dict[str, str]]:
    """The options, and the text that they name, by its name."""
    parser = argparse.ArgumentParser(
        prog="python -m oval_core.page_sizing.training",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True, help="path or hub id of a causal language model")
    parser.add_argument("--text", required=True, type=Path, help="UTF-8 text to read")
    parser.add_argument("--out", required=True, type=Path, help="safetensors file to write")
    parser.add_argument("--stretches", type=int, default=8, help="of the text, a quarter held out (default: 8)")
    parser.add_argument("--steps", type=int, default=200, help="of training (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="layers a step (default: %(default)s)")
    parser.add_argument("--mean-tokens", type=int, default=16, help="tokens a page on average (default: 16)")
    parser.add_argument("--page-size", type=int, default=32, help="most tokens of a page (default: 32)")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name, least in (("stretches", 2), ("steps", 1), ("batch", 1), ("mean_tokens", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name.replace('_', '-')} takes {least} or more, got {getattr(options, name)}")
    if options.mean_tokens > options.page_size:
        parser.error(f"--mean-tokens must be at most --page-size {options.page_size}, got {options.mean_tokens}")
    try:
        return options, read_texts([options.text])
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _flat(states: Tensor) -> Tensor:
    """`[H, n, D]` -> `[n, H * D]`."""
    return states.transpose(0, 1).flatten(1)


if __name__ == "__main__":
    main()
