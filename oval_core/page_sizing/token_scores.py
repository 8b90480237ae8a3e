"""What the keys of a stretch of tokens say about where its pages should be short.

All scores compare a token with those around it, per KV head, and are averaged over the heads, which share a page table.
Lengths are in units of the stretch's own mean deviation, so that layers and models are alike.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

REACH_TOKENS = 8  # to either side
NAMES = ("change", "contrast", "spread", "entropy")


def token_scores(keys: Tensor) -> Tensor:
    """Four numbers a token, in the order of `NAMES`.

    change: distance from the token before. contrast: distance between the means of the tokens before and of the tokens
    from it on. spread: standard deviation around it. entropy: of the attention of the tokens around it to those
    around them, with keys in place of queries, as a share of the largest that so many tokens can have, mean.

    Args:
        keys: `[H, n, D]`, any float dtype; n >= 1.

    Returns: float32 `[n, 4]`.
    """
    keys = keys.float()
    keys = keys - keys.mean(1, keepdim=True)
    unit = keys.norm(dim=-1).mean(1)[:, None].clamp_min(torch.finfo(keys.dtype).tiny)
    before, after = _window_means(keys, REACH_TOKENS, 0), _window_means(keys, 0, REACH_TOKENS)
    around = _window_means(keys, REACH_TOKENS, REACH_TOKENS)
    squares = _window_means(keys.square().sum(-1, keepdim=True), REACH_TOKENS, REACH_TOKENS).squeeze(-1)
    scores = (
        _change(keys) / unit,
        (after - before).norm(dim=-1) / unit,
        (squares - around.square().sum(-1)).clamp_min(0).sqrt() / unit,
        _window_means(_entropy(keys)[..., None], REACH_TOKENS, REACH_TOKENS).squeeze(-1),
    )
    return torch.stack([score.mean(0) for score in scores], -1)


def _change(keys: Tensor) -> Tensor:
    """`[H, n]`; nothing comes before the first token."""
    return nn.functional.pad((keys[:, 1:] - keys[:, :-1]).norm(dim=-1), (1, 0))


def _window_means(values: Tensor, back: int, ahead: int) -> Tensor:
    """Mean of `values [H, n, d]` over tokens i - back to i + ahead - 1 of those there are; no token: of token i."""
    count = values.shape[1]
    at = torch.arange(count, device=values.device)
    start, stop = (at - back).clamp_min(0), (at + ahead).clamp_max(count)
    stop = torch.maximum(stop, start + 1)
    sums = nn.functional.pad(values.double().cumsum(1), (0, 0, 1, 0))
    return ((sums[:, stop] - sums[:, start]) / (stop - start)[:, None]).to(values.dtype)


def _entropy(keys: Tensor) -> Tensor:
    """`[H, n]`, from 0 to 1."""
    count, width = keys.shape[1], 2 * REACH_TOKENS + 1
    padded = nn.functional.pad(keys, (0, 0, REACH_TOKENS, REACH_TOKENS))
    logits = torch.einsum("hnd,hndw->hnw", keys, padded.unfold(1, width, 1)) * keys.shape[-1] ** -0.5
    there = torch.arange(count, device=keys.device)[:, None] + torch.arange(width, device=keys.device) - REACH_TOKENS
    there = (there >= 0) & (there < count)
    share = logits.masked_fill(~there, -torch.inf).softmax(-1)
    return (torch.special.entr(share).sum(-1) / there.sum(-1).clamp_min(2).log()).clamp_max(1)
