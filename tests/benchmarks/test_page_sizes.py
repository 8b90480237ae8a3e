"""KL at equal bytes."""

from __future__ import annotations

import pytest

from benchmarks.page_sizes import kl_at


def test_kl_is_interpolated_between_budgets() -> None:
    """A power law is a line of logarithms."""
    curve = [(0.4, 0.01 / 0.4), (0.1, 0.01 / 0.1), (0.2, 0.01 / 0.2)]
    assert kl_at(0.3, curve) == pytest.approx(0.01 / 0.3)
    assert kl_at(0.2, curve) == pytest.approx(0.01 / 0.2)
    assert kl_at(0.05, curve) is None
    assert kl_at(0.5, curve) is None
