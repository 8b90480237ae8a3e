"""Tiny random vision-language models with their stock processors, saved to disk and loaded back.

SmolVLM's own processor needs the package num2words; its model gets the processor of Idefics3, which writes the same
prompts.
"""

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

NAMES = ("llava", "llava_next", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")
WORDS = ("<pad>", "<unk>", "and", *(f"word{index}" for index in range(29)))
TILES = [[28, 28], [28, 56], [56, 28], [56, 56], [84, 84]]
MARKERS = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
NAMES_OF_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3))
SPECIAL = ("<image>", "<video>", "<|image_pad|>", "<|video_pad|>", *MARKERS, *NAMES_OF_TILES)
IMAGE_IDS = {"<image>": len(WORDS), "<|image_pad|>": len(WORDS) + 2}
TEXT: dict[str, Any] = {
    "vocab_size": len(WORDS) + len(SPECIAL),
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "patch_size": 7,
}
MROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10_000.0}


@dataclass
class TinyVlm:
    """A model, its processor, and the word that stands for a picture in a prompt."""

    name: str
    model: Any
    processor: Any
    image: str

    def inputs(self, *rows: tuple[str, Sequence[Image.Image]]) -> dict[str, Any]:
        """Model inputs of prompts, in which `*` is a picture, and their pictures; left-padded."""
        texts = [text.replace("*", f" {self.image} ") for text, _ in rows]
        images: Any = [list(pictures) for _, pictures in rows]
        if self.name not in ("idefics3", "smolvlm"):
            images = [picture for pictures in images for picture in pictures]
        given = {"images": images} if any(images) else {}
        return dict(self.processor(text=texts, return_tensors="pt", padding=True, **given))


def photo(seed: int = 0, height: int = 40, width: int = 60) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def words(count: int, seed: int = 0) -> str:
    return " ".join(f"word{index}" for index in np.random.default_rng(seed).integers(0, 29, count))


def generate(vlm: TinyVlm, inputs: dict[str, Any], **options: Any) -> Any:
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return vlm.model.generate(**{**inputs, **settings, **options})


def batch(vlm: TinyVlm, last: int = 2) -> dict[str, Any]:
    """Left-padded; two pictures of different size in the first row, one at the very end of the second."""
    two = (f"{words(5)} * and {words(3)} * {words(4)}", [photo(0), photo(1, 60, 30)])
    return vlm.inputs(two, (f"{words(12, 1)} *", [photo(last)]))


def two_turns(vlm: TinyVlm) -> Any:
    """What `generate` gives for `batch`'s second turn, over the cache of the first; only row 0 sees a new picture."""
    inputs = batch(vlm)
    first = generate(vlm, inputs)
    turn = vlm.inputs((f"{words(3)} * {words(9)}", [photo(2)]), (words(4), []))
    ids = torch.cat([first.sequences, turn.pop("input_ids")], dim=1)
    answer = torch.ones_like(first.sequences[:, inputs["input_ids"].shape[1] :])
    mask = torch.cat([inputs["attention_mask"], answer, turn.pop("attention_mask")], dim=1)
    return generate(vlm, {**turn, "input_ids": ids, "attention_mask": mask}, cache=first.cache)


@functools.cache
def tiny(name: str) -> TinyVlm:
    """The model `name` of `NAMES` as it comes from disk."""
    with tempfile.TemporaryDirectory() as directory:
        save(name, Path(directory))
        model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory).eval()
        processor: Any = transformers.AutoProcessor.from_pretrained(directory)
    image = "<|image_pad|>" if "qwen" in name else "<image>"
    return TinyVlm(name, model, processor, image)


def save(name: str, directory: Path) -> None:
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForImageTextToText.from_config(globals()[f"_{name}_config"]())
    for parameter in model.base_model.parameters():
        if parameter.dim() > 1:  # large enough that images matter
            torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 * 1.5)
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    not_words = [*range(3), *range(len(WORDS), TEXT["vocab_size"])]
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, suppress_tokens=not_words)
    model.save_pretrained(directory)
    _processor(name).save_pretrained(directory)


def _tokenizer() -> Any:
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    assert tokenizer.convert_tokens_to_ids(list(IMAGE_IDS)) == list(IMAGE_IDS.values())
    return tokenizer


def _processor(name: str) -> Any:
    tokenizer = _tokenizer()
    images: Any
    llava: Any = {"patch_size": 7, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
    square: Any = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    if name == "llava":
        sized: Any = {"size": {"shortest_edge": 35}, "crop_size": {"height": 35, "width": 35}}
        return transformers.LlavaProcessor(transformers.CLIPImageProcessorPil(**sized), tokenizer, **llava)
    if name == "llava_next":
        images = transformers.LlavaNextImageProcessorPil(**square, image_grid_pinpoints=TILES)
        return transformers.LlavaNextProcessor(images, tokenizer, **llava)
    if name == "llava_onevision":
        images = transformers.LlavaOnevisionImageProcessorPil(
            size={"height": 28, "width": 28}, image_grid_pinpoints=TILES
        )
        return transformers.LlavaOnevisionProcessor(
            images,
            tokenizer,
            transformers.LlavaOnevisionVideoProcessor(),
            num_image_tokens=16,
            vision_feature_select_strategy="full",
            vision_aspect_ratio="anyres_max_2",
        )
    if "qwen" in name:
        images = transformers.Qwen2VLImageProcessorPil(
            size={"shortest_edge": 28 * 28, "longest_edge": 70 * 70}, patch_size=7, merge_size=2
        )
        kind: Any = transformers.Qwen2VLProcessor if name == "qwen2_vl" else transformers.Qwen2_5_VLProcessor
        return kind(images, tokenizer, transformers.Qwen2VLVideoProcessor(patch_size=7, merge_size=2))
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 84}, max_image_size={"longest_edge": 42})
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=9)


def _llava_config() -> Any:
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=35)
    return transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        vision_feature_layer=-1,
        image_token_index=IMAGE_IDS["<image>"],
    )


def _llava_next_config() -> Any:
    vision = transformers.CLIPVisionConfig(**TOWER, image_size=28)
    return transformers.LlavaNextConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT),
        vision_feature_layer=-1,
        image_token_index=IMAGE_IDS["<image>"],
        image_grid_pinpoints=TILES,
    )


def _llava_onevision_config() -> Any:
    vision = transformers.SiglipVisionConfig(**TOWER, image_size=28, vision_use_head=False)
    return transformers.LlavaOnevisionConfig(
        vision_config=vision,
        text_config=transformers.Qwen2Config(**TEXT),
        image_token_index=IMAGE_IDS["<image>"],
        video_token_index=IMAGE_IDS["<image>"] + 1,
        image_grid_pinpoints=TILES,
        vision_aspect_ratio="anyres_max_2",
    )


def _qwen2_vl_config() -> Any:
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 1, "patch_size": 7}
    return transformers.Qwen2VLConfig(vision_config=vision, **_qwen_settings())


def _qwen2_5_vl_config() -> Any:
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 32,
        "out_hidden_size": 64,
        "num_heads": 2,
        "intermediate_size": 32,
    }
    vision |= {"patch_size": 7, "window_size": 28, "fullatt_block_indexes": [0]}
    return transformers.Qwen2_5_VLConfig(vision_config=vision, **_qwen_settings())


def _qwen_settings() -> dict[str, Any]:
    image = IMAGE_IDS["<|image_pad|>"]
    text = {**TEXT, "rope_parameters": dict(MROPE)}
    return {"text_config": text, "image_token_id": image, "video_token_id": image + 1}


def _idefics3_config() -> Any:
    vision = {**TOWER, "image_size": 42}
    return transformers.Idefics3Config(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=IMAGE_IDS["<image>"]
    )


def _smolvlm_config() -> Any:
    vision = {**TOWER, "image_size": 42}
    return transformers.SmolVLMConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**TEXT), image_token_id=IMAGE_IDS["<image>"]
    )
