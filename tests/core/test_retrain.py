"""A low hit rate asks for a training; it is done between two generations, and the next one finds more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import Handle, OvalConfig, attach
from oval_core.attach import binding_of
from oval_core.metrics import retrain
from oval_core.metrics.retrain import Retrainer, fitting
from oval_core.metrics.watch import Watch
from oval_core.training.run import LearningSettings
from oval_core.training.tasks import RECORD_FILE, ROUTER_FILE
from tests.core.tiny_models import generate, llama, prompt

CONFIG = OvalConfig(page_size=8, budget_pages=8, seal_tokens=1, router="window", impl="reference", stats_every=1)
QUICK = LearningSettings(steps=8, batch=16, rate=5e-3, dim=8, coarse=True)


def asked(out: Path, text: Tensor, learning: LearningSettings = QUICK) -> tuple[Watch, Retrainer, float]:
    """A watch whose retrainer was called while the model generated, and the hit rate of that."""
    retrainer, watch = Retrainer(out, learning=learning), Watch(attach(llama(), CONFIG))
    watch.on_low_hit_rate(0.99, 3, retrainer)
    generate(watch.handle.model, text, max_new_tokens=12)
    return watch, retrainer, watch.handle.stats()["route_hit_rate"]


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_the_next_generation_finds_more(mode: Any, tmp_path: Path) -> None:
    text = prompt(300)
    with mode():
        watch, retrainer, before = asked(tmp_path, text)
        old, tokens = watch.handle, retrainer.tokens
        assert tokens is not None
        assert torch.equal(tokens[:, :300], text)
        handle = retrainer.retrain(watch)
        assert (watch.handle, old.config.router) == (handle, "window")
        generate(handle.model, text, max_new_tokens=12)
        after = handle.stats()["route_hit_rate"]
    assert retrainer.hit_rates["after"] > retrainer.hit_rates["before"] + 0.02
    assert after > before + 0.02
    assert {file.name for file in (tmp_path / "0").iterdir()} == {ROUTER_FILE, RECORD_FILE}
    assert not any(parameter.requires_grad for parameter in handle.config.router.head.parameters())  # type: ignore[union-attr]
    assert handle.config.budget_pages == CONFIG.budget_pages
    assert watch.snapshot.report["steps"] < 12
    assert retrainer.tokens is not None  # the alarm is still there: 0.99 is out of reach
    watch.close()
    handle.detach()
    assert binding_of(handle.model) is None


def test_nothing_happens_unless_it_is_due(tmp_path: Path) -> None:
    with attach(llama(), CONFIG) as handle, Watch(handle) as watch:
        assert Retrainer(tmp_path).retrain(watch) is handle
    assert not [*tmp_path.iterdir()]


def test_a_router_that_finds_less_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrain, "hit_rates", lambda *_: {"before": 0.8, "after": 0.7})
    watch, retrainer, _ = asked(tmp_path, prompt(300, rows=2))
    handle = retrainer.retrain(watch)
    assert handle.config == CONFIG
    assert handle is watch.handle
    watch.close()


def test_too_few_tokens_leave_the_model_attached(tmp_path: Path) -> None:
    watch, retrainer, _ = asked(tmp_path, prompt(90))
    with pytest.raises(ValueError, match=r"expected 144 tokens or more .* pages of 8, got"):
        retrainer.retrain(watch)
    assert retrainer.tokens is None
    assert generate(watch.handle.model, prompt(90)).sequences.shape == (1, 98)
    assert watch.handle.stats()["pages_read_mean"] == 8
    watch.close()


@pytest.mark.parametrize(("tokens", "page_size"), [(144, 8), (300, 8), (1000, 16), (1000, 32)])
def test_passages_fit_into_the_tokens(tokens: int, page_size: int) -> None:
    for share in (0.0, 0.2, 1.0):
        settings, budget = fitting(tokens, page_size, share)
        assert 3 * settings.context_tokens <= tokens
        assert 4 <= budget <= settings.context_tokens // page_size
    with pytest.raises(ValueError, match="got 80"):
        fitting(80, page_size, 0.2)


def test_a_watch_follows_another_handle() -> None:
    model = llama()
    first = attach(model, CONFIG)
    watch = Watch(first, refresh_s=0)
    first.detach()
    with pytest.raises(ValueError, match="detached"):
        watch.follow(first)
    second: Handle = attach(model, CONFIG)
    watch.follow(second)
    text = generate(model, prompt(100), max_new_tokens=5).sequences
    assert torch.equal(watch.last_tokens(), text[:, :-1])
    assert watch.snapshot.report == second.stats()
    watch.close()
    second.detach()
