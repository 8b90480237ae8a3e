"""The pages with the largest true attention mass. It reads every key, so it is for measuring only."""

from __future__ import annotations

import torch
from torch import Tensor

from oval_core.routers.base import Pages, Router


class OracleRouter(Router):
    """Scores a page by the log of its exact attention mass."""

    name = "oracle"

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return exact_log_mass(query, pages)


def exact_log_mass(query: Tensor, pages: Pages) -> Tensor:
    """Log of the unnormalised attention mass of every page, `[B, H, G, Q, P]`; -inf for a page without tokens."""
    keys = pages.keys.float()
    batch, heads, group, queries, _ = query.shape
    logits = pages.scaling * (query.flatten(2, 3) @ keys.mT).view(batch, heads, group, queries, keys.shape[2])
    if pages.softcap is not None:
        logits = pages.softcap * torch.tanh(logits / pages.softcap)
    if pages.token_mask is not None:
        logits = logits.masked_fill(~pages.token_mask[:, None, None, None], -torch.inf)
    width = int(pages.lengths.max())
    offset = torch.arange(width, device=query.device)
    token = (pages.starts[..., None] + offset).clamp_max(keys.shape[2] - 1)  # [B, P, S]
    by_page = logits.gather(-1, token.flatten(1)[:, None, None, None].expand(*logits.shape[:4], -1))
    by_page = by_page.unflatten(-1, token.shape[1:])
    return by_page.masked_fill((offset >= pages.lengths[..., None])[:, None, None, None], -torch.inf).logsumexp(-1)
