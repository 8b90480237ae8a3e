"""How a head learns: distillation of the pages' true shares, with more weight on what it does not see coming.

    loss = - sum over pages p of  t_p (1 - q_p)^focus log q_p        mean over layers, KV heads and positions

`t` are the dense model's shares, `q` the head's, mean over the query heads of the group. Far pages are rare and hold
little mass each: the focal factor (Lin et al. 2017, arXiv 1708.02002) keeps pages that are guessed well already from
drowning them. Sinks and window are read anyway: they are left out of both, without scaling up what remains of `t`, so
that a position counts by the mass that routing can win there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oval_core.routers.learned import LearnedHead, Places
from oval_core.routers.repair import InputRepair
from oval_core.training.lessons import Lesson

LEAST_LOG_SHARE = -100.0  # pages that are left out have none
LEAST_SPREAD = 1e-3


def routing_loss(
    head: LearnedHead,
    lesson: Lesson,
    noise: torch.Generator,
    focus: float,
    forced: tuple[int, int],
    repair: InputRepair | None = None,
) -> Tensor:
    """See the top of this file; `[]`.

    Args:
        head: for the model that the lesson comes from; one made with `coarse` needs a lesson with it.
        noise: for heads that learn under noise.
        focus: exponent of the focal factor; 0: plain cross-entropy.
        forced: sink pages and window pages, see `OvalConfig`.
        repair: what hidden states go through first.
    """
    among = _free(lesson, forced)
    places = Places(lesson.positions[None], lesson.starts[None], lesson.lengths[None])
    losses = []
    for row, layer in enumerate(lesson.layers.tolist()):
        hidden = lesson.hidden[row][None].float()
        hidden = head.standardised(layer, hidden if repair is None else repair(layer, hidden))
        asked, keys = head.ask(layer, hidden, places.positions), head.page_keys(layer, lesson.centroids[row][None])
        coarse = None if lesson.coarse is None else lesson.coarse[row][None].float()
        scores = head.scores(layer, asked, keys, places, coarse)
        share = lesson.share[row][None].float() * among[:, :, 0]
        losses += [_focal(guess, share, focus) for guess in head.guesses(layer, asked, scores, places, among, noise)]
    return torch.stack(losses).mean()


def _free(lesson: Lesson, forced: tuple[int, int]) -> Tensor:
    """bool `[1, 1, 1, N, P]`: pages that a position can look back at and that are not read anyway."""
    page = torch.arange(len(lesson.starts), device=lesson.starts.device)
    return ((page >= forced[0]) & (page < (lesson.counts - forced[1])[:, None]))[None, None, None]


def _focal(guess: Tensor, share: Tensor, focus: float) -> Tensor:
    """Loss of log-shares `[1, H, G, N, P]` against true shares `[1, H, N, P]`."""
    log_q = guess.logsumexp(2) - math.log(guess.shape[2])
    surprise = (1 - log_q.exp()).clamp_min(0) ** focus
    return -(share * surprise * log_q.clamp_min(LEAST_LOG_SHARE)).sum(-1).mean()


@torch.no_grad()
def fit_scales(head: LearnedHead, lessons: Sequence[Lesson]) -> None:
    """Let the head standardise centroids and hidden states as they are in `lessons`."""
    for row, layer in enumerate(lessons[0].layers.tolist()):
        centroids = torch.cat([lesson.centroids[row].float() for lesson in lessons], 1)  # [H, P, D]
        hidden = torch.cat([lesson.hidden[row].float() for lesson in lessons])  # [N, hidden]
        head.key_mean[layer] = centroids.mean(1)
        head.key_scale[layer] = 1 / centroids.std(1).clamp_min(LEAST_SPREAD)
        head.hidden_scale[layer] = 1 / hidden.square().mean(0).sqrt().clamp_min(LEAST_SPREAD)
