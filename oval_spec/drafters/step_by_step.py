"""Drafting with a model that says one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oval_spec.cached_model import CachedModel
from oval_spec.tree import Tree


def draft_chains(
    model: CachedModel, logits: Tensor, running: Sequence[bool], most: int, min_confidence: float
) -> list[Tree]:
    """What `model` says next, greedily; what it reads for that stays in its cache.

    Args:
        model: has read the texts with their roots.
        logits: `[B, V]`, after the roots.
        running: rows to draft for.
        most: tokens of a draft.
        min_confidence: a row's draft ends before a token that the model gives a smaller probability.

    Returns: chains; of each running row all but the last token have been read.
    """
    drafts: list[list[int]] = [[] for _ in running]
    growing = list(running)
    for _ in range(most):
        confidence, tokens = logits.softmax(-1, dtype=torch.float32).max(-1)
        sure = (confidence >= min_confidence).tolist()
        growing = [goes_on and enough for goes_on, enough in zip(growing, sure, strict=True)]
        for row, token in enumerate(tokens.tolist()):
            if growing[row]:
                drafts[row].append(token)
        if not any(growing) or max(map(len, drafts)) == most:
            break
        logits = read_chains(model, [[draft[-1]] if more else [] for draft, more in zip(drafts, growing, strict=True)])
    return [Tree.chain(draft) for draft in drafts]


def read_chains(model: CachedModel, chains: Sequence[Sequence[int]]) -> Tensor:
    """Append a chain to each row; logits after its last token `[B, V]`, meaningless for an empty chain."""
    trees = [Tree.chain(chain[1:]) for chain in chains]
    logits = model.read([chain[0] if chain else 0 for chain in chains], trees)
    paths = [[*range(len(tree))] if chain else None for chain, tree in zip(chains, trees, strict=True)]
    model.keep(max(map(len, trees)), paths)
    last = torch.tensor([max(0, len(chain) - 1) for chain in chains], device=logits.device)
    return logits[torch.arange(len(chains), device=logits.device), last]
