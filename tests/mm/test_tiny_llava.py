from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoProcessor,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from oval_mm.picture_counts import count_for
from oval_mm.recipes.easy_vqa import load_easy_vqa
from oval_mm.recipes.scene_questions import VOCABULARY
from oval_mm.recipes.scenes import draw_scene
from oval_mm.recipes.tiny_llava import (
    MOST_TOKENS,
    WORDS,
    build_llava,
    language_config,
    load_llava,
    make_processor,
    make_tokenizer,
    save_llava,
)

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "What is Red?"}]},
    {"role": "assistant", "content": "star"},
    {"role": "user", "content": "is there a heart?"},
]


def tiny_tower(image_px: int = 64, patch_px: int = 16) -> CLIPVisionModel:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = CLIPVisionConfig(**sizes, num_attention_heads=2, image_size=image_px, patch_size=patch_px)
    return CLIPVisionModel(config)


def tiny_llava(strategy: Any = "default") -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """64 px, 16 image tokens; weights so large that the answers depend on everything."""
    tower = tiny_tower()
    side: Any = tower.config.image_size
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    language = language_config(**sizes, num_attention_heads=2, num_key_value_heads=1, initializer_range=0.3)
    return build_llava(tower, language, strategy=strategy), make_processor(images, tower, strategy)


def _words_of(text: str) -> list[str]:
    tokenizer = make_tokenizer()
    return [str(tokenizer.convert_ids_to_tokens(token)) for token in tokenizer(text).input_ids]


def test_words_and_signs_are_tokens() -> None:
    assert _words_of("USER: <image><image> What is left of the RED star? ASSISTANT: 7 </s>") == [
        *("<s>", "USER:", "<image>", "<image>", "what", "is", "left", "of", "the", "red", "star", "?"),
        *("ASSISTANT:", "7", "</s>"),
    ]
    assert _words_of("a zeppelin") == ["<s>", "a", "<unk>"]


def test_every_word_of_the_scenes_is_known() -> None:
    tokenizer = make_tokenizer()
    assert len(tokenizer) == WORDS
    assert _words_of(" ".join(VOCABULARY))[1:] == list(VOCABULARY)
    assert tokenizer.decode(tokenizer("red star", add_special_tokens=False).input_ids) == "red star"


def test_every_word_of_easy_vqa_is_known() -> None:
    pytest.importorskip("easy_vqa")
    images = load_easy_vqa("test")[:200]
    text = " ".join(words for image in images for pair in image.questions for words in pair)
    assert "<unk>" not in _words_of(text)


def test_a_chat_becomes_a_prompt_of_llava() -> None:
    _, processor = tiny_llava()
    prompt = str(processor.apply_chat_template(CHAT, add_generation_prompt=True))
    expected = "USER: <image> <image> what is red? ASSISTANT: star </s> USER: is there a heart? ASSISTANT:"
    assert _words_of(prompt) == _words_of(expected)
    with pytest.raises(Exception, match="roles are user and assistant, got system"):
        processor.apply_chat_template([{"role": "system", "content": "be brief"}])


@pytest.mark.parametrize(("strategy", "tokens"), [("default", 16), ("full", 17)])
def test_an_image_has_as_many_tokens_as_the_model_has_features(strategy: str, tokens: int) -> None:
    model, processor = tiny_llava(strategy)
    images = [draw_scene(seed, 64)[0] for seed in (1, 2)]
    prompt = processor.apply_chat_template(CHAT, add_generation_prompt=True)
    inputs = processor(images=images, text=prompt, return_tensors="pt")
    assert (inputs.input_ids == model.config.image_token_id).sum() == 2 * tokens
    assert count_for(model.config, processor) == model.config.image_seq_length == tokens
    generated = model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert generated.shape[1] == inputs.input_ids.shape[1] + 3


def test_the_shipped_sizes() -> None:
    model = build_llava(tiny_tower(128, 8))
    assert model.config.image_seq_length == 256
    assert model.model.language_model.config.max_position_embeddings == MOST_TOKENS >= 16 * 256 + 1000
    assert sum(weights.numel() for weights in model.parameters()) < 5_000_000
    ids = [getattr(model.generation_config, f"{name}_token_id") for name in ("pad", "bos", "eos")]
    assert ids == [0, 1, 2]


def test_sixteen_images_fit() -> None:
    model, processor = tiny_llava()
    words = "USER: " + "<image>" * 16 + " is there a heart? ASSISTANT:"
    inputs = processor(images=[draw_scene(1, 64)[0]] * 16, text=words, return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=1).shape[1] == 2 + 16 * 16 + 7


def test_the_tower_keeps_its_weights() -> None:
    tower = tiny_tower()
    inside = build_llava(tower).model.vision_tower.state_dict()
    assert all(torch.equal(inside[name], weights) for name, weights in tower.state_dict().items())


def test_a_saved_model_is_the_same_to_float16(tmp_path: Path) -> None:
    model, processor = tiny_llava()
    for _ in range(2):  # the second replaces the first
        save_llava(model, processor, tmp_path / "llava")
    assert [path.name for path in tmp_path.iterdir()] == ["llava"]
    assert model.dtype == torch.float32
    loaded, its_processor = load_llava(tmp_path / "llava")
    assert loaded.dtype == torch.float32
    for name, weights in loaded.state_dict().items():
        assert torch.equal(weights, model.state_dict()[name].half().float()), name
    assert isinstance(AutoProcessor.from_pretrained(tmp_path / "llava"), LlavaProcessor)
    image, prompt = draw_scene(3, 64)[0], "USER: <image> is there a heart? ASSISTANT:"
    ours, theirs = (one(images=image, text=prompt, return_tensors="pt") for one in (processor, its_processor))
    assert {name: tensor.tolist() for name, tensor in ours.items()} == {k: v.tolist() for k, v in theirs.items()}
    assert its_processor.apply_chat_template(CHAT) == processor.apply_chat_template(CHAT)


def test_bad_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"feature_layer must lie in -3..2 for this tower, got 3"):
        build_llava(tiny_tower(), feature_layer=3)
    with pytest.raises(ValueError, match=r"must make pictures of 64 x 64 pixels for this tower, got \{'height': 224"):
        make_processor(CLIPImageProcessor(), tiny_tower())
    with pytest.raises(FileNotFoundError, match=r"must hold a LLaVA in transformers' format, but has no config\.json"):
        load_llava(tmp_path)
