import json
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from oval_mm.recipes.clip_captions import BACKGROUND, GLYPHS, NAMES, NOTHING, describe, look_of
from oval_mm.recipes.scenes import SPLITS, caption, draw_scene, make_scene
from oval_mm.recipes.tiny_clip import (
    CONTEXT,
    SHIPPED,
    ClipSizes,
    as_bytes,
    as_pixels,
    build_clip,
    image_embeddings,
    load_clip,
    make_tokenizer,
    save_clip,
    word_embeddings,
)

open_clip = pytest.importorskip("open_clip")

TINY = ClipSizes(
    image_px=64, patch_px=16, width=32, layers=2, head_dim=16, joint_dim=8, text_width=16, text_layers=1, text_heads=2
)


def scene_pixels(count: int) -> torch.Tensor:
    return as_pixels(as_bytes([draw_scene(seed, TINY.image_px)[0] for seed in range(count)]))


@given(st.integers(0, SPLITS["test"].stop - 1))
@settings(max_examples=60)
def test_every_caption_is_made_of_known_words_and_fits(seed: int) -> None:
    tokenizer, scene, rng = make_tokenizer(), make_scene(seed), random.Random(seed)
    said = [describe(look_of(thing), rng).words for thing in scene.objects]
    tokens = tokenizer([caption(scene), *said, NOTHING.words], padding=True, return_tensors="pt").input_ids
    assert tokenizer.unk_token_id not in tokens
    assert tokens.shape[1] <= CONTEXT
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) == caption(scene)


def test_the_longest_caption_fits() -> None:
    thing = "a red circle with the digit 7"
    assert len(make_tokenizer()(" and ".join([thing] * 6)).input_ids) <= CONTEXT


def test_classes_are_told_apart_by_the_tokenizer() -> None:
    tokenizer = make_tokenizer()
    tokens = [tuple(tokenizer(one.words).input_ids) for one in (*NAMES, *GLYPHS, NOTHING)]
    assert len(set(tokens)) == 56 + 23 + 1
    assert tokenizer("What COLOR?").input_ids == tokenizer("what color ?").input_ids
    assert describe(BACKGROUND, random.Random(0)) == NOTHING


def test_open_clip_reads_the_folder_offline(tmp_path: Path) -> None:
    model = build_clip(TINY)
    assert type(model) is open_clip.CLIP
    save_clip(model, TINY, tmp_path)
    loaded, _, preprocess = open_clip.create_model_and_transforms(f"local-dir:{tmp_path}")
    for (name, ours), (other_name, theirs) in zip(model.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name == other_name
        assert torch.equal(ours.half(), theirs.half())
        assert theirs.dtype == torch.float32
    tokens = open_clip.get_tokenizer(f"local-dir:{tmp_path}")(["a red star", "nothing"])
    assert tokens.shape == (2, CONTEXT)
    assert tokens[0, :5].tolist() == make_tokenizer()("a red star").input_ids
    image = draw_scene(3, TINY.image_px)[0]
    torch.testing.assert_close(preprocess(image)[None], as_pixels(as_bytes([image])))


def test_a_loaded_clip_compares_images_and_words(tmp_path: Path) -> None:
    save_clip(build_clip(TINY), TINY, tmp_path)
    model, preprocess, tokenizer = load_clip(tmp_path)
    assert not model.training
    pixels = torch.stack([preprocess(Image.new(mode, size)) for mode, size in (("L", (50, 90)), ("RGBA", (64, 64)))])
    images, words, scale = model(pixels, tokenizer(["a red star", "a blue circle"]))
    assert (images @ words.T * scale).shape == (2, 2)


def test_the_shipped_sizes_are_small(tmp_path: Path) -> None:
    model = build_clip(SHIPPED)
    save_clip(model, SHIPPED, tmp_path)
    assert SHIPPED.image_tokens == 256
    assert sum(parameter.numel() for parameter in model.parameters()) < 1.6e6
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 3.2e6
    assert json.loads((tmp_path / "open_clip_config.json").read_text())["preprocess_cfg"]["size"] == 256


@torch.no_grad()
def test_images_and_their_patches_are_embedded_alike() -> None:
    model, pixels = build_clip(TINY).eval(), scene_pixels(3)
    seen: list[torch.Tensor] = []
    model.visual.ln_post.register_forward_hook(lambda *arguments: seen.append(arguments[-1]))
    expected = model.encode_image(pixels)
    images, patches = image_embeddings(model, pixels)
    assert patches.shape == (3, TINY.image_tokens, TINY.joint_dim)
    torch.testing.assert_close(images, expected)
    torch.testing.assert_close(torch.cat([images[:, None], patches], dim=1), seen[0] @ model.visual.proj)


@torch.no_grad()
def test_words_need_no_padding() -> None:
    model, tokenizer = build_clip(TINY).eval(), make_tokenizer()
    for name, parameter in model.named_parameters():
        if "embedding" in name:
            torch.nn.init.normal_(parameter)
    words = ["a red star with the digit 7", "nothing"]
    expected = model.encode_text(tokenizer(words, padding="max_length", return_tensors="pt").input_ids)
    tokens = tokenizer(words, padding=True, return_tensors="pt").input_ids
    assert tokens.shape[1] == 9
    torch.testing.assert_close(word_embeddings(model, tokens), expected)


def test_a_folder_without_a_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no open_clip_config\.json"):
        load_clip(tmp_path)
    save_clip(build_clip(TINY), TINY, tmp_path)
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no open_clip_model\.safetensors"):
        load_clip(tmp_path)


def test_without_open_clip_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match="pip install open_clip_torch"):
        build_clip(TINY)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch_px": 9}, "image_px must be a multiple of patch_px, got image_px=256 and patch_px=9"),
        ({"width": 96}, "width must be a multiple of head_dim"),
        ({"text_heads": 0}, "text_width must be a multiple of text_heads"),
    ],
)
def test_sizes_must_fit_together(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClipSizes(**settings)
