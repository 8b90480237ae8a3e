"""The vision tower of an open_clip CLIP as transformers' `CLIPVisionModel`, the class that LLaVA is built on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from oval_mm.recipes.tiny_clip import CONFIG_FILE, load_clip

# open_clip's names and transformers', outside the layers and inside of one; weights and biases alike.
OUTSIDE = {
    "class_embedding": "embeddings.class_embedding",
    "positional_embedding": "embeddings.position_embedding.weight",
    "conv1": "embeddings.patch_embedding",
    "ln_pre": "pre_layrnorm",
    "ln_post": "post_layernorm",
}
INSIDE = {
    "ln_1": "layer_norm1",
    "ln_2": "layer_norm2",
    "attn.out_proj": "self_attn.out_proj",
    "mlp.c_fc": "mlp.fc1",
    "mlp.c_proj": "mlp.fc2",
}


def build_vision_tower(clip_folder: Path) -> CLIPVisionModel:
    """The vision tower of a CLIP saved by `save_clip`, float32, `eval`. Raises FileNotFoundError without one."""
    return convert_vision_tower(load_clip(clip_folder)[0].visual)


def build_image_processor(clip_folder: Path) -> CLIPImageProcessor:
    """Makes the pixels that this CLIP was trained on: shortest side resized, middle cut out, normalised."""
    found = json.loads((clip_folder / CONFIG_FILE).read_text())["preprocess_cfg"]
    size = found["size"]
    return CLIPImageProcessor(
        size={"shortest_edge": size},
        crop_size={"height": size, "width": size},
        image_mean=list(found["mean"]),
        image_std=list(found["std"]),
    )


def convert_vision_tower(tower: Any) -> CLIPVisionModel:
    """An `open_clip.transformer.VisionTransformer` as transformers' class, with the same features.

    Every hidden state is: class token first, then patches in rows. Only the map into the space shared with text is left
    out: times `tower.proj`, `pooler_output` is the image embedding of a CLIP that takes it, as usual, from that token.

    Raises:
        ValueError: an activation that transformers does not have, or an image or patch that is not square.
        RuntimeError: the tower has weights that `CLIPVisionModel` has no place for, or lacks some.
    """
    model = CLIPVisionModel(_config(tower))
    model.load_state_dict(_renamed(tower.state_dict()), strict=True)
    return model.to(tower.conv1.weight.dtype).eval()


def _config(tower: Any) -> CLIPVisionConfig:
    block = tower.transformer.resblocks[0]
    return CLIPVisionConfig(
        hidden_size=tower.conv1.out_channels,
        intermediate_size=block.mlp.c_fc.out_features,
        num_hidden_layers=len(tower.transformer.resblocks),
        num_attention_heads=block.attn.num_heads,
        image_size=_side("image", tower.image_size),
        patch_size=_side("patch", tower.patch_size),
        hidden_act=_activation(block.mlp.gelu),
        layer_norm_eps=tower.ln_post.eps,
        projection_dim=tower.output_dim,
    )


def _side(what: str, size: tuple[int, int]) -> int:
    height, width = size
    if height != width:
        raise ValueError(f"{what} must be square, got {height} x {width} pixels")
    return height


def _activation(module: nn.Module) -> str:
    from open_clip.transformer import QuickGELU

    if isinstance(module, QuickGELU):
        return "quick_gelu"
    if isinstance(module, nn.GELU) and module.approximate == "none":
        return "gelu"
    raise ValueError(f"activation must be GELU or QuickGELU, got {module}")


def _renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights under transformers' names; one it has no name for keeps its own, so that strict loading objects."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name.startswith("transformer.resblocks."):
            number, inner = name.removeprefix("transformer.resblocks.").split(".", 1)
            entries = _split(inner, tensor)
            renamed |= {f"encoder.layers.{number}.{new}": part for new, part in entries.items()}
        elif name != "proj":
            renamed[_replaced(name, OUTSIDE)] = tensor
    return renamed


def _split(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A layer's weight; what open_clip keeps for queries, keys and values together becomes three."""
    if not name.startswith("attn.in_proj_"):
        return {_replaced(name, INSIDE): tensor}
    kind = name.removeprefix("attn.in_proj_")
    return {f"self_attn.{letter}_proj.{kind}": part for letter, part in zip("qkv", tensor.chunk(3), strict=True)}


def _replaced(name: str, names: dict[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if name in names:
        return names[name]
    return f"{names.get(module, module)}.{kind}"
