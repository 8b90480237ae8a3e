"""One training step of Medusa heads, and what they can do: cross-entropy and accuracies, a few logits at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oval_spec.medusa_data import Lessons
from oval_spec.medusa_heads import IGNORED, Accuracies, MedusaHeads

FADE = 0.8  # weight of a head over that of the one before
MOST_LOGITS = 2**25  # computed at a time
RANKS = 10  # of the accuracies


@dataclass(frozen=True)
class Measured:
    """What heads can do on held-out text.

    Args:
        loss: cross-entropy of the target's tokens, the weighted mean over the heads.
        top1, top5: by head, how often the target's token is its best candidate, and among its five best.
        accuracies: by head and rank, see `MedusaHeads`.
    """

    loss: float
    top1: list[float]
    top5: list[float]
    accuracies: Accuracies

    def __str__(self) -> str:
        shares = enumerate(zip(self.top1, self.top5, strict=True))
        return f"loss {self.loss:.3f}; " + "; ".join(
            f"head {head}: top-1 {first:.1%}, top-5 {fifth:.1%}" for head, (first, fifth) in shares
        )


def drawn(step: int, count: int, batch: int, seed: int) -> Tensor:
    """Which of `count` lessons a step takes, all of them once before one comes again: int64 `[min(batch, count)]`."""
    batch = min(batch, count)
    epoch, place = divmod(step, count // batch)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))
    return order[place * batch : (place + 1) * batch]


def learn(
    heads: MedusaHeads, lm_head: Any, hidden: Tensor, labels: Tensor, accelerator: Any, words: Tensor | None = None
) -> float:
    """Add the gradients of the loss to those of the heads; the loss.

    The vocabulary may be large: logits are made for a few positions at a time, and what they say about the states is
    summed up before it goes on into the heads. With `words` those alone compete: most of a vocabulary never occurs.

    Args:
        heads: to train.
        lm_head: the target's, without gradients.
        hidden: `[N, hidden]`.
        labels: int64 `[N, heads]`.
        accelerator: of the training.
        words: tokens, int64 `[W]` in ascending order; other labels are ignored. None: the whole vocabulary.
    """
    labels = _among(words, labels)
    with accelerator.autocast():
        states = heads.states(hidden.to(heads.weight.dtype))  # [heads, N, hidden]
    leaf, total = states.detach().requires_grad_(), 0.0
    for head, weight in enumerate(_weights(heads.num_heads)):
        known = (labels[:, head] != IGNORED).nonzero()[:, 0]
        for part in known.split(_positions_at_a_time(lm_head)):
            with accelerator.autocast():
                logits = heads.logits_of(head, leaf[head, part].to(_dtype_of(lm_head, leaf)), lm_head, words)
            loss = weight / len(known) * cross_entropy(logits.float(), labels[part, head], reduction="sum")
            accelerator.backward(loss)
            total += loss.item()
    if leaf.grad is not None:
        states.backward(leaf.grad)
    return total


@torch.no_grad()
def measure(heads: MedusaHeads, lm_head: Any, lessons: Lessons, words: Tensor | None = None) -> Measured:
    """What heads can do; every lesson has a label for each of them. One that is not among `words` counts as missed."""
    at_a_time, device = _positions_at_a_time(lm_head), heads.weight.device
    losses, hits = torch.zeros(heads.num_heads), list[Tensor]()
    words = None if words is None else words.to(device)
    every = _among(words, lessons.labels.to(device))
    for hidden, labels in zip(lessons.hidden.split(at_a_time), every.split(at_a_time), strict=True):
        found = []
        for head, states in enumerate(heads.states(hidden.to(device, heads.weight.dtype))):
            logits = heads.logits_of(head, states.to(_dtype_of(lm_head, states)), lm_head, words).float()
            losses[head] += cross_entropy(logits, labels[:, head], reduction="sum", ignore_index=IGNORED).cpu()
            found.append(logits.topk(min(RANKS, logits.shape[-1])).indices == labels[:, head, None])
        hits.append(torch.stack(found).cpu())  # [heads, n, ranks]
    right = torch.cat(hits, dim=1)
    loss = (losses / (every != IGNORED).sum(0).clamp_min(1).cpu()) @ torch.tensor(_weights(heads.num_heads))
    top1, top5 = (right[..., :most].any(-1).double().mean(1).tolist() for most in (1, 5))
    return Measured(loss.item(), top1, top5, conditional(right))


def conditional(right: Tensor) -> Accuracies:
    """By head and rank, how often a candidate is right where every earlier head had the right one among its own.

    Args:
        right: bool `[heads, N, ranks]`, whether the candidate of that rank is.
    """
    shares, reached = [], torch.ones(right.shape[1], dtype=torch.bool)
    for of_head in right:
        shares.append((of_head[reached].double().sum(0) / max(1, int(reached.sum()))).tolist())
        reached &= of_head.any(-1)
    return shares


def _among(words: Tensor | None, labels: Tensor) -> Tensor:
    """Labels as their places among `words`; `IGNORED` where they are not among them."""
    if words is None:
        return labels
    place = torch.searchsorted(words, labels).clamp_max(len(words) - 1)
    return torch.where(words[place] == labels, place, IGNORED)


def _weights(heads: int) -> list[float]:
    """Of the heads in the loss; they sum to 1."""
    weights = [FADE**head for head in range(heads)]
    return [weight / sum(weights) for weight in weights]


def _positions_at_a_time(lm_head: Any) -> int:
    return max(1, MOST_LOGITS // lm_head.out_features)


def _dtype_of(lm_head: Any, states: Tensor) -> torch.dtype:
    """What the target's head takes: its own floating-point dtype; a quantised one takes any."""
    dtype: torch.dtype = lm_head.weight.dtype
    return dtype if dtype.is_floating_point else states.dtype
