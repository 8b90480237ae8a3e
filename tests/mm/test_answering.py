import json
from pathlib import Path
from typing import Any

import pytest
import torch

from oval_mm.recipes.answering import (
    ALL,
    Answer,
    accuracy,
    answers_in,
    generated_answers,
    main,
    majority_baseline,
    packed_answers,
)
from oval_mm.recipes.llava_batches import Asked, Pack, conversation_pack, make_batch, make_symbols_batch, scene_pack
from oval_mm.recipes.question_packing import packed_outputs
from oval_mm.recipes.scenes import make_scene
from oval_mm.recipes.tiny_llava import save_llava
from tests.mm.test_tiny_llava import tiny_llava

PACKS = [conversation_pack(seed, 2, 64, most=2) for seed in (1, 2)]
TURNS = [turn for one in PACKS for talk in one.dialogues for turn in talk]


@pytest.fixture(scope="module")
def learned() -> tuple[Any, Any]:
    """A model that knows the answers to PACKS by heart, and its processor."""
    torch.manual_seed(0)
    model, processor = tiny_llava()
    batch = make_batch(PACKS, processor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        loss = packed_outputs(model, *batch).loss
        if loss < 0.02:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.05
    return model, processor


def test_packed_and_generated_answers_agree(learned: tuple[Any, Any]) -> None:
    packed = packed_answers(*learned, PACKS)
    assert packed == [Answer(turn, turn.answer) for turn in TURNS]
    assert list(generated_answers(*learned, PACKS)) == packed
    assert accuracy(packed)[ALL] == 1


def test_another_answer_is_wrong(learned: tuple[Any, Any]) -> None:
    question, answer, kind = TURNS[2]
    for expected in ("yes", f"{answer} star"):
        given = packed_answers(*learned, [Pack(PACKS[0].pictures, ((Asked(question, expected, kind),),))])[0]
        assert not given.is_right
        assert given.given.split()[0] == answer.split()[0]


def test_an_answer_without_end_says_so() -> None:
    model, processor = tiny_llava()
    with torch.no_grad():
        model.lm_head.weight[processor.tokenizer.eos_token_id] = 0
        model.lm_head.weight[processor.tokenizer.get_vocab()["no"]] = 0
    answers = packed_answers(model, processor, [scene_pack(make_scene(1, 64))])
    assert all(answer.given.endswith(" ...") and not answer.is_right for answer in answers)


def test_symbols_in_place_of_images(learned: tuple[Any, Any]) -> None:
    packs = [scene_pack(make_scene(seed, 64)) for seed in range(5)]  # more than run together
    answers = answers_in(*learned, packs, lambda some: make_symbols_batch(some, learned[1]))
    assert [answer.asked for answer in answers] == [turn for one in packs for talk in one.dialogues for turn in talk]


def test_accuracy_and_majority_by_kind() -> None:
    asked = [Asked("?", answer, kind) for answer, kind in (("yes", "a"), ("yes", "a"), ("no", "a"), ("no", "b"))]
    answers = [Answer(turn, "no") for turn in asked]
    assert accuracy(answers) == {"a": 1 / 3, "b": 1, ALL: 1 / 2}
    assert majority_baseline(asked) == {"a": 2 / 3, "b": 1, ALL: 1 / 2}


def test_the_table(learned: tuple[Any, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llava(*learned, tmp_path)
    main(["--model", str(tmp_path), "--sources", "one", "two", "--packs", "2"])
    table = json.loads(capsys.readouterr().out)
    assert set(table) == {"one", "two"}
    for row in table.values():
        assert set(row["accuracy"]) == set(row["majority_baseline"])
        assert 0 <= row["accuracy"][ALL] <= 1
        assert row["answers"] > 10
