"""How close is close enough: measured, not guessed.

A computation in low precision may err as much as the plain formula errs in that precision, times `SLACK` for another
order of summation. Both errors are measured against the formula in float64, on the inputs of the test at hand, so a
bound never has to be chosen by hand and never outgrows what the hardware really does.
"""

from collections.abc import Callable

import torch
from torch import Tensor

SLACK = 4.0
DENSE = 1e-5  # float32, budget >= context equals dense
# Rounding to 8 or 4 bits moves an entry by at most this share of the vector's largest entry.
INT8_STEP, INT4_STEP, UINT4_STEP = 0.5 / 127, 0.5 / 7, 0.5 / 15


def assert_as_accurate_as(formula: Callable[..., Tensor], inputs: tuple[Tensor, ...], got: Tensor) -> None:
    """`got` errs no more than `formula(*inputs)` does in the precision of `inputs`, up to `SLACK`."""
    exact = formula(*(x.double() for x in inputs))
    plain = (formula(*inputs).double() - exact).abs().max()
    rounding = torch.finfo(got.dtype).eps * exact.abs().max()
    error, bound = (got.double() - exact).abs().max().item(), SLACK * (plain + rounding).item()
    assert error <= bound, f"largest error {error:.3g}, the plain formula allows {bound:.3g}"


def assert_dense(got: Tensor, expected: Tensor) -> None:
    """Equal within `DENSE`."""
    torch.testing.assert_close(got, expected, rtol=DENSE, atol=DENSE)
