"""What the tests of speculative decoding share: random trees, drafters that know the answer, and plain `generate`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from oval_core import OvalConfig
from oval_core.binding import BINDING
from oval_spec import Drafter, SpeculativeOutput, Tree, speculative_generate
from oval_spec.drafters import Seen
from tests.core.tiny_models import PAD, VOCAB, prompt

SMALL = OvalConfig(page_size=8, seal_tokens=1, budget_pages=3, router="box", impl="reference")
FULL = OvalConfig(page_size=8, seal_tokens=1, budget_ratio=1.0, always_paged=True, router="box", impl="reference")
PADDING = 9


@st.composite
def trees(draw: st.DrawFn, most: int = 10, tokens: int = VOCAB) -> Tree:
    """Any tree; with few tokens siblings may be alike."""
    nodes = draw(st.integers(0, most))
    parents = [draw(st.integers(-1, node - 1)) for node in range(nodes)]
    return Tree(tuple(draw(st.integers(0, tokens - 1)) for _ in parents), tuple(parents))


def token_path(tree: Tree, node: int) -> list[int]:
    """The tokens from below the root down to `node`."""
    return [] if node == -1 else [*token_path(tree, tree.parents[node]), tree.tokens[node]]


class TreeDrafter(Drafter):
    """Knows how the texts go on, and hides it in trees among wrong tokens.

    Args:
        sequences: the texts up to their ends.
        right: how likely a node of the right path is the right one.
    """

    most_tokens = 9

    def __init__(self, sequences: Tensor, right: float = 0.8, seed: int = 0) -> None:
        self.sequences, self.right, self.random = sequences.tolist(), right, random.Random(seed)

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        return [
            self._tree(answer[len(text) :], most) if more else Tree()
            for text, answer, more in zip(seen.texts, self.sequences, seen.running, strict=True)
        ]

    def _tree(self, answer: Sequence[int], most: int) -> Tree:
        tokens: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0
        while len(tokens) < self.random.randint(0, most) and depth < len(answer):
            wrong = (answer[depth] + self.random.randint(1, 5)) % VOCAB
            tokens.append(wrong)
            parents.append(self.random.choice([right, self.random.randint(-1, len(tokens) - 2)]))
            if len(tokens) < most and self.random.random() < self.right:
                tokens.append(answer[depth])
                parents.append(right)
                right, depth = len(tokens) - 1, depth + 1
        return Tree(tuple(tokens), tuple(parents))


class LineDrafter(TreeDrafter):
    """Chains that are right, or wrong from their first token on where `right` is 0."""

    def _tree(self, answer: Sequence[int], most: int) -> Tree:
        return Tree.chain([token if self.right else token + 1 for token in answer[:most]])


class Streamer:
    """Remembers what it gets."""

    def __init__(self) -> None:
        self.put_tokens: list[int] = []
        self.shapes: list[tuple[int, ...]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        assert not self.ends
        self.shapes.append(tuple(value.shape))
        self.put_tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ends += 1


def padded_batch(tokens: int = 40, rows: int = 3) -> dict[str, Tensor]:
    """Random prompts with their mask; the first is shorter. Each repeats its beginning, so that lookups find things."""
    text = prompt(tokens, rows)
    text[:, tokens // 2 :] = text[:, : tokens - tokens // 2]
    mask = torch.ones_like(text)
    text[0, :PADDING] = mask[0, :PADDING] = PAD
    return {"input_ids": text, "attention_mask": mask}


def longer(text: Tensor, tokens: int = 13) -> dict[str, Tensor]:
    """A second turn: the text of the first and more; nothing of it is taken for padding."""
    ids = torch.cat([text, prompt(tokens, len(text), seed=1)], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def plain(model: Any, inputs: dict[str, Tensor] | Tensor, **options: Any) -> Tensor:
    """The text of stock `generate`, greedily."""
    arguments = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    text: Tensor = model.generate(**{"do_sample": False, "max_new_tokens": 24, **arguments, **options})
    return text


def speculative(
    model: PreTrainedModel, inputs: dict[str, Tensor] | Tensor, drafter: Drafter, **options: Any
) -> SpeculativeOutput:
    """The same with drafts."""
    return speculative_generate(model, inputs, drafter, **{"do_sample": False, "max_new_tokens": 24, **options})


def state(model: Any) -> dict[str, Any]:
    """What `attach` changes in a model."""
    return {
        "attention": [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")],
        "hooks": [(len(module._forward_pre_hooks), len(module._forward_hooks)) for module in model.modules()],
        "bindings": sum(hasattr(module, BINDING) for module in model.modules()),
        "training": model.training,
    }
