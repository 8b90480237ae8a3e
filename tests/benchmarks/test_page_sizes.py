"""KL at equal bytes."""

from __future__ import annotations

import pytest

from benchmarks import page_sizes
from benchmarks.page_sizes import kl_at
from oval_core.page_sizing import ByScore, SelfSizedPages


def test_kl_is_interpolated_between_budgets() -> None:
    """A power law is a line of logarithms."""
    curve = [(0.4, 0.01 / 0.4), (0.1, 0.01 / 0.1), (0.2, 0.01 / 0.2)]
    assert kl_at(0.3, curve) == pytest.approx(0.01 / 0.3)
    assert kl_at(0.2, curve) == pytest.approx(0.01 / 0.2)
    assert kl_at(0.05, curve) is None
    assert kl_at(0.5, curve) is None


def test_each_score_comes_in_each_sharpness() -> None:
    kinds = page_sizes._kinds(page_sizes._parse(["--fixed", "16", "--sharpness", "0.5", "1", "--mean-tokens", "12"]))
    assert {name: kind[:2] for name, kind in kinds.items()} == {
        "16 tokens": (16, 16),
        "spread, sharpness 0.5": (32, 12),
        "spread, sharpness 1": (32, 12),
        "entropy, sharpness 0.5": (32, 12),
        "entropy, sharpness 1": (32, 12),
    }
    assert kinds["entropy, sharpness 1"][2] == SelfSizedPages(ByScore("entropy", 1.0), 12)
