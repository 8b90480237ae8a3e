"""Without Triton and FlashAttention: everything imports, what is missing is said, and stats name what serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from oval_core import OvalConfig, attach, kernels
from tests.core import flash_packages, tiny_models

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).parents[2]
OPTIONAL = ("triton", "flash_attn", "flash_attn_interface")


def test_the_packages_import_without_them() -> None:
    program = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL!r}))  # None: not importable
import oval_core, oval_mm, oval_spec
from oval_core import kernels
for name in kernels.available():
    kernels.load(name)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def _nothing_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    flash_packages.install(monkeypatch)
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.usefixtures("_nothing_optional")
def test_a_missing_implementation_is_named_with_those_there_are() -> None:
    assert kernels.available(CUDA) == ["reference", "flash"]
    with pytest.raises(ValueError, match=r"one of \['reference', 'flash'\] \(available on cuda\), got 'triton'"):
        kernels.resolve("triton", CUDA)
    with pytest.raises(ValueError, match=r"one of \['reference'.*\] \(available here\), got 'triton'"):
        OvalConfig(impl="triton")
    for name in ("triton", "flash"):
        with pytest.raises(ValueError, match=rf"one of \['reference'.*\] \(available on cpu\), got '{name}'"):
            kernels.resolve(name, CPU)


def test_an_implementation_of_another_device_is_refused_before_the_model_is_changed() -> None:
    model = tiny_models.llama()
    with pytest.raises(ValueError, match=r"one of \['reference'.*\] \(available on cpu\), got 'flash'"):
        attach(model, OvalConfig(impl="flash"))
    assert model.config._attn_implementation == "sdpa"


def test_what_auto_stands_for_is_decided_once_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[tuple[str, torch.device]] = []

    def resolve(name: str, device: torch.device) -> str:
        resolved.append((name, device))
        return "reference"

    monkeypatch.setattr(kernels, "resolve", resolve)
    with attach(tiny_models.llama()) as handle, torch.no_grad():
        tiny_models.generate(handle.model, tiny_models.prompt(20))
        tiny_models.generate(handle.model, tiny_models.prompt(20))
        assert handle.stats()["impl"] == handle.impl == "reference"
    assert resolved == [("auto", CPU)]
