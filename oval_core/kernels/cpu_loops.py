"""The three tiers as compiled loops for CPUs (Numba): `reference.py` and `routers/basis.py` say what they compute.

Work is cut into `parts` of every (row, KV head). int8 bases, keys and values are read in place; a page's numbers are
widened once into a few hundred bytes that stay in the first-level cache, where all queries of the group use them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

NOTHING = np.float32(-1e30)  # stands for -inf, which fast-math arithmetic does not know
FORCED = np.float32(1e30)


class Bases(NamedTuple):
    """The arrays of a `PageBasis`."""

    centroid: Any
    centroid_scale: Any
    radius: Any
    radius_scale: Any
    directions: Any
    directions_scale: Any
    coefficients: Any
    coefficients_scale: Any
    regression: Any
    regression_scale: Any
    value_offset: Any
    value_offset_scale: Any
    key_error: Any
    value_error: Any
    tokens: Any


class Tokens(NamedTuple):
    """Token storage: `keys [B, H, T, D]`, `values [B, H, T, D_v]`, `visible [B, T]` (no entries: all tokens are)."""

    keys: Any
    values: Any
    visible: Any


class Table(NamedTuple):
    """Pages of each row: `starts`, `lengths` `[B, P]`; `counts`, `budget`, `shortlist`, `sealed_end`, `ends` `[B]`."""

    starts: Any
    lengths: Any
    counts: Any
    budget: Any
    shortlist: Any
    sealed_end: Any
    ends: Any


class Shortlist(NamedTuple):
    """Scratch: `listed [B, H, n]`, `lengths [B, H]`, `lse [B, H, R, n]`, `moved [B, H, R, n, r]`, `read [B, H, n]`."""

    listed: Any
    lengths: Any
    lse: Any
    moved: Any
    read: Any


class Sums(NamedTuple):
    """Scratch of exact and estimated attention, one a part: `out [B, H, parts, R, D_v]`, `most`, `mass` `[.., R]`."""

    out: Any
    most: Any
    mass: Any


class Query(NamedTuple):
    """`rows [B, H, R, D]`, the queries of a KV head; `tail_mask [B, R, n]`, which open tokens each may read."""

    rows: Any
    tail_mask: Any


@njit(fastmath=True, inline="always")
def _exp(x):  # type: ignore[no-untyped-def]
    """exp for x <= 0, in a form that vectorises; relative error about 1e-7 (Cephes coefficients)."""
    x = max(x, np.float32(-87.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    power = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * power


def _float32(x):  # type: ignore[no-untyped-def]
    """A stored number as float32; uint16 holds the bits of a bfloat16."""


@overload(_float32, inline="always")
def _float32_of(x):  # type: ignore[no-untyped-def]
    if isinstance(x, types.Float):
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit(fastmath=True)
def _dots(rows, vector, out):  # type: ignore[no-untyped-def]
    """`out[r] = rows[r] . vector`."""
    for r in range(rows.shape[0]):
        total = np.float32(0)
        for d in range(rows.shape[1]):
            total += rows[r, d] * vector[d]
        out[r] = total


@njit(fastmath=True)
def _softmax(scores, out):  # type: ignore[no-untyped-def]
    most = NOTHING
    for i in range(scores.shape[0]):
        most = max(most, scores[i])
    total = np.float32(0)
    for i in range(scores.shape[0]):
        out[i] = _exp(scores[i] - most)
        total += out[i]
    for i in range(scores.shape[0]):
        out[i] /= total


@njit(fastmath=True)
def _top(values, wanted, chosen):  # type: ignore[no-untyped-def]
    """Write the positions of the `wanted` largest values that stand for something; return how many there are."""
    count = values.shape[0]
    bound = NOTHING
    if wanted <= 0:
        return 0
    if wanted < count:
        bound = np.partition(values, count - wanted)[count - wanted]
    found = 0
    for i in range(count):
        if values[i] > bound and found < wanted:
            chosen[found] = i
            found += 1
    for i in range(count):
        if values[i] == bound and bound > NOTHING and found < wanted:
            chosen[found] = i
            found += 1
    return found


@njit(fastmath=True)
def _coarse(rows, b, h, bases, scaling, first, last, scores):  # type: ignore[no-untyped-def]
    """Tier 1 for pages first..last: `scores [R, P]`."""
    count, dim = rows.shape
    absolute = np.abs(rows)
    mu, radius = np.empty(dim, np.float32), np.empty(dim, np.float32)
    near, wide = np.empty(count, np.float32), np.empty(count, np.float32)
    for p in range(first, last):
        tokens = bases.tokens[b, h, p]
        for d in range(dim):
            mu[d] = bases.centroid[b, h, p, d]
            radius[d] = bases.radius[b, h, p, d]
        _dots(rows, mu, near)
        _dots(absolute, radius, wide)
        mass = np.float32(np.log(np.float32(max(tokens, 1))))
        for r in range(count):
            logit = near[r] * bases.centroid_scale[b, h, p] + wide[r] * bases.radius_scale[b, h, p]
            scores[r, p] = scaling * logit + mass if tokens > 0 else NOTHING


@njit(fastmath=True)
def _shortlist(scores, tokens, wanted, sinks, window, listed):  # type: ignore[no-untyped-def]
    """The pages with the largest mean share, sinks and window first; returns how many."""
    rows, pages = scores.shape
    share, total = np.empty(pages, np.float32), np.zeros(pages, np.float32)
    for r in range(rows):
        _softmax(scores[r], share)
        total += share
    for p in range(pages):
        if tokens[p] == 0:
            total[p] = NOTHING
        elif p < sinks or p >= pages - window:
            total[p] = FORCED
    return _top(total, wanted, listed)


@njit(fastmath=True)
def _basis(rows, b, h, bases, scaling, pages, lse, moved):  # type: ignore[no-untyped-def]
    """Tier 2 for `pages`: log-masses `lse [R, n]` and mean coefficients `moved [R, n, r]`."""
    count, dim = rows.shape
    rank, size = bases.coefficients.shape[3:]
    vector, logits = np.empty(dim, np.float32), np.empty(size, np.float32)
    along, near = np.empty((rank, count), np.float32), np.empty(count, np.float32)
    c = np.empty((rank, size), np.float32)
    for j in range(pages.shape[0]):
        p = pages[j]
        for d in range(dim):
            vector[d] = bases.centroid[b, h, p, d] * bases.centroid_scale[b, h, p]
        _dots(rows, vector, near)
        for k in range(rank):
            for d in range(dim):
                vector[d] = bases.directions[b, h, p, k, d] * bases.directions_scale[b, h, p, k]
            _dots(rows, vector, along[k])
            for s in range(size):
                c[k, s] = bases.coefficients[b, h, p, k, s] * bases.coefficients_scale[b, h, p, k]
        for r in range(count):
            logits[:] = near[r]
            for k in range(rank):
                for s in range(size):
                    logits[s] += along[k, r] * c[k, s]
            lse[r, j] = _page_output(logits, scaling, bases.tokens[b, h, p], c, moved[r, j])


@njit(fastmath=True)
def _page_output(logits, scaling, tokens, c, moved):  # type: ignore[no-untyped-def]
    """Log-mass of one page for one query; `moved [r]` becomes softmax(logits) . C."""
    most = NOTHING
    for s in range(tokens):
        most = max(most, logits[s])
    total = np.float32(0)
    for s in range(logits.shape[0]):
        logits[s] = _exp(scaling * (logits[s] - most)) if s < tokens else np.float32(0)
        total += logits[s]
    for k in range(c.shape[0]):
        mean = np.float32(0)
        for s in range(logits.shape[0]):
            mean += logits[s] * c[k, s]
        moved[k] = mean / total
    return scaling * most + np.float32(np.log(total))


@njit(fastmath=True)
def _impact(rows, b, h, bases, scaling, value_norm, pages, lse):  # type: ignore[no-untyped-def]
    """Tier 3: how far the approximation of each of `pages` could move the output."""
    share, impact = np.empty(pages.shape[0], np.float32), np.zeros(pages.shape[0], np.float32)
    for r in range(rows.shape[0]):
        _softmax(lse[r], share)
        norm = np.float32(np.sqrt(np.sum(rows[r] * rows[r])))
        reach = scaling * norm / np.float32(np.sqrt(np.float32(rows.shape[1])))
        for j in range(pages.shape[0]):
            p = pages[j]
            impact[j] += share[j] * (bases.value_error[b, h, p] / value_norm + reach * bases.key_error[b, h, p])
    return impact


@njit(fastmath=True)
def _token_list(b, h, tokens, table, picked, count, part, parts, listed):  # type: ignore[no-untyped-def]
    """This part's share of the tokens to read exactly; returns how many. Open tokens come after those in pages."""
    found = 0
    for i in range(count * part // parts, count * (part + 1) // parts):
        p = picked[b, h, i]
        for t in range(table.starts[b, p], table.starts[b, p] + table.lengths[b, p]):
            if tokens.visible.shape[1] == 0 or tokens.visible[b, t]:
                listed[found] = t
                found += 1
    begin, tail = table.sealed_end[b], table.ends[b] - table.sealed_end[b]
    for t in range(begin + tail * part // parts, begin + tail * (part + 1) // parts):
        listed[found] = t
        found += 1
    return found


@njit(fastmath=True)
def _read(query, b, h, tokens, sealed_end, scaling, listed, out, most, mass):  # type: ignore[no-untyped-def]
    """Exact attention over the listed tokens: `out [R, D_v]` not yet divided by `mass [R]`, logits minus `most [R]`."""
    rows = query.rows[b, h]
    key, value = np.empty(rows.shape[1], np.float32), np.empty(out.shape[1], np.float32)
    near, logits = np.empty(rows.shape[0], np.float32), np.empty((rows.shape[0], listed.shape[0]), np.float32)
    for i in range(listed.shape[0]):
        t = listed[i]
        for d in range(key.shape[0]):
            key[d] = _float32(tokens.keys[b, h, t, d])
        _dots(rows, key, near)
        for r in range(rows.shape[0]):
            readable = t < sealed_end or query.tail_mask[b, r, t - sealed_end]
            logits[r, i] = scaling * near[r] if readable else NOTHING
            most[r] = max(most[r], logits[r, i])
    for r in range(rows.shape[0]):
        for i in range(listed.shape[0]):
            weight = _exp(logits[r, i] - most[r]) if logits[r, i] > NOTHING else np.float32(0)
            logits[r, i] = weight
            mass[r] += weight
    for i in range(listed.shape[0]):
        for d in range(value.shape[0]):
            value[d] = _float32(tokens.values[b, h, listed[i], d])
        for r in range(rows.shape[0]):
            for d in range(value.shape[0]):
                out[r, d] += logits[r, i] * value[d]


@njit(fastmath=True)
def _add_tail(b, h, bases, pages, read, lse, moved, out, most, mass):  # type: ignore[no-untyped-def]
    """Add the shortlisted pages that are not read, as their bases approximate them."""
    rows, dim = out.shape
    _raise_most(read, lse, out, most, mass)
    value, weights = np.empty(dim, np.float32), np.empty(rows, np.float32)
    for j in range(pages.shape[0]):
        if read[j]:
            continue
        p = pages[j]
        for r in range(rows):
            weights[r] = _exp(lse[r, j] - most[r])
            mass[r] += weights[r]
        for d in range(dim):
            value[d] = bases.value_offset[b, h, p, d] * bases.value_offset_scale[b, h, p]
        _add_outer(weights, value, out)
        for k in range(moved.shape[2]):
            for d in range(dim):
                value[d] = bases.regression[b, h, p, k, d] * bases.regression_scale[b, h, p, k]
            _add_outer(weights * moved[:, j, k], value, out)


@njit(fastmath=True)
def _raise_most(read, lse, out, most, mass):  # type: ignore[no-untyped-def]
    """Let `most` cover the pages that are not read, and scale what was summed so far accordingly."""
    for r in range(most.shape[0]):
        before = most[r]
        for j in range(read.shape[0]):
            most[r] = max(most[r], NOTHING if read[j] else lse[r, j])
        shrink = _exp(before - most[r])
        mass[r] *= shrink
        for d in range(out.shape[1]):
            out[r, d] *= shrink


@njit(fastmath=True)
def _add_outer(weights, vector, out):  # type: ignore[no-untyped-def]
    """`out[r] += weights[r] vector`."""
    for r in range(out.shape[0]):
        for d in range(out.shape[1]):
            out[r, d] += weights[r] * vector[d]


@njit(parallel=True, fastmath=True, cache=True)
def _score_all(query, table, bases, scaling, parts, scores):  # type: ignore[no-untyped-def]
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        count = table.counts[b]
        first, last = count * part // parts, count * (part + 1) // parts
        _coarse(query.rows[b, h], b, h, bases, scaling, first, last, scores[b, h])


@njit(parallel=True, fastmath=True, cache=True)
def _list_all(scores, table, bases, sinks, window, short):  # type: ignore[no-untyped-def]
    batch, heads = short.listed.shape[:2]
    lengths = short.lengths  # fields of a tuple cannot be assigned to inside prange
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        count = table.counts[b]
        lengths[b, h] = _shortlist(
            scores[b, h, :, :count], bases.tokens[b, h, :count], table.shortlist[b], sinks, window, short.listed[b, h]
        )


@njit(parallel=True, fastmath=True, cache=True)
def _evaluate_all(query, bases, scaling, parts, short):  # type: ignore[no-untyped-def]
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        first, last = short.lengths[b, h] * part // parts, short.lengths[b, h] * (part + 1) // parts
        pages, lse = short.listed[b, h, first:last], short.lse[b, h, :, first:last]
        _basis(query.rows[b, h], b, h, bases, scaling, pages, lse, short.moved[b, h, :, first:last])


@njit(parallel=True, fastmath=True, cache=True)
def _choose_all(query, table, bases, value_norm, scaling, sinks, window, short, picked, valid):  # type: ignore[no-untyped-def]
    batch, heads = query.rows.shape[:2]
    read = short.read
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        length = short.lengths[b, h]
        pages, lse = short.listed[b, h, :length], short.lse[b, h, :, :length]
        impact = _impact(query.rows[b, h], b, h, bases, scaling, value_norm[b], pages, lse)
        for j in range(length):
            if pages[j] < sinks or pages[j] >= table.counts[b] - window:
                impact[j] = FORCED
        found = _top(impact, table.budget[b], picked[b, h])
        for i in range(found):
            place = picked[b, h, i]
            read[b, h, place] = True
            valid[b, h, i] = True
            picked[b, h, i] = pages[place]


@njit(parallel=True, fastmath=True, cache=True)
def _read_all(query, tokens, table, bases, scaling, tail, parts, short, picked, valid, sums):  # type: ignore[no-untyped-def]
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        out, most, mass = sums.out[b, h, part], sums.most[b, h, part], sums.mass[b, h, part]
        count = np.sum(valid[b, h])
        room = (count // parts + 1) * bases.coefficients.shape[4] + table.ends[b] - table.sealed_end[b]
        positions = np.empty(room, np.int64)
        found = _token_list(b, h, tokens, table, picked, count, part, parts, positions)
        _read(query, b, h, tokens, table.sealed_end[b], scaling, positions[:found], out, most, mass)
        if tail:
            first, last = short.lengths[b, h] * part // parts, short.lengths[b, h] * (part + 1) // parts
            pages, read = short.listed[b, h, first:last], short.read[b, h, first:last]
            lse, moved = short.lse[b, h, :, first:last], short.moved[b, h, :, first:last]
            _add_tail(b, h, bases, pages, read, lse, moved, out, most, mass)


@njit(fastmath=True, cache=True)
def _merge_all(sums, out):  # type: ignore[no-untyped-def]
    """Log-sum-exp merge of the parts."""
    batch, heads, parts, rows, _ = sums.out.shape
    out[:] = 0
    for item in range(batch * heads * rows):
        b, h, r = item // rows // heads, item // rows % heads, item % rows
        most, mass = NOTHING, np.float32(0)
        for part in range(parts):
            most = max(most, sums.most[b, h, part, r])
        for part in range(parts):
            weight = _exp(sums.most[b, h, part, r] - most)
            mass += weight * sums.mass[b, h, part, r]
            out[b, h, r] += weight * sums.out[b, h, part, r]
        out[b, h, r] /= max(mass, np.float32(1e-30))


@njit(cache=True)
def cascade(query, tokens, table, bases, value_norm, sinks, window, scaling, tail, parts, out, picked, valid):  # type: ignore[no-untyped-def]
    """One decoding step of one layer.

    Args:
        query, tokens, table, bases: see their classes.
        value_norm: float32 `[B]`, mean norm of the values.
        sinks, window, scaling: as in the config and the model.
        tail: whether shortlisted pages that are not read contribute.
        parts: pieces that every (row, KV head) is cut into.
        out: filled, float32 `[B, H, R, D_v]`.
        picked, valid: filled, int64 and bool `[B, H, K]`, zeros before.
    """
    batch, heads, rows, _ = query.rows.shape
    length, rank = np.max(table.shortlist), bases.coefficients.shape[3]
    scores = np.empty((batch, heads, rows, np.max(table.counts)), np.float32)
    short = Shortlist(
        np.empty((batch, heads, length), np.int64),
        np.empty((batch, heads), np.int64),
        np.empty((batch, heads, rows, length), np.float32),
        np.empty((batch, heads, rows, length, rank), np.float32),
        np.zeros((batch, heads, length), np.bool_),
    )
    sums = Sums(
        np.zeros((batch, heads, parts, rows, out.shape[3]), np.float32),
        np.full((batch, heads, parts, rows), NOTHING, np.float32),
        np.zeros((batch, heads, parts, rows), np.float32),
    )
    _score_all(query, table, bases, scaling, parts, scores)
    _list_all(scores, table, bases, sinks, window, short)
    _evaluate_all(query, bases, scaling, parts, short)
    _choose_all(query, table, bases, value_norm, scaling, sinks, window, short, picked, valid)
    _read_all(query, tokens, table, bases, scaling, tail, parts, short, picked, valid, sums)
    _merge_all(sums, out)
