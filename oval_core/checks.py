"""Refuse numbers that cannot be meant, with errors that name what was expected and what came."""

from __future__ import annotations

import math
from typing import Any


def check_count(name: str, value: Any, least: int = 1) -> int:
    """`value`, if it is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer >= {least}, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name} must be an integer >= {least}, got {value}")
    return value


def check_share(name: str, value: Any) -> float:
    """`value`, if it is a number in [0, 1]."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number in [0, 1], got {value!r} ({type(value).__name__})")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value}")
    return float(value)


def check_positive(name: str, value: Any) -> float:
    """`value`, if it is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number > 0, got {value!r} ({type(value).__name__})")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, got {value}")
    return float(value)
