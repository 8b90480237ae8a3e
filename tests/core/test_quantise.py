"""Rounding vectors to 8 and 4 bits, and packing two numbers in a byte."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oval_core.quantise import int4, int8, packed_size, uint4, unpack_int4, unpack_uint4
from tests.tolerance import INT4_STEP, INT8_STEP, UINT4_STEP


@given(st.integers(1, 9), st.integers(0, 10_000))
def test_packed_numbers_come_back(n: int, seed: int) -> None:
    x = torch.randn(3, 2, n, generator=torch.Generator().manual_seed(seed))
    for quantise, unpack, vectors in ((int4, unpack_int4, x), (uint4, unpack_uint4, x.abs())):
        stored, scale, meant = quantise(vectors)
        assert (stored.dtype, stored.shape) == (torch.uint8, (3, 2, packed_size(n)))
        assert torch.equal(unpack(stored, n) * scale[..., None], meant)


def test_numbers_of_both_halves_of_a_byte() -> None:
    assert unpack_int4(torch.tensor([0x7F, 0x08, 0x93], dtype=torch.uint8), 5).tolist() == [-1, -8, 3, 7, 0]
    assert unpack_uint4(torch.tensor([0xF0, 0x08], dtype=torch.uint8), 4).tolist() == [0, 8, 15, 0]


@pytest.mark.parametrize(("quantise", "step"), [(int8, INT8_STEP), (int4, INT4_STEP), (uint4, UINT4_STEP)])
def test_rounding_errs_by_half_a_step_at_most(quantise, step) -> None:  # type: ignore[no-untyped-def]
    x = torch.randn(50, 33)
    x = x.abs() if quantise is uint4 else x
    meant = quantise(x)[2]
    assert ((meant - x).abs() <= step * x.abs().amax(-1, keepdim=True) * 1.0001).all()
    assert (meant - x).abs().max() >= 0.5 * step * x.abs().max()  # it does round


@pytest.mark.parametrize("quantise", [int8, int4, uint4])
def test_vectors_of_zeros_stay_zeros(quantise) -> None:  # type: ignore[no-untyped-def]
    assert not any(part.any() for part in quantise(torch.zeros(2, 5)))
