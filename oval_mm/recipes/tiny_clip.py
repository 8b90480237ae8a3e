"""A CLIP of 1.5 M parameters: open_clip's own class, small sizes, and a tokenizer of whole words.

A folder made by `save_clip` is read by open_clip itself, offline, as `local-dir:DIR`. Without the package
`open_clip_torch`, what needs it raises ImportError.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from oval_core.training.state import write_whole
from oval_mm.recipes.clip_captions import CAPTION_WORDS

IMAGE_MEAN = IMAGE_STD = (0.5, 0.5, 0.5)  # of pixels in [0, 1]
CONTEXT = 50  # tokens: six objects with a glyph each are 47 words, and there are a begin and an end
SPECIAL_TOKENS = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CONFIG_FILE, WEIGHTS_FILE = "open_clip_config.json", "open_clip_model.safetensors"


@dataclass(frozen=True)
class ClipSizes:
    """Sizes of both towers; the defaults are those of the model that this project ships.

    Raises:
        ValueError: patches do not fill the image, or heads do not fill the width.
    """

    image_px: int = 256
    patch_px: int = 16
    width: int = 128
    layers: int = 4
    head_dim: int = 64
    joint_dim: int = 128
    text_width: int = 128
    text_layers: int = 3
    text_heads: int = 2

    def __post_init__(self) -> None:
        for whole, part in (("image_px", "patch_px"), ("width", "head_dim"), ("text_width", "text_heads")):
            size, divisor = getattr(self, whole), getattr(self, part)
            if size < 1 or divisor < 1 or size % divisor:
                raise ValueError(f"{whole} must be a multiple of {part}, got {whole}={size} and {part}={divisor}")

    @property
    def side(self) -> int:
        """Patches along one side of an image."""
        return self.image_px // self.patch_px

    @property
    def image_tokens(self) -> int:
        """Patches of an image, the class token not counted."""
        return self.side**2


SHIPPED = ClipSizes()


def build_clip(sizes: ClipSizes) -> Any:
    """An `open_clip.CLIP` with random weights, float32."""
    return _package().CLIP(**_model_config(sizes))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of CAPTION_WORDS, lower case, between <bos> and <eos>."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS.values(), *CAPTION_WORDS))}
    begin, end = SPECIAL_TOKENS["bos_token"], SPECIAL_TOKENS["eos_token"]
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=CONTEXT, **SPECIAL_TOKENS)


def save_clip(model: Any, sizes: ClipSizes, folder: Path) -> None:
    """Write a CLIP made by `build_clip(sizes)` in open_clip's local format, weights in float16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to("cpu", torch.float16).contiguous() for name, tensor in model.state_dict().items()}
    config = {"model_cfg": _model_config(sizes), "preprocess_cfg": _preprocess_config(sizes)}
    make_tokenizer().save_pretrained(folder)
    write_whole(folder / CONFIG_FILE, lambda path: path.write_text(json.dumps(config, indent=2) + "\n"))
    write_whole(folder / WEIGHTS_FILE, lambda path: save_file(weights, path))


def load_clip(folder: Path) -> tuple[Any, Any, Any]:
    """The CLIP of a folder (float32, `eval`), the transform from PIL images to its pixels, and its tokenizer.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
    """
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} must hold a CLIP in open_clip's format, but has no {name}")
    open_clip = _package()
    model, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{folder}")
    return model.eval(), preprocess, open_clip.get_tokenizer(f"local-dir:{folder}")


def as_bytes(images: Sequence[Image.Image]) -> Tensor:
    """uint8 `[B, 3, H, W]` of RGB images of one size."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).contiguous()


def as_pixels(images: Tensor) -> Tensor:
    """float32 `[B, 3, H, W]`, as the model takes them, of the same in bytes."""
    shape = (1, 3, 1, 1)
    mean, std = (torch.tensor(values, device=images.device).view(shape) for values in (IMAGE_MEAN, IMAGE_STD))
    return (images.float() / 255 - mean) / std


class _Chosen(nn.Module):
    """Keeps the class token and the patches `[B, K]`, where open_clip's own module would drop some at random."""

    def __init__(self, patches: Tensor) -> None:
        super().__init__()
        self._tokens = nn.functional.pad(patches + 1, (1, 0))[..., None]

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.gather(1, self._tokens.expand(-1, -1, tokens.shape[-1]))


def image_embeddings(model: Any, pixels: Tensor, shown: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Images `[B, J]`, as `model.encode_image` gives them, and in the same space their patches `[B, P, J]`, in rows.

    Args:
        shown: int64 `[B, K]`: the patches that the model gets to see, and that come back; None: all.
    """
    visual = model.visual
    usual = visual.patch_dropout
    if shown is not None:
        visual.patch_dropout = _Chosen(shown)
    try:
        features = visual.forward_intermediates(pixels, indices=1, normalize_intermediates=True, output_fmt="NLC")
    finally:
        visual.patch_dropout = usual
    return features["image_features"], features["image_intermediates"][0] @ visual.proj


def word_embeddings(model: Any, tokens: Tensor) -> Tensor:
    """`[N, J]` of tokens `[N, T]`: what `model.encode_text` gives, but T may be shorter than the model's context."""
    length = tokens.shape[1]
    hidden = model.token_embedding(tokens) + model.positional_embedding[:length]
    hidden = model.ln_final(model.transformer(hidden, attn_mask=model.attn_mask[:length, :length]))
    ends = (tokens == model.text_eos_id).int().argmax(1)
    embeddings: Tensor = hidden[torch.arange(len(tokens)), ends] @ model.text_projection
    return embeddings


def _package() -> Any:
    try:
        import open_clip
    except ImportError as error:
        raise ImportError("a CLIP needs the package open_clip_torch: pip install open_clip_torch") from error
    return open_clip


def _model_config(sizes: ClipSizes) -> dict[str, Any]:
    tokenizer = make_tokenizer()
    vision = {
        "image_size": sizes.image_px,
        "patch_size": sizes.patch_px,
        "width": sizes.width,
        "layers": sizes.layers,
        "head_width": sizes.head_dim,
    }
    text = {
        "context_length": CONTEXT,
        "vocab_size": len(tokenizer),
        "hf_tokenizer_name": ".",  # any name makes open_clip read the tokenizer that lies beside the weights
        "width": sizes.text_width,
        "layers": sizes.text_layers,
        "heads": sizes.text_heads,
        "pool_type": "eos",
        "pad_id": tokenizer.pad_token_id,
        "eos_id": tokenizer.eos_token_id,
    }
    return {"embed_dim": sizes.joint_dim, "vision_cfg": vision, "text_cfg": text}


def _preprocess_config(sizes: ClipSizes) -> dict[str, Any]:
    return {"size": sizes.image_px, "mean": IMAGE_MEAN, "std": IMAGE_STD, "interpolation": "bicubic"}
