"""Implementations of the three tiers; all have the functions of `reference`, which is the specification."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from typing import Any, cast

import torch

from oval_core.kernels.api import Kernels, Partial, Reads

IMPLEMENTATIONS = {  # name: (package it needs, device it needs); "auto" is the last that runs
    "reference": ("torch", None),
    "flash": ("torch", "cuda"),  # with `flash_attn_interface` or `flash_attn` where one is installed
    "triton": ("triton", "cuda"),
    "cpu": ("numba", "cpu"),
}

__all__ = [
    "IMPLEMENTATIONS",
    "Kernels",
    "Partial",
    "Reads",
    "available",
    "check_implementation",
    "interpreted",
    "load",
    "resolve",
]


def available(device: torch.device | None = None) -> list[str]:
    """Names of the implementations that run here, on `device` if one is given; the last is the fastest."""
    return [
        name
        for name, (package, needs) in IMPLEMENTATIONS.items()
        if importlib.util.find_spec(package)
        and (device is None or needs in (None, device.type) or (name == "triton" and interpreted()))
    ]


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on any device: `TRITON_INTERPRET=1` set before triton is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def check_implementation(name: Any, device: torch.device | None = None) -> None:
    """Raise ValueError unless `name` is "auto" or an implementation that runs here."""
    if not isinstance(name, str):
        raise TypeError(f"impl must be 'auto' or one of {available(device)}, got {name!r} ({type(name).__name__})")
    names = available(device)
    if name != "auto" and name not in names:
        where = "here" if device is None else f"on {device.type}"
        raise ValueError(f"impl must be 'auto' or one of {names} (available {where}), got {name!r}")


def resolve(name: str, device: torch.device) -> str:
    """The implementation that `name` stands for on `device`: "auto" is the fastest there is."""
    check_implementation(name, device)
    return available(device)[-1] if name == "auto" else name


@cache
def load(name: str) -> Kernels:
    """Import the implementation `name`."""
    check_implementation(name)
    return cast(Kernels, importlib.import_module(f"oval_core.kernels.{name}"))
