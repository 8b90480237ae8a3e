"""The ways to generate that `benchmarks.speculative` compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from benchmarks.speculative_prompts import SpeculativePrompt
from demos.smollm2_heads import load_heads
from demos.token_clock import TokenClock
from oval_core import OvalConfig, attach
from oval_spec import (
    Drafter,
    MedusaDrafter,
    PromptLookupDrafter,
    SparseSelfDrafter,
    SpeculativeStats,
    Tree,
    speculative_generate,
)
from oval_spec.drafters import Seen

BASELINE = "generate"
LONG_TOKENS = 2048  # from here on pages are worth while


class NoDrafter(Drafter):
    """Drafts nothing: what is left is how `oval_spec` reads."""

    name, most_tokens = "no drafts", 1

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`."""
        return [Tree()] * len(seen.texts)


@dataclass(frozen=True)
class Run:
    """One text: its new tokens, seconds a token, and what `speculative_generate` counted."""

    tokens: list[int]
    token_s: float
    stats: SpeculativeStats | None


@dataclass(frozen=True)
class Variant:
    """A way to generate.

    Attributes:
        call: with prompt, cache, new tokens and clock; returns sequences and stats.
        look: with prompt, cache, new tokens and `look_every`; returns stats with page sets. None: it has none.
    """

    drafter: str
    mode: str
    call: Callable[[SpeculativePrompt, DynamicCache, int, TokenClock], tuple[Tensor, SpeculativeStats | None]]
    look: Callable[[SpeculativePrompt, DynamicCache, int, int], SpeculativeStats] | None = None

    @property
    def title(self) -> str:
        """Drafter and mode."""
        return self.drafter if self.mode == "dense" else f"{self.drafter}, {self.mode}"

    def run(self, prompt: SpeculativePrompt, cache: DynamicCache, new_tokens: int) -> Run:
        """Continue a prompt whose tokens but the last are in `cache`."""
        clock = TokenClock()
        sequences, stats = self.call(prompt, cache, new_tokens, clock)
        return Run(sequences[0, prompt.tokens.shape[1] :].tolist(), clock.token_s, stats)


def make_variants(
    model: PreTrainedModel, heads: Path | None, context: int, names: Sequence[str] | None = None
) -> list[Variant]:
    """Those that suit a context, `generate` first; or those named, and `generate`.

    Raises ValueError if there is none of a name.
    """
    # transformers 5.24 gets other tokens when its prompt lookup goes on from a filled cache
    lookup = _plain(model, goes_on=False, prompt_lookup_num_tokens=10)
    stock = Variant("transformers' prompt lookup", "exact", lookup)
    variants = [Variant(BASELINE, "dense", _plain(model)), stock]
    variants.append(Variant("no drafts", "exact", _speculative(model, NoDrafter)))
    drafters: dict[str, Callable[[], Drafter]] = {"prompt lookup": PromptLookupDrafter}
    found = load_heads(model, heads)
    if found is not None:
        drafters["medusa"] = lambda: MedusaDrafter(found)
    for name, make in drafters.items():
        variants.append(Variant(name, "exact", _speculative(model, make), _looking(model, make)))
    if context >= LONG_TOKENS:
        variants.append(Variant("OVAL without drafts", "pages", _paged(model)))
        self_draft = _speculative(model, SparseSelfDrafter)
        variants.append(Variant("sparse self-draft", "exact", self_draft, _looking(model, SparseSelfDrafter)))
        for name, make in drafters.items():
            for reads in ("own", "agreed", "union"):
                variants.append(Variant(name, f"pages, {reads}", _speculative(model, make, mode="pages", reads=reads)))
    if names is None:
        return variants
    unknown = {*names} - {variant.title for variant in variants}
    if unknown:
        raise ValueError(f"unknown variants {sorted(unknown)}: expected some of {[one.title for one in variants]}")
    return [variant for variant in variants if variant.title in (BASELINE, *names)]


def _plain(model: PreTrainedModel, goes_on: bool = True, **how: Any) -> Any:
    """`goes_on`: from the prefilled cache."""
    run: Any = model.generate

    def call(prompt: SpeculativePrompt, cache: DynamicCache, new_tokens: int, clock: TokenClock) -> tuple[Tensor, None]:
        settings = {"max_new_tokens": new_tokens, "streamer": clock, **how}
        return run(**prompt.generate, cache=cache if goes_on else None, **settings), None

    return call


def _paged(model: PreTrainedModel) -> Any:
    plain = _plain(model)

    def call(*arguments: Any) -> tuple[Tensor, None]:
        with attach(model, OvalConfig(stats_every=0)):
            return plain(*arguments)

    return call


def _speculative(model: PreTrainedModel, make: Callable[[], Drafter], **how: Any) -> Any:
    config = OvalConfig(stats_every=0) if "mode" in how else None

    def call(prompt: SpeculativePrompt, cache: DynamicCache, new_tokens: int, clock: TokenClock) -> tuple[Tensor, Any]:
        out = _generate(model, make(), prompt, cache, new_tokens, streamer=clock, config=config, **how)
        return out.sequences, out.stats

    return call


def _looking(model: PreTrainedModel, make: Callable[[], Drafter]) -> Any:
    def look(prompt: SpeculativePrompt, cache: DynamicCache, new_tokens: int, look_every: int) -> Any:
        config = OvalConfig(stats_every=0)
        return _generate(model, make(), prompt, cache, new_tokens, config=config, look_every=look_every).stats

    return look


def _generate(
    model: PreTrainedModel,
    drafter: Drafter,
    prompt: SpeculativePrompt,
    cache: DynamicCache,
    new_tokens: int,
    **how: Any,
) -> Any:
    settings = {**prompt.generate, "cache": cache, "max_new_tokens": new_tokens, **how}
    return speculative_generate(model, {"input_ids": settings.pop("input_ids")}, drafter, **settings)
