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
BLOCK = 4  # tokens whose keys and values are read together


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
    """Pages of each row: `starts`, `lengths` `[B, P]`; all others, sizes and the mean value norm, `[B]`."""

    starts: Any
    lengths: Any
    counts: Any
    budget: Any
    shortlist: Any
    value_norm: Any
    sealed_end: Any
    ends: Any


class Choices(NamedTuple):
    """Softmax scale, pages that are always read, whether pages that are not read contribute."""

    scaling: Any
    sinks: Any
    window: Any
    tail: Any


class Shortlist(NamedTuple):
    """Scratch: `pages [B, H, n]`, `lengths [B, H, parts]`, `lse [B, H, R, n]`, `moved [B, H, R, n, r]`."""

    pages: Any
    lengths: Any
    lse: Any
    moved: Any


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
def _exp(x):
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


def _float32(x):
    """A stored number as float32; uint16 holds the bits of a bfloat16."""


@overload(_float32, inline="always")
def _float32_of(x):
    if isinstance(x, types.Float):
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)


@njit(fastmath=True, inline="always")
def _dots(rows, vector, out, at):
    """`out[at, r] = rows[r] . vector`."""
    for r in range(rows.shape[0]):
        total = np.float32(0)
        for d in range(rows.shape[1]):
            total += rows[r, d] * vector[d]
        out[at, r] = total


@njit(fastmath=True, inline="always")
def _most(values, count):
    most = NOTHING
    for i in range(count):
        most = max(most, values[i])
    return most


@njit(fastmath=True, inline="always")
def _exp_all(values, count, most):
    """Replace the first `count` values by exp(value - most); return their sum."""
    total = np.float32(0)
    for i in range(count):
        values[i] = _exp(values[i] - most)
        total += values[i]
    return total


@njit(fastmath=True)
def _softmax(scores, out):
    out[:] = scores
    total = _exp_all(out, out.shape[0], _most(out, out.shape[0]))
    for i in range(out.shape[0]):
        out[i] /= total


@njit(fastmath=True)
def _top(values, wanted, chosen):
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
def _coarse(rows, b, h, bases, scaling, first, last, scores):
    """Tier 1 for pages first..last: `scores [R, P]`."""
    count, dim = rows.shape
    absolute = np.abs(rows)
    mu, radius = np.empty(dim, np.float32), np.empty(dim, np.float32)
    dots = np.empty((2, count), np.float32)
    for p in range(first, last):
        tokens = bases.tokens[b, h, p]
        for d in range(dim):
            mu[d] = bases.centroid[b, h, p, d]
            radius[d] = bases.radius[b, h, p, d]
        _dots(rows, mu, dots, 0)
        _dots(absolute, radius, dots, 1)
        mass = np.float32(np.log(np.float32(max(tokens, 1))))
        for r in range(count):
            logit = dots[0, r] * bases.centroid_scale[b, h, p] + dots[1, r] * bases.radius_scale[b, h, p]
            scores[r, p] = scaling * logit + mass if tokens > 0 else NOTHING


@njit(fastmath=True)
def _shortlist(scores, tokens, wanted, sinks, window, listed):
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
def _basis(rows, b, h, bases, scaling, pages, lse, moved):
    """Tier 2 for `pages`: log-masses `lse [R, n]` and mean coefficients `moved [R, n, r]`."""
    count, dim = rows.shape
    rank, size = bases.coefficients.shape[3:]
    vector, logits = np.empty(dim, np.float32), np.empty(size, np.float32)
    along = np.empty((rank + 1, count), np.float32)  # the last row: along the centroid
    c = np.empty((rank, size), np.float32)
    for j in range(pages.shape[0]):
        p = pages[j]
        for d in range(dim):
            vector[d] = bases.centroid[b, h, p, d] * bases.centroid_scale[b, h, p]
        _dots(rows, vector, along, rank)
        for k in range(rank):
            for d in range(dim):
                vector[d] = bases.directions[b, h, p, k, d] * bases.directions_scale[b, h, p, k]
            _dots(rows, vector, along, k)
            for s in range(size):
                c[k, s] = bases.coefficients[b, h, p, k, s] * bases.coefficients_scale[b, h, p, k]
        for r in range(count):
            for s in range(size):
                logits[s] = along[rank, r]
            for k in range(rank):
                for s in range(size):
                    logits[s] += along[k, r] * c[k, s]
            _page_output(logits, scaling, bases.tokens[b, h, p], c, lse, moved, r, j)


@njit(fastmath=True, inline="always")
def _page_output(logits, scaling, tokens, c, lse, moved, r, j):
    """One page for one query: `lse[r, j]`, its log-mass, and `moved[r, j]`, softmax(logits) . C."""
    size = logits.shape[0]
    most = _most(logits, tokens)
    for s in range(size):
        logits[s] = scaling * (logits[s] - most)
    for s in range(tokens, size):
        logits[s] = NOTHING
    total = _exp_all(logits, size, np.float32(0))
    for k in range(c.shape[0]):
        mean = np.float32(0)
        for s in range(logits.shape[0]):
            mean += logits[s] * c[k, s]
        moved[r, j, k] = mean / total
    lse[r, j] = scaling * most + np.float32(np.log(total))


@njit(fastmath=True)
def _impact(rows, b, h, bases, scaling, value_norm, pages, lse):
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
def _token_list(b, tokens, table, pages, part, parts, listed):
    """This part's share of the tokens to read exactly; returns how many. Open tokens come after those in pages."""
    found, count = 0, pages.shape[0]
    for i in range(count * part // parts, count * (part + 1) // parts):
        p = pages[i]
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
def _read(query, b, h, tokens, sealed_end, scaling, listed, found, out, most, mass):
    """Exact attention over the `found` tokens listed (with room for BLOCK more).

    `out [R, D_v]` is not yet divided by `mass [R]`; logits are taken minus `most [R]`.
    """
    rows = query.rows[b, h].shape[0]
    padded = (found + BLOCK - 1) // BLOCK * BLOCK
    listed[found:padded] = listed[0]
    logits = np.empty((rows, padded), np.float32)
    _read_keys(query.rows, tokens.keys, b, h, scaling, listed, padded, logits)
    for r in range(rows):
        for i in range(found):
            if listed[i] >= sealed_end and not query.tail_mask[b, r, listed[i] - sealed_end]:
                logits[r, i] = NOTHING
        for i in range(found, padded):
            logits[r, i] = NOTHING
        most[r] = _most(logits[r], padded)
        if most[r] > NOTHING:
            mass[r] = _exp_all(logits[r], padded, most[r])
        else:
            logits[r] = 0
    _read_values(tokens.values, b, h, listed, padded, logits, out)


@njit(fastmath=True)
def _read_keys(rows, keys, b, h, scaling, listed, count, logits):
    """`logits[r, i] = s rows[r] . keys[listed[i]]`, BLOCK tokens at a time so that the query is loaded once for all."""
    for i in range(0, count, BLOCK):
        t, u, v, w = listed[i], listed[i + 1], listed[i + 2], listed[i + 3]
        for r in range(logits.shape[0]):
            x, y, z, a = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(rows.shape[3]):
                q = rows[b, h, r, d]
                x += q * _float32(keys[b, h, t, d])
                y += q * _float32(keys[b, h, u, d])
                z += q * _float32(keys[b, h, v, d])
                a += q * _float32(keys[b, h, w, d])
            logits[r, i], logits[r, i + 1] = scaling * x, scaling * y
            logits[r, i + 2], logits[r, i + 3] = scaling * z, scaling * a


@njit(fastmath=True)
def _read_values(values, b, h, listed, count, weights, out):
    """`out[r] += sum of weights[r, i] values[listed[i]]`, BLOCK tokens at a time: `out` is stored once for all."""
    for i in range(0, count, BLOCK):
        t, u, v, w = listed[i], listed[i + 1], listed[i + 2], listed[i + 3]
        for r in range(weights.shape[0]):
            x, y, z, a = weights[r, i], weights[r, i + 1], weights[r, i + 2], weights[r, i + 3]
            for d in range(out.shape[1]):
                out[r, d] += (
                    x * _float32(values[b, h, t, d])
                    + y * _float32(values[b, h, u, d])
                    + z * _float32(values[b, h, v, d])
                    + a * _float32(values[b, h, w, d])
                )


@njit(fastmath=True)
def _add_tail(b, h, bases, pages, read, lse, moved, out, most, mass):
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
def _raise_most(read, lse, out, most, mass):
    """Let `most` cover the pages that are not read, and scale what was summed so far accordingly."""
    for r in range(most.shape[0]):
        before = most[r]
        for j in range(read.shape[0]):
            most[r] = max(most[r], NOTHING if read[j] else lse[r, j])
        shrink = _exp(before - most[r])
        mass[r] *= shrink
        for d in range(out.shape[1]):
            out[r, d] *= shrink


@njit(fastmath=True, inline="always")
def _add_outer(weights, vector, out):
    """`out[r] += weights[r] vector`."""
    for r in range(out.shape[0]):
        for d in range(out.shape[1]):
            out[r, d] += weights[r] * vector[d]


@njit(fastmath=True)
def _score(b, h, part, parts, query, table, bases, choices, scores):
    """First stage of one part: coarse scores of its pages."""
    count = table.counts[b]
    first, last = count * part // parts, count * (part + 1) // parts
    _coarse(query.rows[b, h], b, h, bases, choices.scaling, first, last, scores[b, h])


@njit(fastmath=True)
def _evaluate(b, h, part, parts, query, table, bases, choices, scores, short):
    """Second stage of one part: the shortlist (each part makes it, that is cheaper than waiting) and its bases."""
    count, wanted = table.counts[b], table.shortlist[b]
    listed, tokens = np.empty(wanted, np.int64), bases.tokens[b, h, :count]
    length = _shortlist(scores[b, h, :, :count], tokens, wanted, choices.sinks, choices.window, listed)
    first, last = length * part // parts, length * (part + 1) // parts
    lse, moved = short.lse[b, h, :, first:last], short.moved[b, h, :, first:last]
    _basis(query.rows[b, h], b, h, bases, choices.scaling, listed[first:last], lse, moved)
    short.pages[b, h, first:last] = listed[first:last]
    short.lengths[b, h, part] = length


@njit(fastmath=True)
def _select(b, h, query, table, bases, choices, pages, lse, read, chosen):
    """Tier 3 for one KV head: marks what is `read` in the shortlist, lists the `chosen` pages, returns how many."""
    impact = _impact(query.rows[b, h], b, h, bases, choices.scaling, table.value_norm[b], pages, lse)
    for j in range(pages.shape[0]):
        if pages[j] < choices.sinks or pages[j] >= table.counts[b] - choices.window:
            impact[j] = FORCED
    count = _top(impact, table.budget[b], chosen)
    for i in range(count):
        read[chosen[i]] = True
        chosen[i] = pages[chosen[i]]
    return count


@njit(fastmath=True)
def _finish(b, h, part, parts, query, tokens, table, bases, choices, short, sums, picked, valid):
    """Third stage of one part: the selection (again made by each part), exact attention and the estimated tail."""
    length = short.lengths[b, h, part]
    pages, lse = short.pages[b, h, :length], short.lse[b, h, :, :length]
    chosen, read = np.empty(table.budget[b], np.int64), np.zeros(length, np.bool_)
    count = _select(b, h, query, table, bases, choices, pages, lse, read, chosen)
    if part == 0:
        picked[b, h, :count] = chosen[:count]
        valid[b, h, :count] = True
    out, most, mass = sums.out[b, h, part], sums.most[b, h, part], sums.mass[b, h, part]
    room = (count // parts + 1) * bases.coefficients.shape[4] + table.ends[b] - table.sealed_end[b]
    positions = np.empty(room + BLOCK, np.int64)
    found = _token_list(b, tokens, table, chosen[:count], part, parts, positions)
    _read(query, b, h, tokens, table.sealed_end[b], choices.scaling, positions, found, out, most, mass)
    if choices.tail:
        first, last = length * part // parts, length * (part + 1) // parts
        lse, moved = lse[:, first:last], short.moved[b, h, :, first:last]
        _add_tail(b, h, bases, pages[first:last], read[first:last], lse, moved, out, most, mass)


@njit(parallel=True, fastmath=True, cache=True)
def _parts(query, tokens, table, bases, choices, parts, scores, short, sums, picked, valid):
    """KV heads cut into parts; all parts wait for each other between the stages."""
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        _score(b, h, part, parts, query, table, bases, choices, scores)
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        _evaluate(b, h, part, parts, query, table, bases, choices, scores, short)
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        _finish(b, h, part, parts, query, tokens, table, bases, choices, short, sums, picked, valid)


@njit(parallel=True, fastmath=True, cache=True)
def _heads(query, tokens, table, bases, choices, scores, short, sums, picked, valid):
    """Whole KV heads, with nothing to wait for between the stages."""
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads):
        b, h = item // heads, item % heads
        _score(b, h, 0, 1, query, table, bases, choices, scores)
        _evaluate(b, h, 0, 1, query, table, bases, choices, scores, short)
        _finish(b, h, 0, 1, query, tokens, table, bases, choices, short, sums, picked, valid)


@njit(fastmath=True, cache=True)
def _merge_all(sums, out):
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
def cascade(query, tokens, table, bases, choices, parts, out, picked, valid):
    """One decoding step of one layer.

    Args:
        query, tokens, table, bases, choices: see their classes.
        parts: pieces that every (row, KV head) is cut into.
        out: filled, float32 `[B, H, R, D_v]`.
        picked, valid: filled, int64 and bool `[B, H, K]`, zeros before.
    """
    batch, heads, rows, _ = query.rows.shape
    length, rank = np.max(table.shortlist), bases.coefficients.shape[3]
    scores = np.empty((batch, heads, rows, np.max(table.counts)), np.float32)
    short = Shortlist(
        np.empty((batch, heads, length), np.int64),
        np.empty((batch, heads, parts), np.int64),
        np.empty((batch, heads, rows, length), np.float32),
        np.empty((batch, heads, rows, length, rank), np.float32),
    )
    sums = Sums(
        np.zeros((batch, heads, parts, rows, out.shape[3]), np.float32),
        np.full((batch, heads, parts, rows), NOTHING, np.float32),
        np.zeros((batch, heads, parts, rows), np.float32),
    )
    if parts == 1:
        _heads(query, tokens, table, bases, choices, scores, short, sums, picked, valid)
    else:
        _parts(query, tokens, table, bases, choices, parts, scores, short, sums, picked, valid)
    _merge_all(sums, out)
