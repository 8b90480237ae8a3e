"""The three tiers as compiled loops for CPUs (Numba): `reference.py` and `routers/basis.py` say what they compute.

Work is cut into `parts` of every (row, KV head), and everything is read in place. Tier 1 only decides
what is looked at, so queries are rounded to int16 there: integers are multiplied twice as many at a time as floats.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from numba.np.numpy_support import carray

NOTHING = np.float32(-1e30)  # stands for -inf, which fast-math arithmetic does not know
FORCED = np.float32(1e30)
LEAST = np.float32(1e-30)
BLOCK = 4  # tokens, pages or directions that are worked on together
FIRST_ADDRESS = 8  # in `Packed.numbers`
SEALED_END = 3  # column of `Packed.rows`

fast = partial(njit, fastmath=True, error_model="numpy")  # a division by zero gives inf or NaN, as in torch


class Bases(NamedTuple):
    """The arrays of a `PageBasis`; uint8 ones hold two numbers a byte (`oval_core.quantise`)."""

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
    value_norm: Any
    counts: Any
    budget: Any
    shortlist: Any
    sealed_end: Any
    ends: Any


class Choices(NamedTuple):
    """Pages that are always read, whether bases are evaluated, whether pages that are not read contribute."""

    sinks: Any
    window: Any
    refine: Any
    tail: Any


class Sizes(NamedTuple):
    """Pages there is room for, tokens a page, directions a page, value dimensions of a basis."""

    pages: Any
    page_size: Any
    rank: Any
    value_dim: Any


class Packed(NamedTuple):
    """Table, bases and choices of a layer as two arrays: handing over every array by itself takes as long as tier 1.

    `numbers`: `Sizes`, `Choices`, then the addresses of the arrays in `Bases` and of the first three in `Table`;
    `rows [B, 5]`: the other fields of `Table`. Who packs keeps the arrays alive.
    """

    numbers: Any
    rows: Any


class Coarse(NamedTuple):
    """Scratch of tier 1: `shares [B, H, R, P]` relative to the part they are in; `most`, `mass` `[B, H, parts, R]`."""

    shares: Any
    most: Any
    mass: Any


class Shortlist(NamedTuple):
    """Scratch of tier 2: `pages [B, H, n]`, `lengths [B, H, parts]`, `lse [B, H, R, n]`, `moved [B, H, R, n, r]`.

    `moved` is in units of the coefficients' scale.
    """

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
    """`rows [B, H, R, D]`: queries of a KV head. `tail_mask [B, R, n]`: the open tokens each may read; n = 0: all."""

    rows: Any
    tail_mask: Any


@fast(inline="always")
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


@fast()
def _int16(rows):
    """Rows rounded to int16 and the scale of each; no sum of products with int8 can leave int32."""
    count, dim = rows.shape
    limit = np.float32(min(32767, (2**31 - 1) // (127 * dim)))
    rounded, scale = np.empty((count, dim), np.int16), np.zeros(count, np.float32)
    for r in range(count):
        most = np.float32(0)
        for d in range(dim):
            most = max(most, abs(rows[r, d]))
        factor = limit / most if most > 0 else np.float32(0)
        for d in range(dim):
            rounded[r, d] = np.int16(np.rint(rows[r, d] * factor))
        scale[r] = most / limit
    return rounded, scale


@fast(inline="always")
def _two_dots(left, right, other_left, other_right):
    """int16 . int8 in int32, twice; the casts keep Numba from widening to int64."""
    total, other = np.int32(0), np.int32(0)
    for d in range(left.shape[0]):
        total = np.int32(total + np.int32(np.int32(left[d]) * np.int32(right[d])))
        other = np.int32(other + np.int32(np.int32(other_left[d]) * np.int32(other_right[d])))
    return total, other


@fast(inline="always")
def _unpack_uint4(packed, wide):
    """4-bit numbers, two a byte, as int8."""
    half = packed.shape[0]
    low, high = wide[:half], wide[half:]
    for d in range(half):
        low[d] = np.int8(packed[d] & np.uint8(15))
    for d in range(high.shape[0]):
        high[d] = np.int8(packed[d] >> np.uint8(4))


@fast(inline="always")
def _most(values, count):
    most = NOTHING
    for i in range(count):
        most = max(most, values[i])
    return most


@fast(inline="always")
def _exp_all(values, count, most):
    """Replace the first `count` values by exp(value - most); return their sum."""
    total = np.float32(0)
    for i in range(count):
        values[i] = _exp(values[i] - most)
        total += values[i]
    return total


@fast()
def _softmax(scores, out):
    out[:] = scores
    total = _exp_all(out, out.shape[0], _most(out, out.shape[0]))
    for i in range(out.shape[0]):
        out[i] /= total


@fast()
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


@fast()
def _coarse(rows, b, h, bases, scaling, first, last, scores):
    """Tier 1 for pages first..last: `scores [R, P]`."""
    rounded, scale = _int16(rows)
    absolute, size = np.abs(rounded), 2 * bases.coefficients.shape[4]
    masses = np.log(np.maximum(np.arange(size + 1), 1)).astype(np.float32)
    radius = np.empty(rows.shape[1], np.int8)
    for p in range(first, last):
        tokens, mu = bases.tokens[b, h, p], bases.centroid[b, h, p]
        _unpack_uint4(bases.radius[b, h, p], radius)
        along, spread = scaling * bases.centroid_scale[b, h, p], scaling * bases.radius_scale[b, h, p]
        for r in range(rows.shape[0]):
            dot, reach = _two_dots(rounded[r], mu, absolute[r], radius)
            logit = scale[r] * (along * dot + spread * reach) + masses[tokens]
            scores[r, p] = logit if tokens > 0 else NOTHING


@fast()
def _page_shares(b, h, part_ends, coarse, tokens, choices):
    """Sum over the queries of each page's share of the mass by tier 1; sinks and window before all others."""
    rows, pages = coarse.shares.shape[2], tokens.shape[0]
    total = np.zeros(pages, np.float32)
    for r in range(rows):
        most, mass = NOTHING, np.float32(0)
        for part in range(part_ends.shape[0] - 1):
            most = max(most, coarse.most[b, h, part, r])
        for part in range(part_ends.shape[0] - 1):
            mass += _exp(coarse.most[b, h, part, r] - most) * coarse.mass[b, h, part, r]
        for part in range(part_ends.shape[0] - 1):
            factor = _exp(coarse.most[b, h, part, r] - most) / max(mass, LEAST)
            for p in range(part_ends[part], part_ends[part + 1]):
                total[p] += factor * coarse.shares[b, h, r, p]
    for p in range(pages):
        if tokens[p] == 0:
            total[p] = NOTHING
        elif p < choices.sinks or p >= pages - choices.window:
            total[p] = FORCED
    return total


@fast()
def _basis(rows, b, h, bases, scaling, pages, lse, moved):
    """Tier 2 for `pages`, BLOCK of them at a time: log-masses `lse [R, n]`, mean coefficients `moved [R, n, r]`."""
    rank, size = bases.coefficients.shape[3], 2 * bases.coefficients.shape[4]
    step = rank + 1
    vectors = np.zeros((BLOCK * step, rows.shape[1]), np.float32)  # of each page the centroid, then the directions
    along = np.empty((rows.shape[0], BLOCK * step), np.float32)
    c = np.zeros((BLOCK, _up(rank), size), np.float32)
    logits, weights = np.zeros((BLOCK, size), np.float32), np.zeros(_up(rank), np.float32)
    for j in range(0, pages.shape[0], BLOCK):
        block = pages[j : j + BLOCK]
        for i in range(block.shape[0]):
            centroid, directions = bases.centroid[b, h, block[i]], bases.directions[b, h, block[i]]
            _stack(centroid, directions, vectors[i * step : i * step + step])
            _unpack_rows(bases.coefficients[b, h, block[i]], c[i])
        _dots(rows, vectors, scaling, along)
        for r in range(rows.shape[0]):
            _log_masses(along[r], b, h, bases, block, c, logits, weights, lse[r, j : j + BLOCK])
            _mean_coefficients(logits, c, lse[r, j : j + BLOCK], moved[r, j : j + BLOCK])


@njit(inline="always")
def _up(n):
    """The next multiple of BLOCK."""
    return (n + BLOCK - 1) // BLOCK * BLOCK


@fast(inline="always")
def _unpack_rows(packed, wide):
    """Rows of signed 4-bit numbers, two a byte, as float32, not scaled; the shifts within int8 carry the sign."""
    half = packed.shape[1]
    for k in range(packed.shape[0]):
        source, low, high = packed[k], wide[k, :half], wide[k, half:]
        for d in range(half):
            low[d] = np.int8(np.int8(source[d] << 4) >> 4)
        for d in range(high.shape[0]):
            high[d] = np.int8(np.int8(source[d]) >> 4)


@fast(inline="always")
def _stack(first, packed, vectors):
    """One int8 vector and rows of 4-bit numbers as float32, not scaled."""
    target = vectors[0]
    for d in range(first.shape[0]):
        target[d] = first[d]
    _unpack_rows(packed, vectors[1:])


@fast()
def _dots(rows, vectors, scaling, out):
    """`out[r, i] = s rows[r] . vectors[i]`, BLOCK vectors at a time so that the row is loaded once for all."""
    for i in range(0, vectors.shape[0], BLOCK):
        for r in range(rows.shape[0]):
            w, x, y, z = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
            for d in range(rows.shape[1]):
                q = rows[r, d]
                w += q * vectors[i, d]
                x += q * vectors[i + 1, d]
                y += q * vectors[i + 2, d]
                z += q * vectors[i + 3, d]
            out[r, i], out[r, i + 1], out[r, i + 2], out[r, i + 3] = scaling * w, scaling * x, scaling * y, scaling * z


@fast(inline="always")
def _log_masses(along, b, h, bases, block, c, logits, weights, lse):
    """One query, a block of pages: their largest logits `lse`, and `logits [BLOCK, S]`, weights relative to those."""
    rank, size = bases.coefficients.shape[3], logits.shape[1]
    for i in range(block.shape[0]):
        p, at = block[i], i * (rank + 1)
        row, start = logits[i], along[at] * bases.centroid_scale[b, h, p]
        for k in range(rank):
            scale = bases.directions_scale[b, h, p, k] * bases.coefficients_scale[b, h, p, k]
            weights[k] = along[at + 1 + k] * scale
        for s in range(size):
            row[s] = start
        _add_weighted(weights, c[i], row)
        for s in range(bases.tokens[b, h, p], size):
            row[s] = NOTHING
        most = _most(row, size)
        for s in range(size):
            row[s] = _exp(row[s] - most)
        lse[i] = most


@fast(inline="always")
def _add_weighted(weights, rows, out):
    """`out += weights . rows`, BLOCK rows at a time; their number is a multiple of it."""
    for first in range(0, weights.shape[0], BLOCK):
        w, x, y, z = weights[first], weights[first + 1], weights[first + 2], weights[first + 3]
        for d in range(out.shape[0]):
            out[d] += w * rows[first, d] + x * rows[first + 1, d] + y * rows[first + 2, d] + z * rows[first + 3, d]


@fast(inline="always")
def _mean_coefficients(weights, c, lse, moved):
    """Add the log of the summed `weights [BLOCK, S]` to `lse`; `moved [n, r]` = weights . C over their sum."""
    size = weights.shape[1]
    for i in range(lse.shape[0]):
        row, mass = weights[i], np.float32(0)
        for s in range(size):
            mass += row[s]
        lse[i] += np.float32(np.log(mass))
        for k in range(moved.shape[1]):
            coefficients, mean = c[i, k], np.float32(0)
            for s in range(size):
                mean += row[s] * coefficients[s]
            moved[i, k] = mean / mass


@fast()
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


@fast()
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


@fast()
def _read(query, b, h, tokens, sealed_end, scaling, listed, found, out, most, mass):
    """Exact attention over the `found` tokens listed (with room for BLOCK more).

    `out [R, D_v]` is not yet divided by `mass [R]`; logits are taken minus `most [R]`.
    """
    rows = query.rows[b, h].shape[0]
    padded = (found + BLOCK - 1) // BLOCK * BLOCK
    listed[found:padded] = listed[0]
    logits = np.empty((rows, padded), np.float32)
    _read_keys(query.rows, tokens.keys, b, h, scaling, listed, padded, logits)
    hides = query.tail_mask.shape[2] > 0
    for r in range(rows):
        for i in range(found):
            if listed[i] >= sealed_end and hides and not query.tail_mask[b, r, listed[i] - sealed_end]:
                logits[r, i] = NOTHING
        for i in range(found, padded):
            logits[r, i] = NOTHING
        most[r] = _most(logits[r], padded)
        if most[r] > NOTHING:
            mass[r] = _exp_all(logits[r], padded, most[r])
        else:
            logits[r] = 0
    _read_values(tokens.values, b, h, listed, padded, logits, out)


@fast()
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


@fast()
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


@njit
def _last_unread(read):
    last = -1
    for j in range(read.shape[0]):
        if not read[j]:
            last = j
    return last


@fast()
def _add_tail(b, h, bases, pages, read, lse, moved, out, most, mass):
    """Add the shortlisted pages that are not read, as their bases approximate them, BLOCK of them at a time."""
    rows, dim = out.shape
    step = bases.regression.shape[3] + 1
    _raise_most(read, lse, out, most, mass)
    vectors, weights = np.zeros((BLOCK * step, dim), np.float32), np.zeros((rows, BLOCK * step), np.float32)
    filled, last = 0, _last_unread(read)
    for j in range(last + 1):
        if read[j]:
            continue
        offset, regression = bases.value_offset[b, h, pages[j]], bases.regression[b, h, pages[j]]
        _stack(offset, regression, vectors[filled : filled + step])
        for r in range(rows):
            share = _exp(lse[r, j] - most[r])
            mass[r] += share
            _weigh_values(share, b, h, pages[j], bases, moved[r, j], weights[r, filled : filled + step])
        filled += step
        if filled == BLOCK * step or j == last:
            weights[:, filled:] = 0
            for r in range(rows):
                _add_weighted(weights[r], vectors, out[r])
            filled = 0


@fast(inline="always")
def _weigh_values(share, b, h, p, bases, moved, weights):
    """What v0 and the rows of W of one page are multiplied by for one query."""
    weights[0] = share * bases.value_offset_scale[b, h, p]
    for k in range(moved.shape[0]):
        weights[k + 1] = share * moved[k] * bases.coefficients_scale[b, h, p, k] * bases.regression_scale[b, h, p, k]


@fast()
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


@fast()
def _score(b, h, part, parts, query, table, bases, choices, scaling, coarse):
    """First stage of one part: coarse shares of its pages."""
    count = table.counts[b]
    first, last = count * part // parts, count * (part + 1) // parts
    shares = coarse.shares[b, h]
    _coarse(query.rows[b, h], b, h, bases, scaling, first, last, shares)
    for r in range(shares.shape[0]):
        own = shares[r, first:last]
        coarse.most[b, h, part, r] = _most(own, last - first)
        coarse.mass[b, h, part, r] = _exp_all(own, last - first, coarse.most[b, h, part, r])


@fast()
def _best(b, h, parts, wanted, table, bases, choices, coarse, listed):
    """The `wanted` pages with the largest coarse shares (each part finds them, that is cheaper than waiting)."""
    count = table.counts[b]
    ends = np.arange(parts + 1) * count // parts
    return _top(_page_shares(b, h, ends, coarse, bases.tokens[b, h, :count], choices), wanted, listed)


@fast()
def _evaluate(b, h, part, parts, query, table, bases, choices, scaling, coarse, short):
    """Second stage of one part: its share of the shortlist."""
    listed = np.empty(table.shortlist[b], np.int64)
    length = _best(b, h, parts, table.shortlist[b], table, bases, choices, coarse, listed)
    first, last = length * part // parts, length * (part + 1) // parts
    lse, moved = short.lse[b, h, :, first:last], short.moved[b, h, :, first:last]
    _basis(query.rows[b, h], b, h, bases, scaling, listed[first:last], lse, moved)
    short.pages[b, h, first:last] = listed[first:last]
    short.lengths[b, h, part] = length


@fast()
def _select(b, h, query, table, bases, choices, scaling, pages, lse, read, chosen):
    """Tier 3 for one KV head: marks what is `read` in the shortlist, lists the `chosen` pages, returns how many."""
    impact = _impact(query.rows[b, h], b, h, bases, scaling, table.value_norm[b], pages, lse)
    for j in range(pages.shape[0]):
        if pages[j] < choices.sinks or pages[j] >= table.counts[b] - choices.window:
            impact[j] = FORCED
    count = _top(impact, table.budget[b], chosen)
    for i in range(count):
        read[chosen[i]] = True
        chosen[i] = pages[chosen[i]]
    return count


@fast()
def _finish(b, h, part, parts, query, tokens, table, bases, choices, scaling, coarse, short, sums, picked, valid):
    """Last stage of one part: the selection (again made by each part), exact attention and the estimated tail."""
    length = short.lengths[b, h, part] if choices.refine else 0
    pages, lse = short.pages[b, h, :length], short.lse[b, h, :, :length]
    chosen, read = np.empty(table.budget[b], np.int64), np.zeros(length, np.bool_)
    if choices.refine:
        count = _select(b, h, query, table, bases, choices, scaling, pages, lse, read, chosen)
    else:
        count = _best(b, h, parts, table.budget[b], table, bases, choices, coarse, chosen)
    if part == 0:
        picked[b, h, :count] = chosen[:count]
        valid[b, h, :count] = True
    out, most, mass = sums.out[b, h, part], sums.most[b, h, part], sums.mass[b, h, part]
    room = (count // parts + 1) * 2 * bases.coefficients.shape[4] + table.ends[b] - table.sealed_end[b]
    positions = np.empty(room + BLOCK, np.int64)
    found = _token_list(b, tokens, table, chosen[:count], part, parts, positions)
    _read(query, b, h, tokens, table.sealed_end[b], scaling, positions, found, out, most, mass)
    if choices.refine and choices.tail:
        first, last = length * part // parts, length * (part + 1) // parts
        lse, moved = lse[:, first:last], short.moved[b, h, :, first:last]
        _add_tail(b, h, bases, pages[first:last], read[first:last], lse, moved, out, most, mass)


@fast(parallel=True, cache=True)
def _all_parts(query, tokens, table, bases, choices, scaling, parts, coarse, short, sums, picked, valid):
    """All parts of all KV heads; they wait for each other between the stages."""
    batch, heads = query.rows.shape[:2]
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        _score(b, h, part, parts, query, table, bases, choices, scaling, coarse)
    if choices.refine:
        for item in prange(batch * heads * parts):
            b, h, part = item // parts // heads, item // parts % heads, item % parts
            _evaluate(b, h, part, parts, query, table, bases, choices, scaling, coarse, short)
    for item in prange(batch * heads * parts):
        b, h, part = item // parts // heads, item // parts % heads, item % parts
        _finish(b, h, part, parts, query, tokens, table, bases, choices, scaling, coarse, short, sums, picked, valid)


@fast()
def _merge_all(sums, out):
    """Log-sum-exp merge of the parts into `out [B, Q, heads, D_v]`."""
    batch, heads, parts, rows, _ = sums.out.shape
    queries, group = out.shape[1], out.shape[2] // heads
    for item in range(batch * heads * rows):
        b, h, r = item // rows // heads, item // rows % heads, item % rows
        target = out[b, r % queries, h * group + r // queries]
        most, mass = NOTHING, np.float32(0)
        for part in range(parts):
            most = max(most, sums.most[b, h, part, r])
        target[:] = 0
        for part in range(parts):
            weight = _exp(sums.most[b, h, part, r] - most)
            mass += weight * sums.mass[b, h, part, r]
            target += weight * sums.out[b, h, part, r]
        target /= max(mass, LEAST)


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer, as `carray` wants it."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit
def unpack(packed, heads, dim):
    """`Table`, `Bases` and `Choices` of `packed`, for KV heads of `dim` key dimensions."""
    numbers, rows = packed.numbers, packed.rows
    sizes, choices = Sizes(*_four(numbers, 0)), Choices(*_four(numbers, 4))
    table_shape, shape = (rows.shape[0], sizes.pages), (rows.shape[0], heads, sizes.pages)
    at = numbers[FIRST_ADDRESS:]
    bases = Bases(
        carray(_pointer(at[0]), (*shape, dim), np.int8),
        carray(_pointer(at[1]), shape, np.float32),
        carray(_pointer(at[2]), (*shape, (dim + 1) // 2), np.uint8),
        carray(_pointer(at[3]), shape, np.float32),
        carray(_pointer(at[4]), (*shape, sizes.rank, (dim + 1) // 2), np.uint8),
        carray(_pointer(at[5]), (*shape, sizes.rank), np.float32),
        carray(_pointer(at[6]), (*shape, sizes.rank, sizes.page_size // 2), np.uint8),
        carray(_pointer(at[7]), (*shape, sizes.rank), np.float32),
        carray(_pointer(at[8]), (*shape, sizes.rank, (sizes.value_dim + 1) // 2), np.uint8),
        carray(_pointer(at[9]), (*shape, sizes.rank), np.float32),
        carray(_pointer(at[10]), (*shape, sizes.value_dim), np.int8),
        carray(_pointer(at[11]), shape, np.float32),
        carray(_pointer(at[12]), shape, np.float32),
        carray(_pointer(at[13]), shape, np.float32),
        carray(_pointer(at[14]), shape, np.int32),
    )
    table = Table(
        carray(_pointer(at[15]), table_shape, np.int64),
        carray(_pointer(at[16]), table_shape, np.int64),
        carray(_pointer(at[17]), rows.shape[:1], np.float32),
        rows[:, 0],
        rows[:, 1],
        rows[:, 2],
        rows[:, SEALED_END],
        rows[:, SEALED_END + 1],
    )
    return table, bases, choices


@njit(inline="always")
def _four(numbers, first):
    return numbers[first], numbers[first + 1], numbers[first + 2], numbers[first + 3]


@njit(cache=True)
def cascade(query, tail_mask, tokens, packed, scaling, threads, out, picked, valid):
    """One decoding step of one layer.

    Args:
        query: float32 `[B, heads, Q, D]`.
        tail_mask, tokens, packed: see `Query` and their classes.
        scaling: float32, the softmax scale.
        threads: how many share the work.
        out: filled, float32 `[B, Q, heads, D_v]`.
        picked, valid: filled, int64 and bool `[B, H, K]`, zeros before.
    """
    batch, heads, _ = picked.shape
    rows, dim = query.shape[1] // heads * query.shape[2], query.shape[3]
    table, bases, choices = unpack(packed, heads, dim)
    asked = Query(query.reshape((batch, heads, rows, dim)), tail_mask)
    parts = threads // math.gcd(threads, batch * heads)  # the fewest that keep all threads equally busy
    length, rank = np.max(table.shortlist) if choices.refine else 0, bases.coefficients.shape[3]
    coarse = Coarse(
        np.empty((batch, heads, rows, np.max(table.counts)), np.float32),
        np.empty((batch, heads, parts, rows), np.float32),
        np.empty((batch, heads, parts, rows), np.float32),
    )
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
    _all_parts(asked, tokens, table, bases, choices, scaling, parts, coarse, short, sums, picked, valid)
    _merge_all(sums, out)
