"""Page bases: what they keep of a page, how well, and that masked tokens leave no trace."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oval_core.basis import PageBasis, build_basis, leading_directions
from oval_core.kernels import reference
from tests.tolerance import INT4_STEP, INT8_STEP, UINT4_STEP

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CAPTURED = 1e-3  # share of the energy that six subspace iterations may lose: a gap of 4 shrinks the error by 4^13


class Dequantised(NamedTuple):
    mu: Tensor  # [..., D]
    radius: Tensor  # [..., D]
    b: Tensor  # [..., r, D]
    c: Tensor  # [..., S, r]
    w: Tensor  # [..., r, D_v]
    v0: Tensor  # [..., D_v]


def dequantise(basis: PageBasis) -> Dequantised:
    b, c, w, v0 = basis.approximation()
    return Dequantised(*basis.coarse(), b, c.mT, w, v0)


def everything(size: int = 16) -> Tensor:
    return torch.ones(1, 1, 1, size, dtype=torch.bool)


def random_page(
    *, batch: int = 2, heads: int = 3, pages: int = 5, size: int = 16, dim: int = 12
) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, pages, size, dim) + 2, torch.randn(batch, heads, pages, size, dim - 4) - 1


def assert_finite(basis: PageBasis) -> None:
    for name, tensor in basis.tensors().items():
        assert tensor.isfinite().all(), name


def assert_equal(left: PageBasis, right: PageBasis) -> None:
    for name, tensor in left.tensors().items():
        assert torch.equal(tensor, getattr(right, name)), name


def test_shapes_and_types() -> None:
    basis = build_basis(*random_page(), everything(), rank=4)
    shapes = {name: tuple(tensor.shape[3:]) for name, tensor in basis.tensors().items()}
    assert {tuple(tensor.shape[:3]) for tensor in basis.tensors().values()} == {(2, 3, 5)}
    assert shapes == {
        "centroid": (12,), "centroid_scale": (), "radius": (6,), "radius_scale": (),
        "directions": (4, 6), "directions_scale": (4,), "coefficients": (4, 8), "coefficients_scale": (4,),
        "regression": (4, 4), "regression_scale": (4,), "value_offset": (8,), "value_offset_scale": (),
        "key_error": (), "value_error": (), "value_norm": (), "tokens": (),
    }  # fmt: skip
    kinds = {name: tensor.dtype for name, tensor in basis.tensors().items()}
    assert {name for name, dtype in kinds.items() if dtype == torch.int8} == {"centroid", "value_offset"}
    packed = {"radius", "directions", "coefficients", "regression"}
    assert {name for name, dtype in kinds.items() if dtype == torch.uint8} == packed
    assert (basis.tokens == 16).all()


def captured(page: Tensor, directions: Tensor) -> Tensor:
    return (page @ directions.mT).square().sum((-2, -1))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 12), st.integers(1, 8), st.floats(0, 0.25))
def test_directions_above_a_gap_are_those_of_an_svd(seed: int, size: int, dim: int, rank: int, gap: float) -> None:
    """A gap in the spectrum behind the `rank`-th singular value (or no value left there: a low-rank page)."""
    noise = torch.randn(size, dim, generator=torch.Generator().manual_seed(seed))
    left, singular, right = torch.linalg.svd(noise, full_matrices=False)
    singular[rank:] *= gap * singular[rank - 1] / singular[0] if len(singular) > rank else 1
    page = left @ singular.diag() @ right
    directions = leading_directions(page, rank)
    assert captured(page, directions) >= (1 - CAPTURED) * singular[:rank].square().sum()
    assert_orthonormal_or_zero(directions)


@pytest.mark.parametrize(("decay", "lost"), [(1.0, 0.03), (0.8, 0.003), (0.5, 1e-4)])
def test_directions_without_a_gap_lose_little(decay: float, lost: float) -> None:
    """Six iterations cannot separate equal singular values; measured at page size 16, rank 4: 2.2 %, 0.15 %, 0."""
    pages = torch.randn(500, 16, 64) * decay ** torch.arange(64)
    best = torch.linalg.svdvals(pages)[:, :4].square().sum(-1)
    assert 1 - (captured(pages, leading_directions(pages, 4)) / best).mean() <= lost


def assert_orthonormal_or_zero(rows: Tensor) -> None:
    gram = rows @ rows.mT
    assert (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1).round())).abs().max() <= 1e-5


def test_directions_find_what_the_starting_mixtures_miss() -> None:
    """The start is r cosines over the tokens; a page made of other cosines is orthogonal to it up to rounding."""
    token = torch.arange(16) + 0.5
    waves = torch.cos(torch.pi / 16 * torch.arange(9, 13)[:, None] * token)  # [4, S]
    page = waves.mT @ torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])) @ torch.eye(4, 12)
    directions = leading_directions(page, 4)
    torch.testing.assert_close(page @ directions.mT @ directions, page, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tokens", "rank"), [(1, 4), (2, 4), (3, 8), (16, 20)])
def test_a_rank_above_the_tokens_fills_up_with_zeros(tokens: int, rank: int) -> None:
    keys, values = random_page(dim=24)
    basis = build_basis(keys, values, torch.arange(16) < tokens, rank)
    assert_finite(basis)
    independent = (basis.directions_scale > 0).sum(-1)
    assert (independent <= tokens).all()  # not tokens - 1: the int8 centroid is off the mean by its rounding
    part = dequantise(basis)
    assert ((part.b == 0).all(-1) == (basis.directions_scale == 0)).all()


def turned(keys: Tensor, base: float) -> Tensor:
    """Keys `[..., S, D]` with a rotary position embedding."""
    size, dim = keys.shape[-2:]
    angle = torch.arange(size)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = (torch.cat([wave] * 2, -1) for wave in (angle.cos(), angle.sin()))
    return keys * cos + torch.cat([-keys[..., dim // 2 :], keys[..., : dim // 2]], -1) * sin


@pytest.mark.parametrize(("dim", "size", "base"), [(16, 16, 5e5), (64, 8, 1e4), (64, 8, 5e5), (128, 8, 1e4)])
def test_a_token_that_is_repeated(dim: int, size: int, base: float) -> None:
    """Its keys differ by their rotation alone, so that the spectrum of a page falls fast."""
    page = turned(torch.randn(1, 1, 400, 1, dim).expand(-1, -1, -1, size, -1), base)
    centred = page - page.mean(-2, keepdim=True)
    assert_orthonormal_or_zero(leading_directions(centred, 8))
    basis = build_basis(page, page, None, 8)
    directions, mixtures, _, _ = basis.approximation()
    missed = basis.coarse()[0][..., None, :] + mixtures.mT @ directions - page
    share = missed.square().sum((-1, -2)) / centred.square().sum((-1, -2))
    assert share.max() < 0.1


@pytest.mark.parametrize(("size", "rank"), [(16, 48), (16, 64), (64, 24), (64, 64)])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 1e-3])
def test_many_directions_of_keys_that_are_alike(size: int, rank: int, spread: float) -> None:
    page = torch.randn(1, 1, 40, 1, 64) + spread * torch.randn(1, 1, 40, size, 64)
    assert_orthonormal_or_zero(leading_directions(page - page.mean(-2, keepdim=True), rank))
    basis = build_basis(page, page, None, rank)
    for part in (*basis.coarse(), *basis.approximation()):
        assert part.isfinite().all()


def test_a_page_without_variance_is_its_centroid() -> None:
    keys, values = (x[..., :1, :].expand(x.shape) for x in random_page())
    basis = build_basis(keys, values, everything(), 4)
    part = dequantise(basis)
    largest = keys.abs().amax((-2, -1))
    assert_finite(basis)
    assert ((part.mu - keys[..., 0, :]).abs().amax(-1) <= INT8_STEP * largest + 1e-6).all()
    assert (basis.key_error <= 2 * INT8_STEP * largest).all()
    torch.testing.assert_close(part.v0, values[..., 0, :], rtol=0, atol=INT8_STEP * float(values.abs().max()) + 1e-6)


def test_a_page_of_zeros_and_an_empty_page() -> None:
    keys, values = random_page()
    for basis in (build_basis(keys * 0, values * 0, everything(), 4), build_basis(keys, values, ~everything(), 4)):
        assert_finite(basis)
        assert not any(tensor.any() for name, tensor in basis.tensors().items() if name != "tokens")


@pytest.mark.parametrize("poison", [1e4, torch.inf, -torch.inf, torch.nan])
def test_masked_tokens_leave_no_trace(poison: float) -> None:
    keys, values = random_page()
    mask = torch.rand(2, 1, 5, 16) < 0.6
    mask[0, 0, 0] = False
    hidden = ~mask[..., None]
    poisoned = build_basis(keys.masked_fill(hidden, poison), values.masked_fill(hidden, poison), mask, 4)
    assert_equal(poisoned, build_basis(keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0), mask, 4))
    assert torch.equal(poisoned.tokens[:, 0], mask.sum(-1)[:, 0].int())


def test_a_masked_page_is_the_page_of_its_real_tokens() -> None:
    """Real tokens move to the front in order: their coefficients are those of the shorter page."""
    keys, values = random_page()
    mask = torch.arange(16) % 2 == 1
    whole = build_basis(keys, values, mask, 2)
    half = build_basis(keys[..., mask, :], values[..., mask, :], everything(8), 2)
    assert not dequantise(whole).c[..., 8:, :].any()
    for name in ("mu", "radius"):
        torch.testing.assert_close(getattr(dequantise(whole), name), getattr(dequantise(half), name))
    # the iteration starts from other mixtures: the directions agree in how much they capture
    torch.testing.assert_close(whole.key_error.mean(), half.key_error.mean(), rtol=0.05, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_low_precision_pages_are_finite(dtype: torch.dtype, scale: float) -> None:
    keys, values = ((scale * x).to(dtype) for x in random_page())
    basis = build_basis(keys, values, everything(), 4)
    assert_finite(basis)
    assert_equal(basis, build_basis(keys.float(), values.float(), everything(), 4))


@pytest.mark.parametrize(("name", "step"), [("mu", INT8_STEP), ("radius", UINT4_STEP)])
def test_rounding_is_to_half_a_step(name: str, step: float) -> None:
    keys, values = random_page()
    part = dequantise(build_basis(keys, values, everything(), 4))
    exact = {"mu": keys.mean(-2), "radius": (keys - part.mu[..., None, :]).abs().mean(-2)}[name]
    bound = step * exact.abs().amax(-1, keepdim=True) * (1 + 1e-4)
    assert ((getattr(part, name) - exact).abs() <= bound).all()


def test_each_part_is_built_from_the_dequantised_ones_before() -> None:
    keys, values = random_page()
    basis = build_basis(keys, values, everything(), 4)
    part = dequantise(basis)
    deviation = keys - part.mu[..., None, :]
    coefficients = deviation @ part.b.mT
    assert ((part.c - coefficients).abs() <= INT4_STEP * coefficients.abs().amax(-2, keepdim=True) * 1.0001).all()
    centred, spread = part.c - part.c.mean(-2, keepdim=True), values - values.mean(-2, keepdim=True)
    gram = centred.mT @ centred
    ridge = 1e-3 / 4 * gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    w = torch.linalg.solve(gram + ridge[..., None, None] * torch.eye(4), centred.mT @ spread)
    torch.testing.assert_close(part.w, w, rtol=0, atol=INT4_STEP * float(w.abs().max()) * 1.01)
    v0 = values.mean(-2) - (part.c.mean(-2, keepdim=True) @ part.w).squeeze(-2)
    torch.testing.assert_close(part.v0, v0, rtol=0, atol=INT8_STEP * float(v0.abs().max()) * 1.01)


def test_errors_and_norms_are_those_of_what_is_stored() -> None:
    keys, values = random_page()
    basis = build_basis(keys, values, everything(), 4)
    part = dequantise(basis)
    rho_k = (keys - part.mu[..., None, :] - part.c @ part.b).norm(dim=-1).mean(-1)
    rho_v = (values - part.v0[..., None, :] - part.c @ part.w).norm(dim=-1).mean(-1)
    torch.testing.assert_close(basis.key_error, rho_k)
    torch.testing.assert_close(basis.value_error, rho_v)
    torch.testing.assert_close(basis.value_norm, values.norm(dim=-1).sum(-1))


def test_the_value_estimate_needs_no_values() -> None:
    """`v0 + weights C W` equals the weighted sum of the approximated values, whatever the weights are."""
    basis = build_basis(*random_page(), everything(), 4)
    part = dequantise(basis)
    query = torch.randn(2, 3, 2, 1, 12)
    estimate = reference.evaluate_bases(query, basis, torch.arange(5).expand(2, 3, 5), 0.3, None)
    approximate_keys = part.mu[..., None, :] + part.c @ part.b  # [B, H, P, S, D]
    approximate_values = part.v0[..., None, :] + part.c @ part.w
    logits = 0.3 * torch.einsum("bhgqd,bhpsd->bhgqps", query, approximate_keys)
    out = torch.einsum("bhgqps,bhpsv->bhgqpv", logits.softmax(-1), approximate_values)
    torch.testing.assert_close(estimate.lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(estimate.out, out, rtol=1e-5, atol=1e-5)


def test_bases_are_small() -> None:
    keys, values = torch.randn(1, 2, 10, 16, 64), torch.randn(1, 2, 10, 16, 64)
    basis = build_basis(keys, values, everything(), 4)
    assert basis.resident_bytes <= 0.12 * (keys.nbytes + values.nbytes)
    assert basis.resident_bytes == 2 * 10 * (basis.coarse_bytes + basis.basis_bytes)
    assert basis.coarse_bytes == 64 + 4 + 32 + 4 + 4


def test_pages_move_without_changing() -> None:
    built = build_basis(*random_page(), everything(), 4)
    basis = PageBasis.empty(2, 3, 16, 4, (12, 8), torch.device("cpu"))
    assert (basis.capacity_pages, basis.resident_bytes) == (0, 0)
    basis = basis.grown(9)
    assert not any(tensor.any() for tensor in basis.tensors().values())
    basis.write(slice(None), 2, built)
    assert basis.capacity_pages == 9
    assert_equal(basis.narrow(7).gather(torch.arange(2, 7).expand(2, 3, 5)), built)
    assert basis.narrow(7).centroid.data_ptr() == basis.centroid.data_ptr()
    assert_equal(basis.grown(12).narrow(9), basis)
    swapped = basis.select_rows(torch.tensor([1, 0, 1]))
    for row, source in enumerate((1, 0, 1)):
        assert torch.equal(swapped.regression[row], basis.regression[source])


def test_one_row_is_written_alone() -> None:
    built = build_basis(*random_page(batch=1), everything(), 4)
    basis = PageBasis.empty(2, 3, 16, 4, (12, 8), torch.device("cpu")).grown(6)
    basis.write(slice(1, 2), 1, built)
    assert not basis.tokens[0].any()
    assert (basis.tokens[1, :, 1:] == 16).all()
    assert not basis.tokens[1, :, 0].any()


def test_gather_may_differ_by_head() -> None:
    basis = build_basis(*random_page(), everything(), 4)
    pages = torch.randint(5, (2, 3, 4))
    picked = basis.gather(pages)
    for row, head, slot in torch.cartesian_prod(*map(torch.arange, (2, 3, 4))).tolist():
        page = int(pages[row, head, slot])
        assert torch.equal(picked.coefficients[row, head, slot], basis.coefficients[row, head, page])


def test_rank_0_keeps_the_coarse_part_alone() -> None:
    keys, values = random_page()
    coarse, whole = build_basis(keys, values, None, 0), build_basis(keys, values, None, 3)
    for name in ("centroid", "centroid_scale", "radius", "radius_scale", "tokens", "value_norm"):
        assert torch.equal(getattr(coarse, name), getattr(whole, name)), name
    room = PageBasis.empty(2, 3, 16, 0, (12, 8), torch.device("cpu")).grown(5)
    room.write(slice(None), 0, coarse)
    assert torch.equal(room.centroid, whole.centroid)
    assert room.directions.numel() == room.coefficients.numel() == room.value_offset.numel() == 0


def test_no_mask_means_every_token() -> None:
    keys, values = random_page()
    assert_equal(build_basis(keys, values, None, 3), build_basis(keys, values, everything(), 3))
