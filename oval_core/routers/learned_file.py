"""Trained modules in safetensors files that are read strictly: what is not as expected is named."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from oval_core.model_shape import head_dim_of
from oval_core.tensor_file import read_tensors, require_tensors

FORMAT = "oval learned router 1"


@dataclass(frozen=True)
class ModelSizes:
    """Layers L, KV heads H, query heads per KV head G, hidden size and head dimension D of a model.

    Raises:
        ValueError: one is no integer of at least 1.
    """

    layers: int
    heads: int
    group: int
    hidden_size: int
    head_dim: int

    def __post_init__(self) -> None:
        wrong = {name: size for name, size in asdict(self).items() if type(size) is not int or size < 1}
        if wrong:
            raise ValueError(f"sizes of a model must be integers of at least 1, got {wrong}")

    @staticmethod
    def of(model: Any) -> ModelSizes:
        """Of the decoder of a transformers model."""
        config = model.config.get_text_config(decoder=True)
        queries = config.num_attention_heads
        heads = getattr(config, "num_key_value_heads", None) or queries
        return ModelSizes(config.num_hidden_layers, heads, queries // heads, config.hidden_size, head_dim_of(config))


class LearnedModule(nn.Module):
    """Something trained for models of one shape, float32.

    Attributes:
        kind: what its files are called.
        sizes: of the models that it is for.
        options: its other settings, as its constructor takes them: numbers and booleans.
    """

    kind = "learned module"

    def __init__(self, sizes: ModelSizes, **options: Any) -> None:
        super().__init__()
        self.sizes, self.options = sizes, options

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(self.parameters()).device

    def require_model(self, model: Any) -> None:
        """Raise ValueError, saying what was expected and what came, unless this is for models like `model`."""
        found = ModelSizes.of(model)
        if found != self.sizes:
            raise ValueError(f"the {self.kind} is for another model: expected {self.sizes}, got {found}")


Module = TypeVar("Module", bound=LearnedModule)


def save_learned(path: Path, module: LearnedModule) -> None:
    """Write a module's parameters and buffers, float32."""
    from safetensors.torch import save_file

    about = {"sizes": asdict(module.sizes), "options": module.options}
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in module.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path, {"format": FORMAT, "kind": module.kind, "about": json.dumps(about)})


def load_learned(path: Path, kind: type[Module]) -> Module:
    """What `save_learned` wrote, on the CPU, in eval mode and without gradients.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is another file, or its kind, a size, a tensor's name, shape or dtype is not as expected.
    """
    tensors, about = _read(path, kind)
    try:
        module = kind(ModelSizes(**about["sizes"]), **about["options"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: expected sizes and options of: {kind.kind}, got {about} ({error})") from None
    shapes = {name: [*tensor.shape] for name, tensor in module.state_dict().items()}
    require_tensors(path, tensors, torch.float32, shapes)
    module.load_state_dict(tensors)
    return module.eval().requires_grad_(False)


def kind_of(path: Path) -> str:
    """The kind of module that a file holds. Raises as `load_learned` does."""
    metadata, _ = read_tensors(path, "a learned router")
    return metadata.get("kind", "")


def _read(path: Path, kind: type[LearnedModule]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    metadata, tensors = read_tensors(path, f"a {kind.kind}")
    expected, got = (FORMAT, kind.kind), (metadata.get("format"), metadata.get("kind"))
    if got != expected:
        raise ValueError(f"{path}: expected metadata format and kind {expected}, got {got}")
    try:
        about = json.loads(metadata["about"])
    except (KeyError, ValueError):
        raise ValueError(f"{path}: metadata about cannot be read, got {metadata.get('about')!r}") from None
    if not isinstance(about, dict):
        raise ValueError(f"{path}: expected metadata about to be a JSON object, got {about!r}")
    return tensors, about
