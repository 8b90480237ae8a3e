"""The specification of the three tiers and of their merge: plain PyTorch, any device, float32 arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from oval_core.basis import PageBasis
from oval_core.kernels.api import Partial, Reads
from oval_core.memory import take


def coarse_scores(query: Tensor, basis: PageBasis, scaling: float, softcap: float | None) -> Tensor:
    """Tier 1: `s (q.mu + |q|.radius) + log(tokens)` for every page.

    Args:
        query: float32 `[B, H, G, Q, D]`.
        basis: P pages.
        scaling: softmax scale `s`.
        softcap: cap of the logits, or None.

    Returns: float32 `[B, H, G, Q, P]`; -inf for a page without readable tokens.
    """
    mu, radius = basis.coarse()  # [B, H, P, D]
    logits = _per_head(query, mu) + _per_head(query.abs(), radius)
    return _capped(scaling * logits, softcap) + basis.tokens.float().log()[:, :, None, None]


def evaluate_bases(query: Tensor, basis: PageBasis, pages: Tensor, scaling: float, softcap: float | None) -> Partial:
    """Tier 2: attention of each query over each shortlisted page as its basis approximates it.

    Args:
        query: float32 `[B, H, G, Q, D]`.
        pages: shortlist, int64 `[B, H, n]`.

    Returns: `out [B, H, G, Q, n, D_v]`, the page's output, and `lse [B, H, G, Q, n]`, its log-mass.
    """
    page = basis.gather(pages)
    mu, _ = page.coarse()  # [B, H, n, D]
    b, c, w, v0 = page.approximation()  # [B, H, n, r, D], [B, H, n, r, S], [B, H, n, r, D_v], [B, H, n, D_v]

    along = torch.einsum("bhgqd,bhnrd->bhgqnr", query, b)
    logits = _per_head(query, mu)[..., None] + torch.einsum("bhgqnr,bhnrs->bhgqns", along, c)
    token = torch.arange(c.shape[-1], device=query.device)
    absent = token >= page.tokens[..., None]  # [B, H, n, S]
    logits = _capped(scaling * logits, softcap).masked_fill(absent[:, :, None, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - _finite(lse)[..., None]).exp()
    moved = torch.einsum("bhgqns,bhnrs->bhgqnr", weights, c)
    return Partial(v0[:, :, None, None] + torch.einsum("bhgqnr,bhnrv->bhgqnv", moved, w), lse)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, softcap: float | None
) -> Partial:
    """Exact attention.

    Args:
        query: `[B, H, G, Q, D]`.
        keys, values: `[B, H, n, D]` and `[B, H, n, D_v]`.
        mask: bool, broadcasts to `[B, H, Q, n]`, True where a query may read; None: everywhere.

    Returns: `out [B, H, G, Q, D_v]` and `lse [B, H, G, Q]`; a query that may read nothing gets zeros and -inf.
    """
    logits = _capped(scaling * _per_head(query.float(), keys.float()), softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None], -torch.inf)
    lse = logits.logsumexp(-1)
    weights = (logits - _finite(lse)[..., None]).exp()
    return Partial(_per_head(weights, values.float().mT), lse)


def attend_pages(
    query: Tensor, keys: Tensor, values: Tensor, reads: Reads, scaling: float, softcap: float | None
) -> Partial:
    """Exact attention over runs of stored tokens.

    Args:
        query: `[B, H, G, Q, D]`.
        keys, values: what is stored, `[B, H, T, D]` and `[B, H, T, D_v]`.
        reads: which of it.

    Returns: `out [B, H, G, Q, D_v]` and `lse [B, H, G, Q]`; a query that may read nothing gets zeros and -inf.
    """
    offset = torch.arange(reads.page_size, device=query.device)
    position = (reads.starts[..., None] + offset).flatten(2)  # [B, H, n S]
    there = (offset < reads.lengths[..., None]).flatten(2)[:, :, None]
    readable = there & (position[:, :, None] <= reads.last[:, None, :, None])  # [B, H, Q, n S]
    position = position.clamp_max(keys.shape[2] - 1)
    if reads.mask is not None:
        index = position[:, :, None].expand_as(readable)
        readable &= reads.mask.expand(-1, index.shape[1], -1, -1).gather(-1, index)
    return attend(query, take(keys, position), take(values, position), readable, scaling, softcap)


def merge(parts: list[Partial], sink_logits: Tensor | None) -> Tensor:
    """Attention over the union of disjoint parts.

    Args:
        parts: `out [B, H, G, Q, D_v]`, `lse [B, H, G, Q]` each.
        sink_logits: float32, broadcasts to `[B, H, G, Q]`: one more logit whose value is zero (GPT-OSS's `s_aux`).

    Returns: float32 `[B, H, G, Q, D_v]`; zeros where no part has mass.
    """
    total = torch.stack([part.lse for part in parts]).logsumexp(0)
    if sink_logits is not None:
        total = torch.logaddexp(total, sink_logits.expand_as(total))
    total = _finite(total)
    return torch.stack([(part.lse - total).exp()[..., None] * part.out for part in parts]).sum(0)


def _per_head(left: Tensor, right: Tensor) -> Tensor:
    """`left [B, H, G, Q, d] @ right [B, H, n, d]^T` -> `[B, H, G, Q, n]`, the group and its queries in one product."""
    batch, heads, group, queries, _ = left.shape
    return (left.flatten(2, 3) @ right.mT).view(batch, heads, group, queries, right.shape[2])


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of an empty sum, so that its weights become zeros instead of NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
