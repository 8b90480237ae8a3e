"""What routers learn from is what the dense model does; they learn it, and an interruption changes nothing."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core.routers.learned import LearnedHead, Places
from oval_core.routers.learned_file import ModelSizes, save_learned
from oval_core.routers.output_head import OutputHead
from oval_core.routers.position_mlp import PositionMlpHead
from oval_core.routers.repair import InputRepair
from oval_core.training import __main__ as command
from oval_core.training import learning, run
from oval_core.training.course import STATE_FILE
from oval_core.training.learning import fit_scales, routing_loss
from oval_core.training.lessons import Lesson, Teacher, make_lessons
from oval_core.training.passages import PassageSettings, cut_passages, watch_passage
from oval_core.training.quantised import INT4_WEIGHTS, INT8_DYNAMIC, quantised, rounded
from oval_core.training.run import LearningSettings, Run
from oval_core.training.state import StateFile
from oval_core.training.tasks import RECORD_FILE, ROUTERS, load_router, train_router
from tests.core.tiny_models import llama, prompt
from tests.tiny_checkpoint import save_tiny_checkpoint

PASSAGES = PassageSettings(passages=2, context_tokens=64, every_tokens=32, asked_tokens=4, page_size=8)
LEARNING = LearningSettings(steps=6, batch=5, dim=8, budget_pages=4)
TEXTS = {"one": prompt(150)[0], "two": prompt(140, seed=1)[0]}
SIZES = ModelSizes(layers=1, heads=2, group=2, hidden_size=16, head_dim=8)
PAGES, LOOKED_FOR = 12, 0.9


def synthetic(seed: int, positions: int = 200) -> Lesson:
    """Pages matter: a hidden state says, in its own way for each KV head, which page holds nine tenths of the mass."""
    generator, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    languages = torch.randn(SIZES.heads, 8, SIZES.head_dim, generator=fixed)
    centroids = torch.randn(1, SIZES.heads, PAGES, SIZES.head_dim, generator=generator)
    target = torch.randint(1, PAGES - 1, (SIZES.heads, positions), generator=generator)
    wanted = [centroids[0, head, target[head]] @ languages[head].T for head in range(SIZES.heads)]
    share = torch.full((1, SIZES.heads, positions, PAGES), (1 - LOOKED_FOR) / (PAGES - 1))
    share[0].scatter_(-1, target[..., None], LOOKED_FOR)
    return Lesson(
        layers=torch.tensor([0]),
        positions=torch.full((positions,), 8 * PAGES),
        counts=torch.full((positions,), PAGES),
        starts=torch.arange(0, 8 * PAGES, 8),
        lengths=torch.full((PAGES,), 8),
        centroids=centroids,
        hidden=torch.cat(wanted, -1)[None],
        coarse=torch.zeros(1, SIZES.heads, SIZES.group, positions, PAGES),
        share=share,
    )


def found(head: LearnedHead, lesson: Lesson, repair: InputRepair | None = None) -> float:
    """How often the page that matters is ranked first."""
    hidden = lesson.hidden[0][None] if repair is None else repair(0, lesson.hidden[0][None])
    asked = head.ask(0, head.standardised(0, hidden), lesson.positions[None])
    places = Places(lesson.positions[None], lesson.starts[None], lesson.lengths[None])
    scores = head.scores(0, asked, head.page_keys(0, lesson.centroids), places, None)
    guess = scores.softmax(-1).mean(2)[0, ..., 1:-1]
    return (guess.argmax(-1) == lesson.share[0, ..., 1:-1].argmax(-1)).float().mean().item()


def trained(
    head: LearnedHead, lessons: list[Lesson], tmp_path: Path, repair: InputRepair | None = None, rate: float = 2e-2
) -> list[float]:
    name, settings = f"{repair is None}.pt", LearningSettings(steps=200, batch=64, rate=rate, dim=8, budget_pages=4)
    return Run(head, repair, settings, 0, StateFile(tmp_path / name, {})).through(lessons)


def test_a_window_moves_to_where_the_mass_is(tmp_path: Path) -> None:
    """All of it lies 30 tokens before each position, in pages that nothing else tells apart."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(60, 8 * PAGES, (200,), generator=generator)
    share = torch.nn.functional.one_hot((positions - 30) // 8, PAGES).float()
    lesson = dataclasses.replace(
        synthetic(0),
        positions=positions,
        counts=positions // 8,
        centroids=torch.zeros(1, SIZES.heads, PAGES, SIZES.head_dim),
        hidden=torch.randn(1, 200, SIZES.hidden_size, generator=generator) / 10,
        share=share.expand(1, SIZES.heads, -1, -1),
    )
    head = PositionMlpHead(SIZES, dim=8)

    def middle_offset() -> float:
        asked = head.ask(0, head.standardised(0, lesson.hidden), positions[None])
        return head.offsets(asked).median().item()

    assert middle_offset() > 55
    trained(head, [lesson], tmp_path, rate=2e-3)
    assert 20 < middle_offset() < 40


@pytest.mark.parametrize("kind", [PositionMlpHead, OutputHead])
def test_a_head_learns_which_pages_matter(kind: type[LearnedHead], tmp_path: Path) -> None:
    head, lessons, held_out = kind(SIZES, dim=8), [synthetic(seed) for seed in range(8)], synthetic(100)
    before, base = found(head, held_out), {name: tensor.clone() for name, tensor in head.named_buffers()}
    losses = trained(head, lessons, tmp_path)
    assert sum(losses[-20:]) < 0.8 * sum(losses[:20])
    after = found(head, held_out)
    assert after > max(0.5, 2 * before)  # random: 1 of 10
    assert all(torch.equal(tensor, base[name]) for name, tensor in head.named_buffers())


def test_a_repair_brings_the_router_back(tmp_path: Path) -> None:
    """Hidden states have lost a direction's sign; the router stays as it is."""
    head, lessons, held_out = PositionMlpHead(SIZES, dim=8), [synthetic(seed) for seed in range(8)], synthetic(100)
    trained(head, lessons, tmp_path)
    clean = found(head, held_out)
    head.requires_grad_(False)
    frozen = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    turn = torch.eye(16)
    turn[:4, :4] *= -1.0
    bent = [dataclasses.replace(lesson, hidden=lesson.hidden @ turn) for lesson in (*lessons, held_out)]
    before, repair = found(head, bent[-1]), InputRepair(SIZES)
    trained(head, bent[:-1], tmp_path, repair)
    after = found(head, bent[-1], repair)
    assert before < after <= clean + 0.1
    assert after - before > 0.3 * (clean - before)
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in head.state_dict().items())


def test_the_loss_by_hand() -> None:
    """One head of one query; three pages free between a sink and a window of one page each."""
    sizes = dataclasses.replace(SIZES, heads=1, group=1)
    lesson = dataclasses.replace(
        synthetic(0, positions=1),
        counts=torch.tensor([5]),
        centroids=torch.randn(1, 1, PAGES, 8),
        share=torch.tensor([0.5, 0.2, 0.1, 0.05, 0.15, *[0.0] * 7]).view(1, 1, 1, PAGES),
    )
    head = LearnedHead(sizes, dim=8)
    scores = torch.randn(1, 1, 1, 1, PAGES)
    head.ask = lambda layer, hidden, positions: None  # type: ignore[method-assign, assignment, return-value]
    head.scores = lambda *_: scores  # type: ignore[method-assign]
    q = scores[0, 0, 0, 0, 1:4].softmax(-1)
    expected = -(torch.tensor([0.2, 0.1, 0.05]) * (1 - q) ** 2 * q.log()).sum()
    torch.testing.assert_close(routing_loss(head, lesson, torch.Generator(), 2.0, (1, 1)), expected)
    plain = -(torch.tensor([0.2, 0.1, 0.05]) * q.log()).sum()
    torch.testing.assert_close(routing_loss(head, lesson, torch.Generator(), 0.0, (1, 1)), plain)


def test_lessons_are_where_the_dense_model_looks() -> None:
    """Compared with the attention weights of transformers' eager attention."""
    model: Any = llama()
    tokens, teacher = prompt(64)[0], Teacher()
    watch_passage(model, tokens, teacher, PASSAGES)
    lesson = teacher.lesson()
    asked = [*range(28, 32), *range(60, 64)]
    assert lesson.positions.tolist() == asked
    assert lesson.counts.tolist() == [3] * 4 + [7] * 4
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(tokens[None], output_attentions=True, output_hidden_states=True)
    for layer in range(2):
        weights = output.attentions[layer][0, :, asked].unflatten(0, (2, 2)).unflatten(-1, (8, 8)).sum(-1)
        for number, count in enumerate(lesson.counts.tolist()):
            there = weights[:, :, number, :count]
            share = (there / there.sum(-1, keepdim=True)).mean(1)
            torch.testing.assert_close(lesson.share[layer, :, number, :count].float(), share, atol=1e-3, rtol=1e-2)
            assert not lesson.share[layer, :, number, count:].any()
        hidden = model.model.layers[layer].input_layernorm(output.hidden_states[layer][0, asked])
        torch.testing.assert_close(lesson.hidden[layer].float(), hidden.detach(), atol=1e-2, rtol=1e-2)


def test_lessons_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, passages = llama(), cut_passages(TEXTS, PASSAGES)[0]
    first = make_lessons(tmp_path, model, passages, PASSAGES, {"seed": 0}, coarse=True)
    monkeypatch.setattr("oval_core.training.lessons.watch_passage", None)
    again = make_lessons(tmp_path, model, passages, PASSAGES, {"seed": 0}, coarse=True)
    assert all(torch.equal(tensor, vars(again[1])[name]) for name, tensor in vars(first[1]).items())
    without = make_lessons(tmp_path, model, passages, PASSAGES, {"seed": 0})[1]
    assert without == dataclasses.replace(without, coarse=None)
    assert without.at(torch.tensor([0])).to(torch.device("cpu")).coarse is None
    with pytest.raises(ValueError, match=r"0000\.safetensors was made with seed=0, expected seed=1"):
        make_lessons(tmp_path, model, passages, PASSAGES, {"seed": 1})


def test_scales_standardise() -> None:
    head, lesson = PositionMlpHead(SIZES, dim=8), synthetic(0)
    lesson = dataclasses.replace(lesson, hidden=100 * lesson.hidden, centroids=5 * lesson.centroids + 40)
    fit_scales(head, [lesson])
    seen = head.standardised(0, lesson.hidden[0])
    torch.testing.assert_close(seen.square().mean(0), torch.ones(16))
    centroids = (lesson.centroids[0] - head.key_mean[0][:, None]) * head.key_scale[0][:, None]
    torch.testing.assert_close(centroids.mean(1), torch.zeros(2, 8), atol=1e-4, rtol=0)
    torch.testing.assert_close(centroids.std(1), torch.ones(2, 8))


def test_passages_are_cut_and_held_out_ones_come_from_the_ends() -> None:
    learned, held_out = cut_passages({"long": torch.arange(100, 500), "short": torch.arange(1000, 1140)}, PASSAGES)
    assert all(len(part) == 64 for part in (*learned, *held_out))
    assert [part[0].item() for part in held_out] == [436, 1076]
    assert not {*torch.cat(learned).tolist()} & {*torch.cat(held_out).tolist()}


def _interrupt_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Press Ctrl-C in a certain step."""
    real: Callable[..., Tensor] = learning.routing_loss
    calls = iter(range(call + 1))

    def pressed(*arguments: Any) -> Tensor:
        if next(calls, None) == call:
            signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(run, "routing_loss", pressed)


@pytest.mark.parametrize("router", sorted(ROUTERS))
def test_an_interrupted_training_comes_to_the_same_weights(
    router: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lessons = tmp_path / "lessons"
    whole = train_router(tmp_path / "whole", model, TEXTS, router, PASSAGES, LEARNING, lessons)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        _interrupt_at(patched, 3)
        train_router(tmp_path / "parts", model, TEXTS, router, PASSAGES, LEARNING, lessons)
    assert torch.load(tmp_path / "parts" / STATE_FILE, weights_only=True)["content"]["step"] == 4
    assert train_router(tmp_path / "parts", model, TEXTS, router, PASSAGES, LEARNING, lessons) == whole
    both = [load_router(tmp_path / name / "router.safetensors").head.state_dict() for name in ("whole", "parts")]
    assert all(torch.equal(tensor, both[1][name]) for name, tensor in both[0].items())
    records = [json.loads((tmp_path / name / RECORD_FILE).read_text()) for name in ("whole", "parts")]
    assert records[0]["validation"] == records[1]["validation"]
    assert not (tmp_path / "parts" / STATE_FILE).exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_was_trained_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING)
    assert set(first) == {"random", "window", "quest", "box", "basis", "oracle", "output-head"}
    monkeypatch.setattr(run, "routing_loss", None)
    assert train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING) == first
    more = dataclasses.replace(LEARNING, steps=7)
    with pytest.raises(ValueError, match="was made with steps=6, expected steps=7"):
        train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, more)
    with pytest.raises(ValueError, match=r"router must be one of .*, got 'guess'"):
        train_router(tmp_path, llama(), TEXTS, "guess", PASSAGES, LEARNING)


def test_a_quantised_copy() -> None:
    model: Any = llama()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = torch.randn(5, 40)
    levels = rounded(weight)
    assert levels.shape == weight.shape
    assert len(levels[0, :32].unique()) <= 16
    scale = weight[:, :32].abs().amax(-1, keepdim=True) / 7
    assert ((levels - weight)[:, :32].abs() <= scale / 2 + 1e-6).all()
    with torch.no_grad():
        text = prompt(20)
        plain = model(text).logits
        for kind in (INT4_WEIGHTS, INT8_DYNAMIC):
            other = quantised(model, kind)
            assert 0 < (other(text).logits - plain).abs().max() < plain.abs().max()
            assert torch.equal(other.get_output_embeddings().weight, before["lm_head.weight"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match=r"quantised as one of .*, got 'int2'"):
        quantised(model, "int2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PassageSettings(passages=0), "passages must be an integer >= 1, got 0"),
        (lambda: PassageSettings(every_tokens=20), "every_tokens must be more than twice .*, got 20"),
        (lambda: PassageSettings(context_tokens=300), "context_tokens must be at least twice .*, got 300"),
        (lambda: PassageSettings(held_out=1.0), "held_out must be between 0 and 1, got 1.0"),
        (lambda: PassageSettings(page_size=9), "page_size must be one of"),
        (lambda: LearningSettings(steps=0), "steps must be an integer >= 1, got 0"),
        (lambda: LearningSettings(rate=0.0), "rate must be a finite number > 0, got 0.0"),
        (lambda: LearningSettings(focus=-1.0), "focus must be a finite number >= 0, got -1.0"),
        (lambda: LearningSettings(budget_pages=1), "budget_pages must be an integer >= 3"),
        (lambda: cut_passages({}, PASSAGES), "at least one text, got none"),
        (lambda: cut_passages({"one": torch.arange(127)}, PASSAGES), "one: expected at least 128 tokens .* got 127"),
    ],
)
def test_impossible_settings_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_the_command_trains_a_router_and_its_repair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = save_tiny_checkpoint(tmp_path / "model"), tmp_path / "text.txt"
    text.write_text("It is a truth universally acknowledged. " * 8)
    common = ["--model", str(model), "--text", str(text), "--passages", "1", "--context-tokens", "96"]
    common += ["--every-tokens", "48", "--asked-tokens", "2", "--steps", "2", "--budget-pages", "4", "--batch", "2"]
    command.main(
        [*common, "--router", "position-mlp", "--out", str(tmp_path / "router"), "--lessons", str(tmp_path / "lessons")]
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["budget_pages"] == 4
    assert (tmp_path / "lessons" / "0000.safetensors").exists()
    assert {"box", "quest", "basis", "position-mlp"} <= set(report["hit_rates"])
    file = tmp_path / "router" / "router.safetensors"
    repair = [*common, "--repair", str(file), "--out", str(tmp_path / "repair")]
    command.main([*repair, "--quantise", INT4_WEIGHTS, "--lessons", str(tmp_path / "quantised")])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["hit_rates"]) == {"float", "before", "after"}
    assert (tmp_path / "quantised" / "0000.safetensors").exists()
    monkeypatch.setattr(torch.ao.quantization, "quantize_dynamic", None)
    with pytest.raises(SystemExit):
        command.main([*repair[:-1], str(tmp_path / "other")])
    assert "int8-dynamic needs torch.ao.quantization.quantize_dynamic" in capsys.readouterr().err
    assert json.loads((tmp_path / "router" / "training.json").read_text())["about"]["model"] == "model"


@pytest.mark.parametrize(
    ("content", "more", "message"),
    [
        (None, ["--router", "output-head"], "No such file or directory"),
        (" \n", ["--router", "output-head"], "expected a text, got an empty file"),
        ("text", ["--router", "output-head", "--steps", "0"], "steps must be an integer >= 1, got 0"),
        ("text", ["--repair", "none.safetensors"], "expected a learned router in none.safetensors, got no file"),
        (
            "text",
            ["--router", "output-head", "--quantise", INT4_WEIGHTS],
            "--quantise is for a --repair, got int4-weights",
        ),
        ("text", [], "one of the arguments --router --repair is required"),
    ],
)
def test_the_command_names_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, more: list[str], message: str
) -> None:
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_text(content)
    with pytest.raises(SystemExit):
        command.main(["--model", "none", "--text", str(text), "--out", str(tmp_path / "out"), *more])
    assert message in capsys.readouterr().err


def test_other_files_are_no_router(tmp_path: Path) -> None:
    save_learned(tmp_path / "repair.safetensors", InputRepair(SIZES))
    with pytest.raises(ValueError, match=r"expected one of \['output head', 'position MLP'\], got 'input repair'"):
        load_router(tmp_path / "repair.safetensors")
