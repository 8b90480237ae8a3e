"""Follow the target down a draft: what it would have said itself, token by token.

The target chooses at every node as `generate` would, greedily or by sampling; where its choice is among the children,
the walk goes on there. So the text is the target's own, whatever was drafted, and what it samples has its distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from oval_spec.text import Text
from oval_spec.tree import ROOT, Tree

Choose = Callable[[Text, int], int]  # what comes after a text that ends in a node
Stop = Callable[[Text], bool]  # whether it ends here
ROW_BY_ROW = (  # processors that treat a row by its number
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)


class Walk(NamedTuple):
    """What one verification came to.

    Args:
        path: nodes that were accepted, from the root down.
        kept: those before the text's last token, which the cache does not hold: all, unless a node ends the text.
        stopped: the text ends.
    """

    path: list[int]
    kept: list[int]
    stopped: bool

    @property
    def last(self) -> int:
        """The node whose logits gave the last token."""
        return self.kept[-1] if self.kept else ROOT


def walk(tree: Tree, text: Text, choose: Choose, stop: Stop) -> Walk:
    """Go down `tree` as far as the target agrees, and append what it says to `text`, which ends in the root."""
    path: list[int] = []
    while True:
        node = path[-1] if path else ROOT
        token = choose(text, node)
        text.append(token)
        child, stopped = tree.child(node, token), stop(text)
        if child is None:
            return Walk(path, path, stopped)
        if stopped:
            return Walk([*path, child], path, stopped)
        path.append(child)


def make_choose(logits: Tensor, processors: Any, do_sample: bool, row: int = 0, rows: int = 1) -> Choose:
    """The target's choices for one row.

    Args:
        logits: `[1 + nodes, V]`, of the root and of every node.
        processors: a `LogitsProcessorList`.
        do_sample: draw from the processed distribution instead of taking its largest.
        row: number of the row, out of `rows`.
    """
    if not processors and not do_sample:
        best = logits.argmax(-1).tolist()
        return lambda text, node: best[1 + node]

    if not any(isinstance(processor, ROW_BY_ROW) for processor in processors):
        row, rows = 0, 1

    def choose(text: Text, node: int) -> int:
        alike = logits[1 + node].float().repeat(rows, 1)  # the text in every row, to be looked at where it belongs
        scores = processors(text.ids.expand(rows, -1), alike)[row]
        return int(torch.multinomial(scores.softmax(-1), 1) if do_sample else scores.argmax(-1))

    return choose


def make_stop(criteria: Any) -> Stop:
    """Whether the text of one row ends. `criteria`: a `StoppingCriteriaList`."""
    return lambda text: bool(criteria(text.ids, None).all())
