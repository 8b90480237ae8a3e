"""Quest (Tang et al. 2024, arXiv 2406.10774): an upper bound of the page's logits from the minimum and maximum key."""

from __future__ import annotations

import torch
from torch import Tensor

from oval_core.routers.base import Pages, Router


class QuestRouter(Router):
    """Scores a page by `s sum_d max(q_d min_d, q_d max_d)`. Minimum and maximum are stored in the cache's dtype."""

    name = "quest"

    def page_features(self, keys: Tensor, mask: Tensor | None) -> Tensor:
        """Minimum and maximum of the readable keys, `[B, H, P, 2 D]`."""
        if mask is None:
            return torch.cat([keys.amin(-2), keys.amax(-2)], dim=-1)
        hidden = ~mask[..., None]
        least = keys.masked_fill(hidden, torch.inf).amin(-2)
        most = keys.masked_fill(hidden, -torch.inf).amax(-2)
        return torch.cat([least, most], dim=-1).nan_to_num(posinf=0.0, neginf=0.0)

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        if pages.features is None:
            raise ValueError("the quest router needs a cache that was filled under it: its page features are missing")
        least, most = pages.features.float().chunk(2, dim=-1)  # [B, H, P, D]
        positive, negative = query.clamp_min(0), query.clamp_max(0)
        bound = positive.flatten(2, 3) @ most.mT + negative.flatten(2, 3) @ least.mT
        return pages.scaling * bound.unflatten(2, query.shape[2:4])
