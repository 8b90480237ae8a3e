import dataclasses
import math
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oval_mm.recipes import clip_training
from oval_mm.recipes.clip_accuracy import ClipAccuracy, HeldOut, _labels, _retrieval, _share_right
from oval_mm.recipes.clip_batches import ClipBatch, ClipBatches, area_of, single_object
from oval_mm.recipes.clip_captions import (
    BACKGROUND,
    GLYPHS,
    NAMES,
    NOTHING,
    describe,
    describe_part,
    easy_vqa_look,
    is_of_glyph,
    is_true,
    look_of,
)
from oval_mm.recipes.clip_training import contrast, loss_of, train_clip
from oval_mm.recipes.easy_vqa import ImageQuestions
from oval_mm.recipes.scenes import SceneObject, glyph_in_words, make_scene
from oval_mm.recipes.tiny_clip import build_clip, load_clip, make_tokenizer
from tests.mm.test_tiny_clip import TINY

pytest.importorskip("open_clip")
pytest.importorskip("easy_vqa")

SEEDS = st.integers(0, 9_999_999)
SAYS_NOTHING = {"a", "an", "with", "the", "shape"}


def _is_said_of(words: str, thing: SceneObject) -> bool:
    """Whether every word of a description that says something is about this object."""
    true = {thing.colour, thing.shape, *(glyph_in_words(thing.glyph).split() if thing.glyph else ())}
    return true.issuperset(set(words.split()) - SAYS_NOTHING)


def _train(out: Path, steps: int = 4, **settings: Any) -> ClipAccuracy:
    return train_clip(out, steps, sizes=TINY, batch=8, held_out_scenes=6, workers=0, **settings)


@given(SEEDS, SEEDS)
@settings(max_examples=40)
def test_descriptions_are_true_of_what_they_say(one: int, other: int) -> None:
    things = [*make_scene(one).objects, *make_scene(other).objects]
    said = [describe(look_of(thing), random.Random(one)) for thing in things]
    held = is_true([description.said for description in said], [look_of(thing) for thing in things])
    assert held.diagonal().all()
    assert held.tolist() == [[_is_said_of(description.words, thing) for description in said] for thing in things]


def test_every_way_to_describe_occurs() -> None:
    thing = SceneObject("star", "orange", "K", (0, 0), (0, 0, 9, 9))
    rng = random.Random(0)
    assert {describe(look_of(thing), rng).words for _ in range(300)} == {
        *("orange", "an orange shape", "star", "a star", "orange star", "an orange star", "letter k"),
        *("a shape with the letter k", "orange star with the letter k", "an orange star with the letter k"),
    }


def test_a_part_is_described_by_look_place_and_glyph() -> None:
    rng = random.Random(0)
    for seed in range(20):
        for thing in make_scene(seed).objects:
            said = describe_part(look_of(thing), rng)
            held = is_true([one.said for one in said], [look_of(thing)])
            assert held.all()
            assert said[1].words == f"at the {thing.place}"
            assert [is_of_glyph(one) for one in said] == [False, False, True][: 3 if thing.glyph else 2]
    assert describe_part(BACKGROUND, rng) == [NOTHING]


def test_a_glyph_is_shown_where_it_is_or_as_one_patch_of_its_object() -> None:
    sizes = dataclasses.replace(TINY, image_px=128, patch_px=8)
    batch = ClipBatches(sizes, 8, seed=0)[0]
    words = make_tokenizer().batch_decode(batch.part_captions, skip_special_tokens=True)
    for said, patches in zip(words, batch.part_patches, strict=True):
        if "digit" in said or "letter" in said:
            assert patches.max() == 1, "the cell in the middle, or one patch"
    whole = [patches for said, patches in zip(words, batch.part_patches, strict=True) if patches.max() < 1]
    assert whole, "others are also shown whole"
    assert all(round(1 / patches.max().item()) == 9 for patches in whole if (patches > 0).sum() < 20)


def test_easy_vqa_looks_come_from_the_questions() -> None:
    def look(*questions: tuple[str, str]) -> Any:
        return easy_vqa_look(ImageQuestions(0, Path("0.png"), questions))

    assert look(("what is the teal shape?", "circle")) == ("teal", "circle", "none", "none")
    assert look(("what color is the shape?", "red"), ("what shape is present?", "rectangle")) == (
        *("red", "rectangle"),
        *("none", "none"),
    )
    assert look(("what color is the shape?", "red"), ("is there a circle?", "no")) is None


@given(SEEDS)
@settings(max_examples=30)
def test_areas_count_the_pixels_of_a_box_in_each_patch(seed: int) -> None:
    thing = make_scene(seed, TINY.image_px).objects[0]
    x0, y0, x1, y1 = thing.box
    mask = np.zeros((TINY.image_px, TINY.image_px))
    mask[y0:y1, x0:x1] = 1
    expected = mask.reshape(TINY.side, TINY.patch_px, TINY.side, TINY.patch_px).sum((1, 3))
    assert area_of(thing.box, TINY).tolist() == expected.ravel().tolist()


def test_a_batch_is_determined_by_its_number() -> None:
    batches = ClipBatches(TINY, 16, seed=0)
    for one, again, other in zip(batches[3], ClipBatches(TINY, 16, seed=0)[3], batches[4], strict=True):
        assert torch.equal(one, again)
        assert one.shape != other.shape or not torch.equal(one, other)
    assert not torch.equal(batches[3].images, ClipBatches(TINY, 16, seed=1)[3].images)


def test_a_batch_holds_what_its_type_says() -> None:
    batch = ClipBatches(TINY, 16, seed=0)[0]
    assert batch.images.shape == (16, 3, TINY.image_px, TINY.image_px)
    assert batch.captions.shape == (16, 50)
    parts = len(batch.part_images)
    assert parts > 10 * 3 * 2 + 4 * 3
    assert batch.shown.shape[0] == 16
    assert batch.part_patches.shape == (parts, batch.shown.shape[1])
    torch.testing.assert_close(batch.part_patches.sum(1), torch.ones(parts))
    words = make_tokenizer().batch_decode(batch.part_captions, skip_special_tokens=True)
    assert words.count("nothing") == 4
    assert make_tokenizer().unk_token_id not in torch.cat([batch.captions.flatten(), batch.part_captions.flatten()])
    same = (batch.part_captions[:, None] == batch.part_captions).all(-1).fill_diagonal_(False)
    assert batch.part_also_true[same].all()
    assert not batch.part_also_true.diagonal().any()
    assert not batch.caption_also_true[:, :10].any(), "the caption of a whole scene is true of no other image"


def test_what_is_also_true_does_not_count() -> None:
    seen = torch.eye(3)[[0, 1, 0]]
    free = torch.zeros(3, 3, dtype=torch.bool)
    twins = torch.zeros(3, 3, dtype=torch.bool)
    twins[0, 2] = twins[2, 0] = True
    scale = torch.tensor(100.0)
    assert contrast(seen, seen, scale, twins).item() == pytest.approx(0, abs=1e-6)
    assert contrast(seen, seen, scale, free).item() == pytest.approx(2 / 3 * math.log(2), abs=1e-6)


def test_a_few_steps_on_one_batch_lower_the_loss() -> None:
    batch, model = ClipBatches(TINY, 8, seed=0)[0], build_clip(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_the_loss_is_about_the_same_in_bfloat16() -> None:
    batch, model = ClipBatches(TINY, 8, seed=0)[0], build_clip(TINY)
    expected = loss_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model, batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=0.03)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_training_leaves_a_clip_and_says_how_good_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    accuracy = _train(tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {
        *("open_clip_config.json", "open_clip_model.safetensors", "tokenizer.json", "tokenizer_config.json"),
        "training.json",
    }
    printed = capsys.readouterr().out
    assert f"CLIP after 4 steps: retrieval {accuracy.retrieval:.1%}, zero-shot {accuracy.zero_shot:.1%}" in printed
    assert HeldOut(TINY, 6).measure(load_clip(tmp_path)[0]) == accuracy


def _interrupting(at_call: int) -> Callable[[Any, ClipBatch], torch.Tensor]:
    calls = 0

    def loss(model: Any, batch: ClipBatch) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == at_call:
            signal.raise_signal(signal.SIGINT)
        return loss_of(model, batch)

    return loss


def test_an_interrupted_training_comes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = _train(tmp_path / "whole")
    monkeypatch.setattr(clip_training, "loss_of", _interrupting(at_call=2))
    with pytest.raises(KeyboardInterrupt):
        _train(tmp_path / "parts")
    monkeypatch.undo()
    assert [file.name for file in (tmp_path / "parts").iterdir()] == ["training.pt"]
    with pytest.raises(ValueError, match="made with steps=4, expected steps=5"):
        _train(tmp_path / "parts", steps=5)
    assert _train(tmp_path / "parts") == expected
    weights = [(tmp_path / name / "open_clip_model.safetensors").read_bytes() for name in ("whole", "parts")]
    assert weights[0] == weights[1]


def test_a_finished_training_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = _train(tmp_path, steps=1)
    monkeypatch.delattr(clip_training, "_Run")
    assert _train(tmp_path, steps=1) == accuracy
    with pytest.raises(ValueError, match="made with seed=0, expected seed=1"):
        _train(tmp_path, steps=1, seed=1)


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got steps=0, batch=64"):
        train_clip(tmp_path, 0)
    with pytest.raises(ValueError, match="got steps=1, batch=1"):
        train_clip(tmp_path, 1, batch=1)


def test_held_out_accuracy_counts_right_answers() -> None:
    things = [single_object(seed, 64).objects[0] for seed in range(4)]
    things[0] = dataclasses.replace(things[0], glyph=None)
    labels = _labels(things, NAMES)
    assert [NAMES[label].words.split()[1:] for label in labels.tolist()] == [[one.colour, one.shape] for one in things]
    assert _labels(things, GLYPHS)[0] == -1
    assert _share_right(torch.eye(56)[labels], 7 * torch.eye(56), labels) == 1.0
    assert _share_right(torch.eye(4), torch.eye(4), torch.tensor([0, 1, 3, -1])) == pytest.approx(2 / 3)
    assert _retrieval(torch.eye(4), torch.eye(4)) == 1.0
    assert _retrieval(torch.eye(4), torch.eye(4)[[0, 1, 3, 2]]) == 0.5
