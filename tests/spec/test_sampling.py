"""Sampled text with drafts has the target's distribution."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oval_spec import Drafter, ModelDrafter, PromptLookupDrafter, Tree, generation, speculative_generate
from oval_spec.drafters import Seen
from oval_spec.text import Text
from oval_spec.verify import Choose, Stop, Walk, walk
from tests.core.tiny_models import llama

VOCAB, NEW_TOKENS, DRAWS = 5, 3, 1500
PROMPT = torch.tensor([[1, 2, 3, 4, 1, 3, 2, 4, 4, 2, 1, 1, 3]])
TOO_UNLIKELY = 4.0  # standard deviations of the chi-square statistic above its mean


def tiny(seed: int) -> PreTrainedModel:
    model: Any = llama(layers=1, seed=seed, vocab_size=VOCAB, bos_token_id=None, hidden_size=32, intermediate_size=32)
    torch.nn.init.normal_(model.lm_head.weight, std=0.25, generator=torch.Generator().manual_seed(seed))
    return model


class ForkDrafter(Drafter):
    """Two wrong or right first tokens, and what may follow the second."""

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        return [Tree((1, 2, 3, 1), (-1, -1, 1, 1)) if more else Tree() for more in seen.running]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "prompt lookup": PromptLookupDrafter,
    "draft model": lambda: ModelDrafter(tiny(1), min_confidence=0.0),
    "tree": ForkDrafter,
}
WAYS: list[dict[str, Any]] = [{"top_k": 0}, {"top_k": 0, "temperature": 1.6, "top_p": 0.8}]


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return tiny(0)


@torch.no_grad()
def exact(model: Any, temperature: float = 1.0, top_p: float = 1.0, **_: Any) -> Tensor:
    """The probability of every three tokens `[V, V, V]`."""
    texts = torch.tensor([[*PROMPT[0].tolist(), *two] for two in product(range(VOCAB), repeat=2)])
    shares = (model(texts).logits[:, -NEW_TOKENS:] / temperature).softmax(-1)
    ordered, order = shares.sort(-1, descending=True)
    enough = ordered.cumsum(-1) - ordered < top_p
    shares = torch.zeros_like(shares).scatter(-1, order, ordered * enough)
    first, second, third = (shares / shares.sum(-1, keepdim=True)).view(VOCAB, VOCAB, NEW_TOKENS, VOCAB).unbind(2)
    return first[0, 0, :, None, None] * second[:, 0, :, None] * third


def deviation(model: PreTrainedModel, drafter: Drafter, way: dict[str, Any]) -> float:
    """How far the counts of three tokens are from what they should be, in standard deviations of chi-square."""
    out = speculative_generate(
        model,
        PROMPT.expand(DRAWS, -1),
        drafter,
        do_sample=True,
        max_new_tokens=NEW_TOKENS,
        adapt=False,
        **way,
    )
    assert out.stats is not None
    assert out.sequences is not None
    assert out.stats.drafted_steps >= DRAWS / 2
    weights = torch.tensor([VOCAB**2, VOCAB, 1])
    counts = (out.sequences[:, -NEW_TOKENS:] * weights).sum(-1).bincount(minlength=VOCAB**NEW_TOKENS)
    expected = exact(model, **way).flatten() * DRAWS
    rare = expected < 5
    assert not counts[expected == 0].any()
    got = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    wanted = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    freedom = int((wanted > 0).sum()) - 1
    chi_square = ((got - wanted) ** 2 / wanted.clamp_min(1e-9)).sum().item()
    return (chi_square - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("drafter", "way"), [*product(["prompt lookup"], WAYS), ("draft model", WAYS[1]), ("tree", WAYS[0])]
)
def test_the_distribution_is_the_targets(model: PreTrainedModel, drafter: str, way: dict[str, Any]) -> None:
    assert deviation(model, DRAFTERS[drafter](), way) < TOO_UNLIKELY


def test_a_biased_walk_would_be_seen(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that asks the target a second time where it does not like the draft."""

    def biased(tree: Tree, text: Text, choose: Choose, stop: Stop) -> Walk:
        def choose_again(text: Text, node: int) -> int:
            token = choose(text, node)
            return token if tree.child(node, token) is not None or node not in tree.parents else choose(text, node)

        return walk(tree, text, choose_again, stop)

    monkeypatch.setattr(generation, "walk", biased)
    assert deviation(model, PromptLookupDrafter(), WAYS[0]) > 1.5 * TOO_UNLIKELY
