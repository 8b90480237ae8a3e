"""Implementations of the three tiers; all have the functions of `reference`, which is the specification."""

from __future__ import annotations

import importlib
from typing import Any, cast

import torch

from oval_core.kernels.api import Kernels, Partial

IMPLEMENTATIONS = ("reference",)

__all__ = ["IMPLEMENTATIONS", "Kernels", "Partial", "check_implementation", "load"]


def check_implementation(name: Any) -> None:
    """Raise ValueError unless `name` is "auto" or an implementation of this installation."""
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be 'auto' or one of {IMPLEMENTATIONS} (available here), got {name!r}")


def resolve(name: str, device: torch.device) -> str:
    """The implementation that "auto" stands for on `device`; other names stand for themselves."""
    del device  # one implementation so far, and it runs everywhere
    return "reference" if name == "auto" else name


def load(name: str) -> Kernels:
    """Import the implementation `name`."""
    check_implementation(name)
    return cast(Kernels, importlib.import_module(f"oval_core.kernels.{name}"))
