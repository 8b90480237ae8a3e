import json
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from oval_core.training.state import StateFile
from oval_mm.recipes import llava_training
from oval_mm.recipes.easy_vqa import ImageQuestions
from oval_mm.recipes.llava_batches import (
    SECOND_TURN,
    conversation_pack,
    easy_vqa_images,
    easy_vqa_pack,
    packs,
    scene_pack,
)
from oval_mm.recipes.llava_plan import LANGUAGE, PROJECTOR, Phase, Stage, StepBatches, batch_of, make_plan
from oval_mm.recipes.llava_training import distance, train_llava, trained_parts
from oval_mm.recipes.muon import make_optimizers
from oval_mm.recipes.scenes import make_scene, split_of
from oval_mm.recipes.tiny_llava import load_llava
from tests.mm.test_tiny_llava import tiny_llava

ONE = (Phase(0, {"one": 1}),)
PLAN = (
    Stage("symbols", 2, {LANGUAGE: 1e-3}, ONE, "symbols"),
    Stage("align", 2, {PROJECTOR: 1e-3}, ONE, "both"),
    Stage("tune", 3, {PROJECTOR: 1e-3, LANGUAGE: 1e-3}, (*ONE, Phase(0.6, {"two": 1}, background=0.2))),
)


def _trained(out: Path, **how: Any) -> Any:
    torch.manual_seed(0)
    model, processor = tiny_llava()
    train_llava(out, model, processor, PLAN, held_out_packs=1, **how)
    return model


def test_an_interrupted_training_comes_to_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _trained(tmp_path / "whole")
    advance, taken = llava_training._Run._advance, 0

    def interrupt(*arguments: Any) -> float:
        nonlocal taken
        taken += 1
        if taken in (1, 4, 6):  # in the first and at the end of the second stage, and in the third
            signal.raise_signal(signal.SIGINT)
        return advance(*arguments)

    monkeypatch.setattr(llava_training._Run, "_advance", interrupt)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            _trained(tmp_path / "parts")
    parts = _trained(tmp_path / "parts")
    assert taken == sum(stage.steps for stage in PLAN)
    assert all(torch.equal(weights, whole.state_dict()[name]) for name, weights in parts.state_dict().items())
    _trained(tmp_path / "parts")  # nothing is left to do
    assert taken == sum(stage.steps for stage in PLAN)
    assert {path.name for path in tmp_path.iterdir()} == {"whole", "parts"}
    assert not list((tmp_path / "parts").glob("*.pt"))
    loaded, _ = load_llava(tmp_path / "parts")
    torch.testing.assert_close(loaded.lm_head.weight, whole.lm_head.weight, atol=1e-3, rtol=1e-3)
    assert "tune step 2: loss" in capsys.readouterr().out


def test_stages_have_their_order(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="can only follow stage 'symbols', which is not done"):
        _trained(tmp_path, stages=["tune"])
    _trained(tmp_path, stages=["symbols", "align"])
    assert not (tmp_path / "config.json").exists()
    with pytest.raises(ValueError, match="was made with seed=0, expected seed=1"):
        _trained(tmp_path, seed=1)
    _trained(tmp_path, stages=["tune"])
    assert set(json.loads((tmp_path / "training.json").read_text())["validation"]) == {"one", "two"}
    with pytest.raises(ValueError, match="was made with seed=0, expected seed=1"):
        _trained(tmp_path, seed=1)


@pytest.mark.parametrize("stage", PLAN, ids=lambda stage: stage.name)
def test_a_stage_changes_its_parts_only(stage: Stage) -> None:
    model, processor = tiny_llava()
    before = {name: weights.clone() for name, weights in model.state_dict().items()}
    run = llava_training._Run(model, processor, StateFile(Path("never"), {}))
    run._advance(stage, make_optimizers(trained_parts(model, stage)), StepBatches(stage, processor, 0)[0])
    changed = {name for name, weights in model.state_dict().items() if not torch.equal(weights, before[name])}
    assert not any("vision_tower" in name for name in changed)
    parts = {PROJECTOR: "multi_modal_projector", LANGUAGE: "language_model"}
    for part, name in parts.items():
        assert any(name in weights for weights in changed) == (part in stage.rates), part
    assert ("lm_head.weight" in changed) == (LANGUAGE in stage.rates)


@pytest.mark.parametrize(
    "stage",
    [Stage("symbols", 60, {LANGUAGE: 1e-2}, ONE, "symbols"), Stage("align", 60, {PROJECTOR: 3e-2}, ONE, "both")],
)
def test_it_learns(stage: Stage) -> None:
    model, processor = tiny_llava()
    run = llava_training._Run(model, processor, StateFile(Path("never"), {}))
    optimizers = make_optimizers(trained_parts(model, stage))
    batches = StepBatches(stage, processor, 0)
    losses = [run._advance(stage, optimizers, batches[step]) for step in range(stage.steps)]
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])


@torch.no_grad()
def test_the_distance_is_that_of_what_is_shown() -> None:
    model, processor = tiny_llava()
    batch = batch_of("both", [scene_pack(make_scene(1, 64))], processor, Phase(0, {}, background=0.2), random.Random(0))
    assert batch.shown is not None
    features = model.get_image_features(batch.pixels).pooler_output[0]
    words = model.get_input_embeddings().weight
    said = torch.stack([words[ids[ids >= 0]].sum(0) for ids in batch.symbols[0]])  # type: ignore[index]
    seen = batch.shown[0]
    expected = (features - said)[seen].square().sum() / said[seen].square().sum()
    torch.testing.assert_close(distance(model, batch), expected)


def test_every_weight_has_its_optimizer() -> None:
    model, _ = tiny_llava()
    optimizers = make_optimizers(trained_parts(model, PLAN[2]))
    groups = [group for optimizer in optimizers for group in optimizer.param_groups if group["params"]]
    frozen = len(list(model.model.vision_tower.parameters()))
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters())) - frozen
    for group in groups:
        assert {one.ndim > 1 for one in group["params"]} == {group["weight_decay"] > 0}
    words = model.get_input_embeddings().weight
    assert any(words is one for group in optimizers[1].param_groups for one in group["params"])


def test_a_step_shows_the_same_at_any_time() -> None:
    _, processor = tiny_llava()
    ours, theirs = (StepBatches(PLAN[2], processor, seed=1) for _ in range(2))
    first, again = ours[2], [theirs[1], theirs[2]][1]
    assert torch.equal(first[0].packed.tokens, again[0].packed.tokens)
    assert first[0].pixels is not None
    assert again[0].pixels is not None
    assert torch.equal(first[0].pixels, again[0].pixels)
    assert not torch.equal(first[0].packed.tokens, StepBatches(PLAN[2], processor, seed=2)[2][0].packed.tokens)


def test_phases_follow_each_other() -> None:
    _, processor = tiny_llava()
    batches = StepBatches(PLAN[2], processor, 0)
    pixels = [[batch.pixels for batch in batches[step]] for step in range(3)]
    assert [[len(one) for one in step if one is not None] for step in pixels] == [[1], [1], [2]]
    assert [batches[step][0].shown is None for step in range(3)] == [True, True, False]


def test_the_plan() -> None:
    plan = make_plan(0.001, easy_vqa=False)
    assert [stage.name for stage in plan] == ["symbols", "align", "tune"]
    assert min(stage.steps for stage in plan) == 1
    assert all("easy-vqa" not in stage.sources for stage in plan)
    assert "easy-vqa" in make_plan()[2].sources
    with pytest.raises(ValueError, match="steps_scale must be > 0, got 0"):
        make_plan(0)


def test_packs_of_scenes() -> None:
    asked = scene_pack(make_scene(5))
    some = asked.some(7, random.Random(0))
    assert len(set(some.dialogues)) == 7
    assert set(some.dialogues) < set(asked.dialogues)
    assert set(asked.some(1000, random.Random(0)).dialogues) == set(asked.dialogues)
    talk = conversation_pack(7, 4, 128, most=5)
    assert [len(turns) for turns in talk.dialogues] == [2, 1, 1, 1, 1, 1]
    assert talk.dialogues[0][1].kind == SECOND_TURN
    assert len(talk.images()) == 4
    assert {split_of(scene.seed) for scene in next(packs("four", "test", 64)).pictures} == {"test"}  # type: ignore[union-attr]


def test_easy_vqa_can_be_balanced() -> None:
    asked = [(f"is it {number}?", "no" if number else "yes") for number in range(4)] + [("what is it?", "circle")]
    image = ImageQuestions(0, Path("0.png"), tuple(asked))
    assert len(easy_vqa_pack(image).dialogues) == 5
    balanced = easy_vqa_pack(image, random.Random(0))
    assert Counter(turn.answer for (turn,) in balanced.dialogues) == {"yes": 1, "no": 1, "circle": 1}
    only_no = ImageQuestions(0, Path("0.png"), (("is it red?", "no"),))
    assert len(easy_vqa_pack(only_no, random.Random(0)).dialogues) == 1


def test_the_splits_of_easy_vqa_share_nothing() -> None:
    pytest.importorskip("easy_vqa")
    paths = [{image.path for image in easy_vqa_images(split)} for split in ("train", "validation", "test")]
    assert len(set.union(*paths)) == sum(map(len, paths))
    assert len(paths[1]) == pytest.approx(len(paths[0]) / 9, rel=0.01)
    assert next(packs("easy-vqa", "validation", 64)).images()[0].mode == "RGB"


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"source and split must be of .* got 'three', 'train'"):
        packs("three", "train", 64)
