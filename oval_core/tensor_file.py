"""Safetensors files that are read strictly: what is not as expected is named."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor


def read_tensors(path: Path, what: str, without: Container[str] = ()) -> tuple[Mapping[str, str], dict[str, Tensor]]:
    """Metadata and tensors, but those named in `without`, of a file that should hold `what`, on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"expected {what} in {path}, got no file")
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name not in without]  # noqa: SIM118
            return file.metadata() or {}, {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path}: expected {what}, got no safetensors file ({error})") from None


def require_tensors(
    path: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype, shapes: Mapping[str, Sequence[int]]
) -> None:
    """Raise ValueError, naming the first difference, unless these are the tensors of `path`."""
    expected = {name: (dtype, [*shape]) for name, shape in shapes.items()}
    found = {name: (tensor.dtype, [*tensor.shape]) for name, tensor in tensors.items()}
    for name in sorted({*expected, *found}):
        if expected.get(name) != found.get(name):
            raise ValueError(f"{path}: expected tensor {name} to be {expected.get(name)}, got {found.get(name)}")
