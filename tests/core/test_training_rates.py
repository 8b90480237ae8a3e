"""Hit rates are those of the right router on the right model at the right budget, and go with the right weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core.routers import make_router
from oval_core.routers.learned_file import ModelSizes
from oval_core.routers.output_head import OutputHead, OutputHeadRouter
from oval_core.routers.repair import RepairedRouter
from oval_core.training import hits, lessons, run
from oval_core.training.hits import hit_rates, rehearse
from oval_core.training.lessons import Teacher, make_lessons
from oval_core.training.passages import PassageSettings, cut_passages, watch_passage
from oval_core.training.quantised import INT4_WEIGHTS, quantised
from oval_core.training.record import Record
from oval_core.training.run import LearningSettings
from oval_core.training.tasks import (
    RECORD_FILE,
    REPAIR_FILE,
    ROUTER_FILE,
    load_router,
    train_repair,
    train_router,
)
from tests.core.scenes import small_config
from tests.core.tiny_models import llama, prompt

PASSAGES = PassageSettings(passages=2, context_tokens=64, every_tokens=32, asked_tokens=4, page_size=8)
LEARNING = LearningSettings(steps=6, batch=5, dim=8, budget_pages=4)
TEXTS = {"one": prompt(150)[0], "two": prompt(140, seed=1)[0]}
LEARNED, HELD_OUT = cut_passages(TEXTS, PASSAGES)


def test_hit_rates_are_ordered() -> None:
    config = small_config(budget_pages=4)
    routers = {name: make_router(dataclasses.replace(config, router=name)) for name in ("oracle", "quest", "random")}
    passages = cut_passages(TEXTS, PASSAGES)[1]
    rates = hit_rates(llama(), passages, routers, PASSAGES, 4)
    assert 0 < rates["random"] < rates["quest"] <= rates["oracle"] < 1
    alone = hit_rates(llama(), passages, {"quest": routers["quest"]}, PASSAGES, 4)
    assert alone["quest"] == rates["quest"]


def lively_router(model: Any) -> OutputHeadRouter:
    head = OutputHead(ModelSizes.of(model), dim=8)
    torch.nn.init.normal_(head.adapter_out)
    return OutputHeadRouter(head)


def best_by_hand(model: Any, tokens: Tensor, others: int) -> Tensor:
    """Of the mass on the seven sealed pages of a passage, the share on the first, the last and the best `others`.

    From the weights of transformers' eager attention, for each layer, KV head and each of the last four queries.
    """
    with torch.no_grad():
        attentions = model(tokens[None], output_attentions=True).attentions
    weights = torch.stack(attentions)[:, 0, :, 60:, :56].unflatten(-1, (7, 8)).sum(-1)  # [layers, heads, 4, P]
    share = (weights / weights.sum(-1, keepdim=True)).unflatten(1, (2, 2)).mean(2)  # of each group
    return share[..., [0, 6]].sum(-1) + share[..., 1:6].topk(others, -1).values.sum(-1)


@pytest.mark.parametrize("budget_pages", [5, 6])
def test_hit_rates_by_hand(budget_pages: int) -> None:
    """One page of the budget is for the open tokens."""
    oracle = {"oracle": make_router(small_config(router="oracle"))}
    rates = hit_rates(llama(), HELD_OUT, oracle, PASSAGES, budget_pages)
    model: Any = llama()
    model.set_attn_implementation("eager")
    expected = torch.stack([best_by_hand(model, tokens, budget_pages - 3) for tokens in HELD_OUT])
    assert rates["oracle"] == pytest.approx(expected.mean().item(), abs=1e-5)


def test_a_rehearsal_is_an_examination_without_the_model() -> None:
    model, router = llama(), lively_router(llama())
    rehearsal = rehearse(model, HELD_OUT[0], PASSAGES, 4)
    rates = []
    for _ in range(2):
        one = dataclasses.replace(PASSAGES, asked_tokens=1)
        rates.append(hit_rates(model, HELD_OUT[:1], {"it": router}, one, 4)["it"])
        assert rehearsal.hit_rate(router) == pytest.approx(rates[-1])
        with torch.no_grad():  # it learns something
            router.head.key.copy_(torch.randn(router.head.key.shape, generator=torch.Generator().manual_seed(0)))
    assert rates[0] != rates[1]


@pytest.mark.parametrize(("every", "asked", "context"), [(32, 4, 64), (32, 1, 65), (20, 9, 50), (33, 12, 70)])
def test_a_budget_that_leaves_nothing_out_is_refused_before_anything_is_read(
    every: int, asked: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PassageSettings(2, context, every, asked, page_size=8)
    fewer, teacher = dataclasses.replace(settings, asked_tokens=min(4, asked)), Teacher()
    watch_passage(llama(), prompt(context)[0], teacher, fewer)
    most = int(teacher.lesson().counts.max())
    router = {"box": make_router(small_config(router="box"))}
    assert hit_rates(llama(), [prompt(context)[0]], router, settings, most)["box"] < 1
    for module in (hits, lessons):
        monkeypatch.setattr(module, "watch_passage", None)
    message = f"budget_pages must be at most {most} to leave a page out of {context} tokens, got {most + 1}"
    learning = dataclasses.replace(LEARNING, budget_pages=most + 1)
    with pytest.raises(ValueError, match=message):
        train_router(tmp_path / "out", llama(), TEXTS, "output-head", settings, learning)
    with pytest.raises(ValueError, match=message):
        train_repair(tmp_path / "out", llama(), TEXTS, lively_router(llama()), INT4_WEIGHTS, settings, learning)
    assert not (tmp_path / "out").exists()


def test_hit_rates_with_another_budget_need_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING)
    monkeypatch.setattr(run, "routing_loss", None)
    more = dataclasses.replace(LEARNING, budget_pages=6)
    found = train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, more)
    by_hand = hit_rates(llama(), HELD_OUT, {"it": load_router(tmp_path / ROUTER_FILE)}, PASSAGES, 6)
    assert found["output-head"] == by_hand["it"]
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    assert record["hit_rates"] == found
    assert record["about"]["budget_pages"] == 6
    assert record["train_s"] > 0


def test_an_interrupted_training_goes_on_with_another_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched, pytest.raises(OSError, match="power cut"):  # noqa: PT012
        patched.setattr(run.Run, "_validate", lambda self: self.state.save(self._content()))
        patched.setattr("oval_core.training.course.Record.add_weights", _power_cut)
        train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING)
    monkeypatch.setattr(run, "routing_loss", None)
    more = dataclasses.replace(LEARNING, budget_pages=5)
    assert train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, more)["output-head"] < 1


def _power_cut(*_: object) -> None:
    raise OSError("power cut")


def test_what_another_model_taught_is_refused(tmp_path: Path) -> None:
    """It has the same name and sizes."""
    train_router(tmp_path / "out", llama(), TEXTS, "output-head", PASSAGES, LEARNING, tmp_path / "lessons")
    for out in ("out", "new"):
        with pytest.raises(ValueError, match=r"was made with model_weights=.*, expected model_weights="):
            train_router(tmp_path / out, llama(seed=1), TEXTS, "output-head", PASSAGES, LEARNING, tmp_path / "lessons")


def test_a_record_without_weights_is_no_finished_training(tmp_path: Path) -> None:
    first = train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING)
    weights = load_router(tmp_path / ROUTER_FILE).head.state_dict()
    (tmp_path / ROUTER_FILE).unlink()
    assert train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING) == first
    again = load_router(tmp_path / ROUTER_FILE).head.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights.items())


def test_a_training_is_watched_on_a_held_out_passage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learning = dataclasses.replace(LEARNING, steps=23)
    train_router(tmp_path, llama(), TEXTS, "position-mlp", PASSAGES, learning)
    validation = json.loads((tmp_path / RECORD_FILE).read_text())["validation"]
    assert [one["step"] for one in validation] == [3, 6, 9, 12, 15, 18, 21, 23]
    assert {one["budget_pages"] for one in validation} == {4}
    one = dataclasses.replace(PASSAGES, asked_tokens=1)
    by_hand = hit_rates(llama(), HELD_OUT[:1], {"it": load_router(tmp_path / ROUTER_FILE)}, one, 4)["it"]
    assert validation[-1]["hit_rate"] == pytest.approx(by_hand)
    assert f"held out {by_hand:.3f}" in capsys.readouterr().err


def test_a_router_is_trained_on_standardised_inputs(tmp_path: Path) -> None:
    train_router(tmp_path, llama(), TEXTS, "output-head", PASSAGES, LEARNING)
    head: Any = load_router(tmp_path / ROUTER_FILE).head
    made = make_lessons(tmp_path / "fresh", llama(), LEARNED, PASSAGES, {})
    for layer in range(2):
        hidden = torch.cat([lesson.hidden[layer].float() for lesson in made])
        torch.testing.assert_close(head.standardised(layer, hidden).square().mean(0), torch.ones(64))
        centroids = torch.cat([lesson.centroids[layer].float() for lesson in made], 1)
        torch.testing.assert_close(head.key_mean[layer], centroids.mean(1))


def test_a_repair_is_trained_and_measured_on_the_quantised_model(tmp_path: Path) -> None:
    model = llama()
    router, learning = lively_router(model), dataclasses.replace(LEARNING, rate=0.5)
    rates = train_repair(tmp_path, model, TEXTS, router, INT4_WEIGHTS, PASSAGES, learning)
    copy = quantised(model, INT4_WEIGHTS)
    repaired = RepairedRouter.load(router, tmp_path / REPAIR_FILE)
    by_hand = {
        "float": hit_rates(model, HELD_OUT, {"it": router}, PASSAGES, 4)["it"],
        "before": hit_rates(copy, HELD_OUT, {"it": router}, PASSAGES, 4)["it"],
        "after": hit_rates(copy, HELD_OUT, {"it": repaired}, PASSAGES, 4)["it"],
    }
    assert rates == by_hand
    assert len({*rates.values()}) == 3
    record = json.loads((tmp_path / RECORD_FILE).read_text())
    about, one = record["about"], dataclasses.replace(PASSAGES, asked_tokens=1)
    watched = hit_rates(copy, HELD_OUT[:1], {"it": repaired}, one, 4)["it"]
    assert record["validation"][-1]["hit_rate"] == pytest.approx(watched)
    source = {name: about[name] for name in about if name not in ("repaired", "router_weights", *vars(LEARNING))}
    for number, lesson in enumerate(make_lessons(tmp_path / "lessons", copy, LEARNED, PASSAGES, source)):
        on_copy, on_model = (
            make_lessons(tmp_path / name, of, LEARNED, PASSAGES, {})[number] for name, of in (("q", copy), ("f", model))
        )
        assert torch.equal(lesson.hidden, on_copy.hidden)
        assert torch.equal(lesson.share, on_copy.share)
        assert not torch.equal(lesson.share, on_model.share)


def test_a_repair_is_for_the_model_of_its_router(tmp_path: Path) -> None:
    wrong = OutputHeadRouter(OutputHead(ModelSizes(layers=1, heads=2, group=2, hidden_size=16, head_dim=8)))
    with pytest.raises(ValueError, match="the output head is for another model"):
        train_repair(tmp_path, llama(), TEXTS, wrong, INT4_WEIGHTS, PASSAGES, LEARNING)


@pytest.mark.parametrize("content", ["", "{}", "null", '{"about": 3}'])
def test_what_is_no_record_is_named(tmp_path: Path, content: str) -> None:
    record, weights = tmp_path / "training.json", tmp_path / "weights"
    record.write_text(content)
    weights.touch()
    with pytest.raises(ValueError, match=r"training.json: expected the record of a training, got something else"):
        Record(record, weights, {})
