"""A small LLaVA: stock transformers classes over a given CLIP vision tower, with a tokenizer for the words of the data.

    <s> USER: <image> <image> which digit is in the red star? ASSISTANT: 7 </s> USER: what is left of it? ...

A prompt is written as for LLaVA-1.5: the images first, one `<image>` each, then the question.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPVisionModel,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from oval_mm.picture_counts import count_for
from oval_mm.recipes.scene_questions import VOCABULARY

WORDS = 512  # of the tokenizer, reserved ones included
MOST_TOKENS = 8192  # of a prompt and its answer: 16 images are 4,096 of them
FEATURE_LAYER = -1  # hidden states of the tower that the projector gets: those that its CLIP compares with words
CONFIG_FILE = "config.json"
Strategy = Literal["default", "full"]
STRATEGY: Strategy = "default"  # "default": without the tower's class token; "full": with it

PAD, START, END, UNKNOWN, IMAGE = SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<image>")
USER, ASSISTANT = ROLES = ("USER:", "ASSISTANT:")
NOTHING = "nothing"  # is on a patch outside of all objects
# What easy-vqa says in other words than the scenes.
EASY_VQA_WORDS = ("brown", "contain", "does", "gray", "image", "not", "present", "rectangle", "teal")

CHAT_TEMPLATE = """
{%- for message in messages -%}
    {%- if message.role not in ["user", "assistant"] -%}
        {{- raise_exception("roles are user and assistant, got " ~ message.role) -}}
    {%- endif -%}
    {{- message.role | upper ~ ": " -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content if part.type == "image" -%}{{- "<image> " -}}{%- endfor -%}
        {%- for part in message.content if part.type == "text" -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
    {{- " </s>" if message.role == "assistant" else " " -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "ASSISTANT:" -}}{%- endif -%}
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word or sign, upper case read as lower case; `<s>` is put before a text."""
    words = dict.fromkeys((*SPECIAL, *ROLES, *VOCABULARY, *EASY_VQA_WORDS, NOTHING))
    reserved = (f"<reserved {number}>" for number in range(WORDS - len(words)))
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate((*words, *reserved))}, UNKNOWN))
    backend.normalizer = Lowercase()
    backend.pre_tokenizer = Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    backend.add_tokens([AddedToken(role, normalized=False) for role in ROLES])
    start = (START, backend.token_to_id(START))
    backend.post_processor = TemplateProcessing(single=f"{START} $A", pair=f"{START} $A $B", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=START,
        eos_token=END,
        unk_token=UNKNOWN,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        model_max_length=MOST_TOKENS,
        chat_template=CHAT_TEMPLATE,
    )


def make_processor(image_processor: Any, tower: CLIPVisionModel, strategy: Strategy = STRATEGY) -> LlavaProcessor:
    """Images and text to model inputs; as many image tokens a picture as the tower has patches.

    Args:
        image_processor: a `CLIPImageProcessor` that makes pictures of the tower's size.
        tower: for its patch size.
        strategy: "default" or "full", the `vision_feature_select_strategy` of the model.

    Raises:
        ValueError: the image processor makes pictures of another size.
    """
    made, side = dict(image_processor.crop_size), tower.config.image_size
    if made != {"height": side, "width": side}:
        raise ValueError(f"image_processor must make pictures of {side} x {side} pixels for this tower, got {made}")
    return LlavaProcessor(
        image_processor,
        make_tokenizer(),
        patch_size=tower.config.patch_size,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def language_config(**changes: Any) -> LlamaConfig:
    """The small Llama; `changes` replace settings of it."""
    settings: dict[str, Any] = {
        "vocab_size": WORDS,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": MOST_TOKENS,
        "pad_token_id": SPECIAL.index(PAD),
        "bos_token_id": SPECIAL.index(START),
        "eos_token_id": SPECIAL.index(END),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},  # most frequencies ignore where a patch is
        "tie_word_embeddings": True,
        "initializer_range": 128**-0.5,  # so small a model learns sooner from this than from the usual 0.02
    }
    return LlamaConfig(**(settings | changes))


def build_llava(
    tower: CLIPVisionModel,
    language: LlamaConfig | None = None,
    feature_layer: int | list[int] = FEATURE_LAYER,
    strategy: Strategy = STRATEGY,
) -> LlavaForConditionalGeneration:
    """A LLaVA with the weights of `tower`, everything else random, float32 and in evaluation mode.

    Args:
        tower: its weights are copied.
        language: default `language_config()`.
        feature_layer: which hidden states of the tower become image tokens: 0 is what enters its first layer, -1 what
            leaves its last; early ones say more about their own patch alone. A list: these side by side.
        strategy: "default" drops the tower's class token, "full" keeps it.

    Raises:
        ValueError: the tower has no such hidden states.
    """
    states = tower.config.num_hidden_layers + 1
    for layer in [feature_layer] if isinstance(feature_layer, int) else feature_layer:
        if not -states <= layer < states:
            raise ValueError(f"feature_layer must lie in {-states}..{states - 1} for this tower, got {layer}")
    config = LlavaConfig(
        vision_config=tower.config.to_dict(),
        text_config=(language or language_config()).to_dict(),
        image_token_index=SPECIAL.index(IMAGE),
        vision_feature_layer=feature_layer,
        vision_feature_select_strategy=strategy,
    )
    config.image_seq_length = count_for(config)
    model = LlavaForConditionalGeneration(config)
    model.model.vision_tower.load_state_dict(tower.state_dict())
    return model.eval()


def save_llava(model: LlavaForConditionalGeneration, processor: LlavaProcessor, folder: Path) -> None:
    """Write a folder that `from_pretrained` reads: safetensors in float16, and the processor. `model` is not changed.

    Files that are there already are replaced one by one, each in one move.
    """
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    processor.save_pretrained(unfinished)
    copy.deepcopy(model).cpu().half().save_pretrained(unfinished)
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(unfinished.iterdir()):
        file.replace(folder / file.name)
    unfinished.rmdir()


def load_llava(folder: Path) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """The model, float32 and in evaluation mode, and the processor of a folder that `save_llava` wrote.

    Raises:
        FileNotFoundError: the folder holds no model.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise FileNotFoundError(f"{folder} must hold a LLaVA in transformers' format, but has no {CONFIG_FILE}")
    model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model.eval(), LlavaProcessor.from_pretrained(folder, local_files_only=True)
