"""Follow the target down a draft: what it would have said itself, token by token.

The target chooses at every node as `generate` would, greedily or by sampling; where its choice is among the children,
the walk goes on there. So the text is the target's own, whatever was drafted, and what it samples has its distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oval_spec.text import Text
from oval_spec.tree import ROOT, Tree

Choose = Callable[[Text, int], int]  # what comes after a text that ends in a node
Stop = Callable[[Text], bool]  # whether it ends here


class Walk(NamedTuple):
    """What one verification came to.

    Args:
        path: nodes that were accepted, from the root down; the target's own choice after the last is the new root.
        stopped: the text ends.
    """

    path: list[int]
    stopped: bool

    @property
    def last(self) -> int:
        """The node whose logits gave the last token."""
        return self.path[-1] if self.path else ROOT


def walk(tree: Tree, text: Text, choose: Choose, stop: Stop) -> Walk:
    """Go down `tree` as far as the target agrees, and append what it says to `text`, which ends in the root."""
    path: list[int] = []
    node: int | None = ROOT
    while node is not None:
        if node != ROOT:
            path.append(node)
        token = choose(text, node)
        text.append(token)
        if stop(text):
            return Walk(path, True)
        node = tree.child(node, token)
    return Walk(path, False)


def make_choose(logits: Tensor, processors: Any, do_sample: bool) -> Choose:
    """The target's choices for one row.

    Args:
        logits: `[1 + nodes, V]`, of the root and of every node.
        processors: a `LogitsProcessorList`.
        do_sample: draw from the processed distribution instead of taking its largest.
    """
    if not processors and not do_sample:
        best = logits.argmax(-1).tolist()
        return lambda text, node: best[1 + node]

    def choose(text: Text, node: int) -> int:
        scores = processors(text.ids, logits[None, 1 + node].to(copy=True, dtype=torch.float32))
        return int(torch.multinomial(scores.softmax(-1), 1) if do_sample else scores.argmax(-1))

    return choose


def make_stop(criteria: Any) -> Stop:
    """Whether the text of one row ends. `criteria`: a `StoppingCriteriaList`."""
    return lambda text: bool(criteria(text.ids, None).all())
