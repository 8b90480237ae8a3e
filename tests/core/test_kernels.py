"""The reference kernels against torch's attention and against their formulas, written out."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oval_core import kernels
from oval_core.basis import PageBasis, build_basis
from oval_core.kernels import reference
from oval_core.kernels.api import Partial, Reads
from tests.tolerance import INT4_STEP, INT8_STEP, assert_as_accurate_as

pytestmark = pytest.mark.usefixtures("poisoned_memory")

BATCH, HEADS, GROUP, DIM, VALUE_DIM, SCALING = 2, 2, 3, 8, 6, 0.4


def random_attention(queries: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, keys and values."""
    return (
        torch.randn(BATCH, HEADS, GROUP, queries, DIM),
        torch.randn(BATCH, HEADS, tokens, DIM),
        torch.randn(BATCH, HEADS, tokens, VALUE_DIM),
    )


def causal(queries: int, tokens: int) -> Tensor:
    return torch.ones(BATCH, HEADS, queries, tokens, dtype=torch.bool).tril(tokens - queries)


def formula(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, softcap: float | None = None) -> Tensor:
    """Attention spelt out; every query reads something."""
    logits = SCALING * query @ keys[:, :, None].mT
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits.masked_fill(~mask[:, :, None], -torch.inf).softmax(-1) @ values[:, :, None]


def log_mass(query: Tensor, keys: Tensor, mask: Tensor) -> Tensor:
    return (SCALING * query @ keys[:, :, None].mT).masked_fill(~mask[:, :, None], -torch.inf).logsumexp(-1)


@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (1, 40), (5, 40), (7, 7)])
def test_attend_is_torchs_attention(queries: int, tokens: int) -> None:
    inputs, mask = random_attention(queries, tokens), causal(queries, tokens)

    def sdpa(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """With the group as heads, as transformers does it."""
        k, v, m = (x.repeat_interleave(GROUP, 1) for x in (keys, values, mask))
        out = scaled_dot_product_attention(query.flatten(1, 2), k, v, attn_mask=m, scale=SCALING)
        return out.unflatten(1, (HEADS, GROUP))

    got = reference.attend(*inputs, mask, SCALING, None)
    assert_as_accurate_as(sdpa, inputs, got.out)
    assert_as_accurate_as(lambda q, k, v: log_mass(q, k, mask), inputs, got.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attend_computes_in_float32(dtype: torch.dtype) -> None:
    query, keys, values = random_attention(1, 40)
    keys, values = keys.to(dtype), values.to(dtype)
    got, mask = reference.attend(query, keys, values, None, SCALING, None), causal(1, 40)
    assert got.out.dtype == got.lse.dtype == torch.float32
    assert_as_accurate_as(partial(formula, mask=mask), (query, keys.float(), values.float()), got.out)


def test_softcap() -> None:
    inputs, mask = random_attention(3, 20), causal(3, 20)
    got = reference.attend(*inputs, mask, SCALING, 0.7)
    assert_as_accurate_as(partial(formula, mask=mask, softcap=0.7), inputs, got.out)


def test_a_query_that_may_read_nothing_gets_zeros() -> None:
    inputs, mask = random_attention(3, 20), causal(3, 20)
    mask[1, 0, 2] = False
    got = reference.attend(*inputs, mask, SCALING, None)
    assert not got.out[1, 0, :, 2].any()
    assert (got.lse[1, 0, :, 2] == -torch.inf).all()
    assert got.out.isfinite().all()
    whole = reference.attend(*inputs, causal(3, 20), SCALING, None)
    assert torch.equal(got.out[:, 1], whole.out[:, 1])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_attend_pages_reads_the_runs_it_is_told(queries: int, masked: bool) -> None:
    """Runs anywhere, of any length; positions beyond `last` and masked ones are not read."""
    query, keys, values = random_attention(queries, 61)
    starts = torch.tensor([[[9, 40, 17, 53], [0, 0, 30, 57]], [[60, 1, 22, 8], [3, 12, 45, 56]]])
    lengths = torch.tensor([[[5, 8, 0, 8], [3, 0, 7, 2]], [[1, 6, 8, 0], [8, 8, 0, 5]]])
    last = torch.tensor([[55], [60]]) + torch.arange(queries)
    mask = torch.rand(BATCH, 1, queries, 61) < 0.7 if masked else None
    readable = torch.zeros(BATCH, HEADS, queries, 61, dtype=torch.bool)
    for b, h, q, run in torch.cartesian_prod(*map(torch.arange, (BATCH, HEADS, queries, 4))).tolist():
        for token in range(starts[b, h, run], starts[b, h, run] + lengths[b, h, run]):
            seen = token <= last[b, q] and (mask is None or mask[b, 0, q, token])
            readable[b, h, q, token] = bool(seen)
    assert readable.any(-1).all()
    reads = Reads(starts, lengths, 8, last, mask)
    got = reference.attend_pages(query, keys, values, reads, SCALING, None)
    assert_as_accurate_as(partial(formula, mask=readable), (query, keys, values), got.out)
    assert_as_accurate_as(lambda q, k, v: log_mass(q, k, readable), (query, keys, values), got.lse)


@settings(max_examples=30)
@given(st.lists(st.integers(2, 9), min_size=1, max_size=5), st.sampled_from((None, -2.0, 0.0, 3.0)), st.integers(0, 99))
def test_merged_parts_are_the_whole(sizes: list[int], sink: float | None, seed: int) -> None:
    torch.manual_seed(seed)
    inputs, mask = random_attention(2, sum(sizes)), causal(2, sum(sizes))
    query, keys, values = inputs
    pieces = zip(*(x.split(sizes, dim) for x, dim in ((keys, 2), (values, 2), (mask, 3))), strict=True)
    parts = [reference.attend(query, k, v, m, SCALING, None) for k, v, m in pieces]
    sinks = None if sink is None else torch.full((1, HEADS, GROUP, 1), sink)

    def whole(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The sink is one more token whose value is zero."""
        lse = log_mass(query, keys, mask)
        share = 1.0 if sink is None else torch.sigmoid(lse - sink)[..., None]
        return formula(query, keys, values, mask) * share

    assert_as_accurate_as(whole, inputs, reference.merge(parts, sinks))


def test_merge_of_nothing_is_zero() -> None:
    nothing = Partial(torch.zeros(1, 1, 1, 1, 4), torch.full((1, 1, 1, 1), -torch.inf))
    something = Partial(torch.ones(1, 1, 1, 1, 4), torch.zeros(1, 1, 1, 1))
    assert not reference.merge([nothing, nothing], None).any()
    assert torch.equal(reference.merge([nothing, something], None), something.out)


def bases(pages: int = 4, size: int = 8, rank: int = 2) -> tuple[Tensor, Tensor, PageBasis]:
    """Pages whose keys and values lie in a subspace that a basis of that rank holds, and those bases."""
    weights = torch.randn(BATCH, HEADS, pages, size, rank)
    keys = torch.randn(BATCH, HEADS, pages, 1, DIM) + weights @ torch.randn(BATCH, HEADS, pages, rank, DIM)
    values = torch.randn(BATCH, HEADS, pages, 1, VALUE_DIM) + weights @ torch.randn(
        BATCH, HEADS, pages, rank, VALUE_DIM
    )
    return keys, values, build_basis(keys, values, torch.ones(1, 1, 1, size, dtype=torch.bool), rank)


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_bases_are_exact_in_their_subspace(softcap: float | None) -> None:
    """Up to rounding: a coordinate of mu, B and C is off by half a step of its vector's largest entry."""
    keys, values, basis = bases()
    query = torch.randn(BATCH, HEADS, GROUP, 2, DIM)
    pages = torch.stack([torch.randperm(4)[:3] for _ in range(BATCH * HEADS)]).view(BATCH, HEADS, 3)
    got = reference.evaluate_bases(query, basis, pages, SCALING, softcap)
    steps = (INT8_STEP + 2 * INT4_STEP) * DIM**0.5  # of mu, B and C, in the norm over D
    logit_bound = SCALING * float(query.norm(dim=-1).max()) * float(keys.norm(dim=-1).max()) * steps
    for slot in range(3):
        at = pages[..., slot, None, None, None].expand(-1, -1, 1, *keys.shape[3:])
        page_keys = keys.gather(2, at).squeeze(2)
        page_values = values.gather(2, at[..., :VALUE_DIM]).squeeze(2)
        exact = reference.attend(query, page_keys, page_values, None, SCALING, softcap)
        assert (got.lse[..., slot] - exact.lse).abs().max() <= logit_bound
        spread = float((page_values - page_values.mean(2, keepdim=True)).norm(dim=-1).max())
        value_bound = spread * 2 * logit_bound + steps * float(page_values.norm(dim=-1).max())
        assert (got.out[..., slot, :] - exact.out).norm(dim=-1).max() <= value_bound


def test_a_short_page_counts_its_tokens_only() -> None:
    keys, values, _ = bases()
    mask = torch.arange(8) < torch.tensor([8, 3, 1, 0])[:, None]
    basis = build_basis(keys, values, mask, 2)
    query = torch.zeros(BATCH, HEADS, GROUP, 1, DIM)  # every token weighs the same: the log-mass counts tokens
    got = reference.evaluate_bases(query, basis, torch.arange(4).expand(BATCH, HEADS, 4), SCALING, None)
    counts = torch.tensor([8.0, 3.0, 1.0, 0.0]).log().expand_as(got.lse)
    torch.testing.assert_close(got.lse, counts)
    torch.testing.assert_close(reference.coarse_scores(query, basis, SCALING, None), counts)
    means = torch.stack([values[..., page, :n, :].mean(-2) for page, n in enumerate((8, 3, 1))], 2)
    bound = (INT8_STEP + 2 * INT4_STEP) * float(values.abs().max())
    assert (got.out[..., 0, :3, :] - means[:, :, None]).abs().max() <= bound
    assert not got.out[..., 3, :].any()


@pytest.mark.parametrize("softcap", [None, 0.7])
def test_coarse_scores_by_loop(softcap: float | None) -> None:
    keys, values, _ = bases()
    basis = build_basis(keys, values, torch.arange(8) < torch.tensor([8, 3, 1, 5])[:, None], 2)
    query = torch.randn(BATCH, HEADS, GROUP, 2, DIM)
    got = reference.coarse_scores(query, basis, SCALING, softcap)
    mu, radius = basis.coarse()
    assert got.shape == (BATCH, HEADS, GROUP, 2, 4)
    for b, h, g, i, p in torch.cartesian_prod(*map(torch.arange, got.shape)).tolist():
        q = query[b, h, g, i]
        logit = SCALING * (q @ mu[b, h, p] + q.abs() @ radius[b, h, p])
        capped = logit if softcap is None else softcap * (logit / softcap).tanh()
        torch.testing.assert_close(got[b, h, g, i, p], capped + basis.tokens[b, h, p].log())


def test_implementations_by_name() -> None:
    names = kernels.available(torch.device("cpu"))
    assert {"reference", kernels.resolve("auto", torch.device("cpu"))} <= {*names}
    for name in names:
        assert kernels.resolve(name, torch.device("cpu")) == name
        implementation = kernels.load(name)
        parts = ("coarse_scores", "evaluate_bases", "attend", "attend_pages", "merge")
        assert all(hasattr(implementation, part) for part in parts)
    with pytest.raises(ValueError, match=r"impl must be 'auto' or one of .*'reference'.*, got 'cuda'"):
        kernels.load("cuda")
