"""Fixtures of the core tests."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils import deterministic

from oval_core import page_store


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that `torch.empty` and its kin hand out holds NaN (integers: their maximum)."""
    monkeypatch.setattr(deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(8).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def little_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The storage grows often."""
    monkeypatch.setattr(page_store, "SPARE_TOKENS", 3)
