from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import CLIPVisionModel

from oval_mm.recipes.clip_to_transformers import build_image_processor, build_vision_tower, convert_vision_tower
from oval_mm.recipes.scenes import draw_scene
from oval_mm.recipes.tiny_clip import ClipSizes, build_clip, load_clip, save_clip
from tests.mm.test_tiny_clip import TINY, scene_pixels

open_clip = pytest.importorskip("open_clip")

TEXT = {"context_length": 8, "vocab_size": 16, "width": 16, "heads": 2, "layers": 1}


def _clip(*, quick_gelu: bool = False, **vision: Any) -> Any:
    """A CLIP none of whose weights is a one or a zero that a mistake could hide behind."""
    sizes = {"image_size": 64, "patch_size": 16, "width": 32, "layers": 3, "head_width": 16}
    model = open_clip.CLIP(8, {**sizes, **vision}, TEXT, quick_gelu=quick_gelu).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@torch.no_grad()
def _same_features(ours: CLIPVisionModel, theirs: Any) -> None:
    pixels = scene_pixels(3)
    found = ours(pixels, output_hidden_states=True)
    expected = theirs.forward_intermediates(pixels, output_fmt="NLC", output_extra_tokens=True)
    patches, classes = expected["image_intermediates"], expected["image_intermediates_prefix"]
    assert len(found.hidden_states) == len(patches) + 1
    for hidden, patch, token in zip(found.hidden_states[1:], patches, classes, strict=True):
        torch.testing.assert_close(hidden, torch.cat([token, patch], dim=1), rtol=0, atol=1e-5)
    assert torch.equal(found.last_hidden_state, found.hidden_states[-1])
    torch.testing.assert_close(found.pooler_output @ theirs.proj, expected["image_features"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("quick_gelu", [False, True])
def test_every_layer_has_the_same_features(quick_gelu: bool) -> None:
    tower = _clip(quick_gelu=quick_gelu).visual
    model = convert_vision_tower(tower)
    assert not model.training
    assert model.config.hidden_act == ("quick_gelu" if quick_gelu else "gelu")
    _same_features(model, tower)


def test_a_saved_clip_becomes_the_tower_of_its_sizes(tmp_path: Path) -> None:
    save_clip(build_clip(TINY), TINY, tmp_path / "clip")
    model = build_vision_tower(tmp_path / "clip")
    _same_features(model, load_clip(tmp_path / "clip")[0].visual)
    model.save_pretrained(tmp_path / "tower")
    _same_features(CLIPVisionModel.from_pretrained(tmp_path / "tower"), load_clip(tmp_path / "clip")[0].visual)
    config = model.config
    assert (config.image_size, config.patch_size, config.hidden_size) == (64, 16, 32)
    assert (config.num_hidden_layers, config.num_attention_heads, config.intermediate_size) == (2, 2, 128)


def test_the_processor_makes_the_pixels_of_the_training(tmp_path: Path) -> None:
    sizes = ClipSizes(image_px=128, patch_px=32, width=32, layers=1, head_dim=16, text_layers=1)
    save_clip(build_clip(sizes), sizes, tmp_path)
    processor, preprocess = build_image_processor(tmp_path), load_clip(tmp_path)[1]

    def pixels(image: Image.Image) -> torch.Tensor:
        return processor(images=image, return_tensors="pt").pixel_values[0]

    scene = draw_scene(5)[0]
    torch.testing.assert_close(pixels(scene), preprocess(scene), rtol=0, atol=1e-5)
    for image in (draw_scene(5, 300)[0], draw_scene(5, 64)[0], draw_scene(5, 200)[0].crop((0, 20, 200, 180))):
        assert pixels(image).shape == (3, 128, 128)
        assert (pixels(image) - preprocess(image)).abs().max() < 0.05, "resizing rounds differently, no more"


@pytest.mark.parametrize(
    "vision",
    [{"ls_init_value": 0.1}, {"no_ln_pre": True}, {"attentional_pool": True}],
    ids=lambda vision: next(iter(vision)),
)
def test_a_tower_with_other_weights_is_refused(vision: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key"):
        convert_vision_tower(_clip(**vision).visual)


def test_a_tower_with_another_activation_is_refused() -> None:
    tower = _clip(act_kwargs={"approximate": "tanh"}).visual
    with pytest.raises(ValueError, match="activation must be GELU or QuickGELU"):
        convert_vision_tower(tower)
    tower.transformer.resblocks[0].mlp.gelu = nn.ReLU()
    with pytest.raises(ValueError, match="activation must be GELU or QuickGELU, got ReLU"):
        convert_vision_tower(tower)


def test_an_image_that_is_not_square_is_refused() -> None:
    with pytest.raises(ValueError, match="image must be square, got 64 x 32 pixels"):
        convert_vision_tower(_clip(image_size=(64, 32)).visual)


def test_a_folder_without_a_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="must hold a CLIP"):
        build_vision_tower(tmp_path)
