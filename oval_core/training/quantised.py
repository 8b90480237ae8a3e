"""Quantised copies of a model: what an input repair learns on."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn

INT8_DYNAMIC, INT4_WEIGHTS = KINDS = ("int8-dynamic", "int4-weights")
GROUP_SIZE = 32  # weights that share a scale


def quantised(model: Any, kind: str) -> Any:
    """A copy of `model`, its output head left as it is.

    Args:
        model: float32, in eval mode; stays as it is.
        kind: "int8-dynamic": torch's dynamic quantisation, 8-bit weights and activations, on a CPU; "int4-weights":
            weights rounded to the nearest of 16 levels, each group of 32 with its own scale, and computed with as
            floats.

    Raises:
        ValueError: no such kind, or one that this torch, this machine or the model's device does not have.
    """
    if kind not in KINDS:
        raise ValueError(f"a model is quantised as one of {KINDS}, got {kind!r}")
    head = model.get_output_embeddings()
    names = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head]
    if kind == INT8_DYNAMIC:
        return _dynamic(model, names)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name in names:
            weight = other.get_submodule(name).weight
            weight.copy_(rounded(weight))
    return other


def rounded(weight: Tensor) -> Tensor:
    """Weights `[out, in]` rounded to multiples of their group's scale, -8 to 7 of them."""
    padding = -weight.shape[-1] % GROUP_SIZE
    groups = nn.functional.pad(weight, (0, padding)).unflatten(-1, (-1, GROUP_SIZE))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny) / 7
    return ((groups / scale).round().clamp(-8, 7) * scale).flatten(-2)[..., : weight.shape[-1]]


def _dynamic(model: Any, names: list[str]) -> Any:
    quantize = getattr(getattr(torch.ao, "quantization", None), "quantize_dynamic", None)
    engines = {*torch.backends.quantized.supported_engines} - {"none"}
    if quantize is None or not engines or model.device.type != "cpu":
        raise ValueError(
            f"{INT8_DYNAMIC} needs torch.ao.quantization.quantize_dynamic, an engine for it and a model on a CPU, "
            f"got engines {sorted(engines)} and {model.device}: take {INT4_WEIGHTS}"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces that this will move to another package
        how = torch.ao.quantization.default_dynamic_qconfig
        return quantize(model, dict.fromkeys(names, how), dtype=torch.qint8)
