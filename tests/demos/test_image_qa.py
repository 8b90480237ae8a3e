"""Questions about images, dense and with OVAL, from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from PIL import Image, ImageChops

from demos import image_qa, tiny_llava
from demos.image_qa import IMAGES, SAMPLES
from demos.tiny_llava import Reader, load
from oval_core import OvalConfig
from oval_mm.recipes.scene_questions import questions
from oval_mm.recipes.scenes import draw_scene, make_scene, split_of
from tests.mm.tiny_vlms import NAMES, TinyVlm, photo, save, tiny, words

SPARSE = OvalConfig(page_size=8, budget_pages=4, seal_tokens=1, impl="reference")
FULL = OvalConfig(page_size=8, budget_ratio=1.0, always_paged=True, seal_tokens=1, impl="reference")
FULL_BUDGET = OvalConfig(page_size=8, budget_pages=90, seal_tokens=1)
TURNS = (words(4, 1), words(3, 2))


def template(image: str) -> str:
    """Images and words in order, nothing else."""
    part = "{{ 'IMAGE ' if part.type == 'image' else part.text ~ ' ' }}".replace("IMAGE", image)
    return "word0 {% for message in messages %}{% for part in message.content %}" + part + "{% endfor %}{% endfor %}"


def talking(name: str) -> TinyVlm:
    vlm = tiny(name)
    vlm.processor.chat_template = template(vlm.image)
    return vlm


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with a chat template, and with enough image tokens to be sealed, on disk."""
    path = tmp_path_factory.mktemp("llava")
    save("llava", path)
    config: Any = transformers.AutoConfig.from_pretrained(path)
    config.vision_config.image_size = 70
    model: Any = transformers.AutoModelForImageTextToText.from_config(config)
    model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    model.save_pretrained(path)
    processor: Any = transformers.AutoProcessor.from_pretrained(path)
    processor.image_processor.size = {"shortest_edge": 70}
    processor.image_processor.crop_size = {"height": 70, "width": 70}
    processor.chat_template = template("<image>")
    processor.save_pretrained(path)
    return path


def talk(vlm: TinyVlm, config: OvalConfig | None, pictures: list[Image.Image]) -> list[str]:
    reader, said = Reader(vlm.model, vlm.processor, pictures, config, most_tokens=5), list[tuple[str, str]]()
    for question in TURNS:
        said.append((question, reader.answer(said, question).text))
    return [answer for _, answer in said]


@pytest.mark.parametrize(("name", "count"), [*((name, 1) for name in NAMES), ("llava", 2), ("idefics3", 2)])
def test_a_conversation_is_what_generate_says(name: str, count: int) -> None:
    vlm = talking(name)
    pictures = [photo(index) for index in range(count)]
    answers = talk(vlm, None, pictures)
    prompt = f"word0 {'* ' * count}{TURNS[0]} "
    for question, answer in zip([None, *TURNS[1:]], answers, strict=True):
        prompt += "" if question is None else f"{question} "
        inputs = vlm.inputs((prompt, pictures))
        tokens = vlm.model.generate(**inputs, do_sample=False, max_new_tokens=5)[0, inputs["input_ids"].shape[1] :]
        assert vlm.processor.tokenizer.decode(tokens) == answer
        prompt += f"{answer} "
    assert talk(vlm, FULL, pictures) == answers


def test_reading_less_is_reported_for_every_turn() -> None:
    vlm = talking("llava")
    reader = Reader(vlm.model, vlm.processor, [photo(0)], SPARSE, most_tokens=5)
    first = reader.answer([], TURNS[0])
    second = reader.answer([(TURNS[0], first.text)], TURNS[1])
    for answer in (first, second):
        assert 0 < answer.read_ratio < 1
        assert 0 < answer.image_pages < 1
        assert answer.dense_steps == {}
        assert [heat.shape for heat in answer.heats] == [(len(answer.words), 5, 5)]
        assert len(answer.words) == 5
        assert "".join(answer.words) == answer.text.replace(" ", "")


def test_pictures_are_encoded_once() -> None:
    vlm = talking("llava")
    tower, calls = vlm.model.base_model.vision_tower, list[int]()
    hook = tower.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        talk(vlm, SPARSE, [photo(0)])
        assert len(calls) == 1
        talk(vlm, None, [photo(0)])
        assert len(calls) == 2
    finally:
        hook.remove()


def test_another_past_is_read_again() -> None:
    vlm = talking("llava")
    reader = Reader(vlm.model, vlm.processor, [photo(0)], SPARSE, most_tokens=5)
    first = reader.answer([], TURNS[0])
    reader.answer([(TURNS[0], first.text)], TURNS[1])
    assert reader.answer([], TURNS[0]).text == first.text


def test_where_every_page_is_read_there_is_no_heat() -> None:
    vlm = talking("llava")
    answer = Reader(vlm.model, vlm.processor, [photo(0)], OvalConfig(budget_pages=90), most_tokens=3).answer(
        [], "word1"
    )
    assert (answer.read_ratio, answer.image_pages, list(answer.heats)) == (1.0, 1.0, [])
    assert sum(answer.dense_steps.values()) == 3


def test_questions_that_cannot_be_asked_are_refused() -> None:
    vlm = talking("llava")
    reader = Reader(vlm.model, vlm.processor, [photo(0)], SPARSE)
    with pytest.raises(ValueError, match="expected a question, got nothing"):
        reader.answer([], "  ")
    vlm.processor.chat_template = "{{ messages[0].content[-1].text }}"
    with pytest.raises(ValueError, match=r"total 0 <image> tokens and 1 images|leaves the pictures out"):
        reader.answer([], "word1")
    vlm.processor.chat_template = None
    with pytest.raises(ValueError, match="LlavaProcessor has no chat template"):
        reader.answer([], "word1")


def test_the_command_answers_about_a_picture(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photo(3).save(tmp_path / "photo.png")
    out = tmp_path / "out"
    arguments = [str(tmp_path / "photo.png"), "word3 word4?", "--model", str(folder), "--out", str(out)]
    image_qa.main([*arguments, "--budget-pages", "3", "--new-tokens", "3"])
    shown = capsys.readouterr().out
    assert "KV bytes" in shown
    assert "photo.png" in shown
    assert (out / "photo_1_word3_word4.png").read_bytes().startswith(b"\x89PNG")


def test_the_samples_are_shown_without_arguments(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tiny_llava, "FOLDER", folder)
    image_qa.main(["--out", str(tmp_path), "--new-tokens", "2"])
    assert len(list(tmp_path.iterdir())) == sum(map(len, SAMPLES.values()))
    assert capsys.readouterr().out.count("read: ") == sum(map(len, SAMPLES.values()))


def test_a_budget_that_covers_everything_draws_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = str(IMAGES / next(iter(SAMPLES)))
    image_qa.main([image, "--model", str(folder), "--out", str(tmp_path / "out"), "--share", "1", "--new-tokens", "2"])
    assert "every page was read: {'budget covers every page': 2}" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "is empty"), (b"some text", "is not a picture but a text file")]
)
def test_what_is_no_picture_ends_the_command_with_a_message(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "photo.png").write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        image_qa.main([str(tmp_path / "photo.png"), "what is there?"])


def test_models_that_cannot_be_used_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny_llava, "FOLDER", tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"python -m oval_mm\.recipes\.train --out DIR"):
        load()
    with pytest.raises(SystemExit, match="the small LLaVA is not in"):
        image_qa.main([])
    with pytest.raises(SystemExit, match="image_qa: "):
        image_qa.main(["--model", str(tmp_path / "nothing")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--share", "0"], "budget_ratio must be a number in (0, 1], got 0.0"),
        (["--budget-pages", "1"], "budget_pages must be an integer >= 3"),
        (["--budget-pages", "5", "--share", "0.5"], "not allowed with argument"),
        (["--new-tokens", "0"], "must be at least 1, got 0"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        image_qa.main(arguments)
    assert message in capsys.readouterr().err


def test_the_samples_are_scenes_of_the_test_split_with_right_answers() -> None:
    for name, turns in SAMPLES.items():
        seed = int(Path(name).stem.removeprefix("scene_"))
        assert split_of(seed) == "test"
        assert set(turns) <= {(asked.question, asked.answer) for asked in questions(make_scene(seed))}
        with Image.open(IMAGES / name) as stored:
            assert ImageChops.difference(stored.convert("RGB"), draw_scene(seed)[0]).getbbox() is None


def test_the_right_weights_are_loaded(folder: Path) -> None:
    model, processor = load(folder)
    assert not model.training
    assert model.dtype == torch.float32 or torch.cuda.is_available()
    assert type(processor).__name__ == "LlavaProcessor"
