"""What a dense model looks at, beside what is claimed of it: `docs/claims.md` is made of the result.

The last positions of a text are read one by one, every page exactly. Pages are runs of `--page-size` tokens from the
start of the text. For each layer, query head and position the *needed* pairs are the fewest keys and values that hold
`--needed` of the attention mass. Everything else is counted from them, and is a mean over layers, heads and positions:

- `pairs_on_top`: of the needed pairs, the share on the k pages with the most mass; `needed_mass_on_top`: the same,
  weighted by their mass; `mass_on_top`: of all mass. The best that any router could do with k pages a head.
- `again`: of the k pages with the most mass, the share that was among them at the position before.
- `near`: of the needed pairs, the share among the newest `--near` tokens; `near_mass` of all mass.
- `pages_often`: the share of the pages that hold a needed pair at half of the positions or more; `pages_ever`: at any.
- `first_token_mass`: of all mass, the share on the first token, where attention goes that has nowhere else to go.
- `page_tokens`: how many pages of how many tokens `SelfSizedPages` makes of the text, all layers together.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.machine import command_line, describe_machine, publish
from benchmarks.page_sizes import page_sizes
from benchmarks.readme import MEASUREMENTS
from benchmarks.teacher_forcing import WARM_UP_TOKENS, compare, positions_fit, prefill, text_tokens
from demos.smollm2 import load_model
from demos.texts import TEXTS
from oval_core import OvalConfig
from oval_core.page_sizing import SelfSizedPages
from oval_core.routers import Pages
from oval_core.training.passages import Watcher

TOP_PAGES = (3, 4, 5, 12)
OFTEN = 0.5  # of the positions


class Onlooker(Watcher):
    """Counts what each query head looks at; one row, one query at a time.

    Args:
        page_size: tokens a page.
        needed: share of the mass that the needed pairs hold.
        near_tokens: the newest ones.
    """

    def __init__(self, page_size: int, needed: float, near_tokens: int) -> None:
        self.page_size, self.needed, self.near_tokens = page_size, needed, near_tokens
        self._sums: dict[str, float] = defaultdict(float)
        self._counts: dict[str, int] = defaultdict(int)
        self._page_mass: dict[int, Tensor] = {}  # by layer, of the position before
        self._wanted: dict[int, list[Tensor]] = defaultdict(list)  # by layer, pages with a needed pair, `[heads, P]`

    def watch(self, query: Tensor, pages: Pages) -> None:
        """See `Watcher.watch`."""
        mass = token_mass(query, pages)
        wanted = needed_pairs(mass, self.needed)
        by_page, pairs = in_pages(mass, self.page_size), in_pages(wanted.float(), self.page_size)
        needed_mass = in_pages(mass * wanted, self.page_size)
        for count in TOP_PAGES:
            top = top_pages(by_page, count)
            self._add(f"pairs_on_top {count}", (pairs * top).sum(-1) / pairs.sum(-1))
            self._add(f"needed_mass_on_top {count}", (needed_mass * top).sum(-1) / needed_mass.sum(-1))
            self._add(f"mass_on_top {count}", (by_page * top).sum(-1))
            before = self._page_mass.get(pages.layer_idx)
            if before is not None:
                again = top[:, : before.shape[-1]] & top_pages(before, count)
                self._add(f"again {count}", again.sum(-1) / top.sum(-1))
        self._add("needed_pairs", wanted.sum(-1).float())
        self._add("near", wanted[:, -self.near_tokens :].sum(-1) / wanted.sum(-1))
        self._add("near_mass", mass[:, -self.near_tokens :].sum(-1))
        self._add("first_token_mass", mass[:, 0])
        self._page_mass[pages.layer_idx] = by_page
        self._wanted[pages.layer_idx].append(pairs > 0)

    def found(self) -> dict[str, Any]:
        """The means by name; those of several numbers of pages as `{name: {pages: mean}}`."""
        found: dict[str, Any] = {}
        for key, total in self._sums.items():
            name, _, pages = key.partition(" ")
            mean = total / self._counts[key]
            if pages:
                found.setdefault(name, {})[pages] = mean
            else:
                found[name] = mean
        use = torch.cat([page_use(wanted) for wanted in self._wanted.values()])
        return found | {
            "pages_often": float((use >= OFTEN).float().mean()),
            "pages_ever": float((use > 0).float().mean()),
        }

    def _add(self, name: str, values: Tensor) -> None:
        self._sums[name] += float(values.double().sum())
        self._counts[name] += values.numel()


def token_mass(query: Tensor, pages: Pages) -> Tensor:
    """Attention mass of every token of one row for one query, `[heads, T]`; `query [1, H, G, 1, D]`."""
    logits = pages.scaling * (query.flatten(2, 3) @ pages.keys.float().mT)  # [1, H, G, T]
    return logits.softmax(-1)[0].flatten(0, 1)


def needed_pairs(mass: Tensor, share: float) -> Tensor:
    """The fewest tokens that hold `share` of each head's mass `[heads, T]`: bool of that shape."""
    values, tokens = mass.sort(dim=-1, descending=True)
    before = values.double().cumsum(-1) - values
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, tokens, before < share)


def in_pages(values: Tensor, page_size: int) -> Tensor:
    """Sums over pages, `[heads, T]` -> `[heads, P]`; the last page may be short."""
    padding = -values.shape[-1] % page_size
    return torch.nn.functional.pad(values, (0, padding)).unflatten(-1, (-1, page_size)).sum(-1)


def top_pages(mass: Tensor, count: int) -> Tensor:
    """The `count` heaviest pages of each head, bool `[heads, P]`."""
    best = mass.topk(min(count, mass.shape[-1])).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, best, True)


def page_use(wanted: list[Tensor]) -> Tensor:
    """Share of the positions at which a page, there from the first one on, was wanted: `[heads, P]`."""
    pages = wanted[0].shape[-1]
    return torch.stack([now[:, :pages] for now in wanted]).float().mean(0)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; see `--help`."""
    options = _parse(arguments)
    model, tokenizer = load_model(options.model)
    tokens = text_tokens(tokenizer, options.text)[None, : options.context]
    onlooker = Onlooker(options.page_size, options.needed, options.near)
    config = OvalConfig(router=onlooker, budget_ratio=1.0, always_paged=True, stats_every=0, impl="reference")
    with tqdm(total=tokens.numel() + options.positions + WARM_UP_TOKENS, unit="token") as progress:
        prefix = prefill(model, tokens, options.positions, progress.update)
        compare(model, prefix, config, progress.update)
    found: dict[str, Any] = {
        "benchmark": options.name, "command": options.command, "machine": describe_machine(), "text": options.text,
        "context": options.context, "positions": options.positions, "page_size": options.page_size,
        "needed": options.needed, "near_tokens": options.near, "layers": model.config.num_hidden_layers,
        **onlooker.found(), "page_tokens": page_sizes(prefix, SelfSizedPages()),
    }  # fmt: skip
    publish(found, options.out)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="path or hub id (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", choices=TEXTS, default=TEXTS[0], help="(default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of the text (default: %(default)s)")
    parser.add_argument("--positions", type=int, default=24, help="last positions of it (default: %(default)s)")
    parser.add_argument("--page-size", type=int, default=32, help="tokens a page (default: %(default)s)")
    parser.add_argument("--needed", type=float, default=0.9, help="share of a query's mass (default: %(default)s)")
    parser.add_argument("--near", type=int, default=32, help="newest tokens (default: %(default)s)")
    parser.add_argument("--name", default="claims", help="of the JSON (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=MEASUREMENTS, help="where the JSON goes")
    options = parser.parse_args(arguments)
    if not positions_fit(options.positions, options.context) or not 0 < options.needed < 1:
        parser.error(
            f"--positions takes 2 or more and fewer than the tokens of the text, --needed a share between 0 and 1, got "
            f"{options.positions} and {options.needed}"
        )
    options.command = command_line("claims", arguments)
    return options


if __name__ == "__main__":
    main()
