import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from oval_mm.concepts import concept_list, make_concept_space
from oval_mm.recipes.clip_to_transformers import build_vision_tower
from oval_mm.recipes.tiny_clip import build_clip, image_embeddings, load_clip, make_tokenizer
from tests.mm.test_tiny_clip import TINY, scene_pixels
from tests.mm.tiny_concepts import clip_folder, random_space

open_clip = pytest.importorskip("open_clip")
WORDS = ("red", "a blue star", "digit 7", "nothing")


def test_the_words_of_the_scenes() -> None:
    concepts, tokenizer = concept_list("scene"), make_tokenizer()
    assert {"red", "heart", "digit 7", "letter k", "a blue star", "nothing"} <= {*concepts}
    assert len({*concepts}) == len(concepts)
    assert tokenizer.unk_token_id not in tokenizer(list(concepts), padding=True, return_tensors="pt").input_ids


def test_general_concepts() -> None:
    concepts = concept_list("general")
    assert len({*concepts}) == len(concepts) > 50
    assert "a photo of a dog" in concepts


def test_concepts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "words.txt"
    file.write_text(" a red car\n\na tree \n")
    assert concept_list(file) == concept_list(str(file)) == ("a red car", "a tree")
    file.write_text("a tree\na tree\nx\n")
    with pytest.raises(ValueError, match=r"each once, got 3; more than once: \['a tree'\]"):
        concept_list(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="two or more, each once, got 0"):
        concept_list(file)
    with pytest.raises(FileNotFoundError, match=r"one of \['scene', 'general'\] or a text file, got 'scenes'"):
        concept_list("scenes")


def test_patches_are_compared_with_words_as_in_the_clip() -> None:
    """From the states of the converted tower, without the CLIP, as open_clip does it from the image."""
    model, _, tokenizer = load_clip(clip_folder())
    space = make_concept_space(clip_folder(), WORDS)
    pixels = scene_pixels(3)
    with torch.no_grad():
        texts = normalize(model.encode_text(tokenizer(list(WORDS))), dim=-1)
        patches = normalize(image_embeddings(model, pixels)[1], dim=-1)
        states = build_vision_tower(clip_folder())(pixels).last_hidden_state[:, 1:]
        expected = (model.logit_scale.exp() * patches @ texts.T).softmax(-1)
    assert space.concepts == WORDS
    torch.testing.assert_close(space.texts, texts)
    torch.testing.assert_close(space.weights(states), expected, atol=1e-5, rtol=1e-4)
    assert space.weights(states).std() > 1e-3
    spread = (texts - texts.mean(0)) / (texts - texts.mean(0)).square().mean().sqrt()
    torch.testing.assert_close(space.describe(states), expected @ spread, atol=1e-4, rtol=1e-3)


def test_every_name_of_a_local_clip_is_the_same() -> None:
    spaces = [make_concept_space(name, WORDS) for name in (clip_folder(), str(clip_folder()))]
    spaces.append(make_concept_space(f"local-dir:{clip_folder()}", WORDS))
    assert all(torch.equal(space.texts, spaces[0].texts) for space in spaces)


def test_random_texts() -> None:
    space = random_space()
    first, again, other = (space.with_random_texts(seed) for seed in (0, 0, 1))
    assert torch.equal(first.texts, again.texts)
    assert not torch.equal(first.texts, other.texts)
    torch.testing.assert_close(first.texts.norm(dim=-1), torch.ones(6))
    states = torch.randn(3, 32)
    assert (first.describe(states) - space.describe(states)).abs().max() > 0.1
    assert first.describe(states).shape == (3, 8)


def test_clips_without_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"NAME@WEIGHTS, got ViT-B-32; of \['openai'"):
        make_concept_space("ViT-B-32", WORDS)


def test_towers_without_a_way_to_words_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_clip(TINY)
    model.visual = torch.nn.Identity()
    monkeypatch.setattr(open_clip, "create_model", lambda *_, **__: model)
    with pytest.raises(ValueError, match="must have a vision tower with ln_post and proj, got Identity"):
        make_concept_space(clip_folder(), WORDS)


def test_without_open_clip_only_texts_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match="pip install open_clip_torch"):
        make_concept_space(clip_folder(), WORDS)
    assert random_space().describe(torch.randn(2, 32)).shape == (2, 8)
    assert "nothing" in concept_list("scene")
