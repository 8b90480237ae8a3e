"""Optional parts are measured once, small; they get the same bytes, and their table says what was not measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import readme, routers
from benchmarks.attention_clock import attention_clock
from benchmarks.router_parts import LEARNED_ON, SIZING_FILE, Part, learned, untrained
from benchmarks.settings import Setting, paid_for
from demos.smollm2 import load_model
from oval_core import OvalConfig, attach
from oval_core.page_sizing import SelfSizedPages, SizingHead
from oval_core.page_sizing.training import record_of
from oval_core.routers.learned_file import ModelSizes, save_learned
from oval_core.routers.output_head import OutputHead
from oval_core.routers.repair import InputRepair
from oval_core.training.tasks import RECORD_FILE, REPAIR_FILE, ROUTER_FILE
from tests.tiny_checkpoint import save_tiny_checkpoint

SIZES = ModelSizes(layers=3, heads=2, group=2, hidden_size=32, head_dim=16)
RATES = {"float": 0.8, "before": 0.5, "after": 0.7}


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("routers"))


@pytest.fixture(name="trained")
def _trained(tmp_path: Path) -> Path:
    """An output head, one that adds to the coarse score, and a repair of the first."""
    settings = {name: 1500 + at for at, name in enumerate(LEARNED_ON)}
    folder, repair = tmp_path / "learned", {**settings, "repaired": "output-head", "quantised": "int4-weights"}
    for name, coarse, seconds in (("a", False, 12.5), ("b", True, 20.0)):
        save_learned(folder / name / ROUTER_FILE, OutputHead(SIZES, dim=8, coarse=coarse))
        record(folder / name, {**settings, "coarse": coarse}, seconds)
    save_learned(folder / "c" / REPAIR_FILE, InputRepair(SIZES))
    record(folder / "c", repair, 3.0)
    return folder


def record(folder: Path, about: dict[str, Any], seconds: float) -> None:
    (folder / RECORD_FILE).write_text(json.dumps({"about": about, "train_s": seconds, "hit_rates": RATES}))


def run(model: Path, out: Path, *arguments: str) -> dict[str, Any]:
    sizes = ["--texts", "novel", "--context", "320", "--positions", "5", "--model", str(model), "--out", str(out)]
    routers.main([*sizes, *arguments])
    result: dict[str, Any] = json.loads((out / "routers.json").read_text())
    return result


def test_a_small_run_ends_in_one_json_line_that_the_readme_shows(
    model: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(model, tmp_path, "--learned", str(trained), "--share", "0.5")
    printed = capsys.readouterr().out.splitlines()
    assert result == json.loads(printed[-1])
    measured = [row for row in result["rows"] if row["kl"] is not None]
    for row in measured:
        assert row["kl"] >= -1e-6
        assert 0 < row["hit_rate"] <= 1
        assert row["step_ms"] > 0
    page = tmp_path / "README.md"
    page.write_text("<!-- routers -->\n<!-- /routers -->\n")
    readme.main(["--results", str(tmp_path), "--pages", str(page)])
    text = page.read_text()
    assert "| output-head, int4-weights, after repair | held-out passages | – | – | 70.0% | – | – | – | 3 |" in text
    assert text.count("; 1503 steps, 1500 passages of 1,501 tokens, 1502 queries") == 1
    assert "A trained head's own weights, read at every step, are not in the bytes: output-head " in text
    assert "A trained head's own weights, read at every step, are not in the bytes: output-head " in text
    assert text.count("* | – |") == sum(row["compiled"] for row in measured)


def test_every_part_is_there(model: Path, trained: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path, "--learned", str(trained), "--share", "0.5")
    rows = {(row["router"], row["pages"]): row for row in result["rows"]}
    assert {router for router, _ in rows} >= {"basis", "box", "basis + decay 0.5", "basis reused 0.9", "output-head"}
    assert rows["output-head", "16"]["train_s"] == 12.5
    assert rows["output-head + coarse", "16"]["kl"] != rows["output-head", "16"]["kl"]
    weights = sum(tensor.numel() for tensor in OutputHead(SIZES, dim=8).state_dict().values()) / 3
    assert rows["output-head", "16"]["weights_ratio"] == pytest.approx(weights / (2 * 320 * 2 * 16))
    weights = sum(tensor.numel() for tensor in OutputHead(SIZES, dim=8).state_dict().values()) / 3
    assert rows["output-head", "16"]["weights_ratio"] == pytest.approx(weights / (2 * 320 * 2 * 16))
    assert 0 < rows["basis reused -1.0", "16"]["reused"] < 1
    assert rows["basis", "16"]["reused"] is None
    assert rows["output-head, int4-weights, before repair", "held-out passages"]["hit_rate"] == 0.5
    box, plain = rows["box", "16"], rows["box, not compiled", "16"]
    assert plain["kl"] == pytest.approx(box["kl"], abs=1e-6)
    assert (box["compiled"], plain["compiled"]) == (True, False)
    assert rows["box", "8"]["kl"] != box["kl"]
    assert len({rows["box", f"self-sized by {by}, mean 16"]["kl"] for by in ("spread", "entropy")} | {box["kl"]}) == 3


def test_without_trained_routers_there_are_none(model: Path, tmp_path: Path) -> None:
    result = run(model, tmp_path, "--texts", "novel", "code")
    assert [row["router"] for row in result["rows"] if row["train_s"] is not None] == []
    row = result["rows"][0]
    assert row["kl"] == pytest.approx(sum(row["kl_texts"].values()) / 2)


def test_folders_of_trained_routers(model: Path, trained: Path, tmp_path: Path) -> None:
    found = learned(trained, load_model(str(model))[0])
    assert [(part.router, part.train_s) for part in found] == [("output-head", 12.5), ("output-head + coarse", 20.0)]
    save_learned(trained / "a" / ROUTER_FILE, OutputHead(replace(SIZES, layers=4), dim=8))
    with pytest.raises(ValueError, match="for another model"):
        learned(trained, load_model(str(model))[0])
    with pytest.raises(ValueError, match=r"expected folders with a router.safetensors .*, found none"):
        learned(tmp_path / "nothing", None)


def test_a_trained_head_sizes_pages_under_the_default_routers(tmp_path: Path) -> None:
    file = tmp_path / "sizing" / SIZING_FILE
    SizingHead().save(file)
    record_of(file).write_text(json.dumps({"mean_tokens": 12, "train_s": 4.5, "measured": {}}))
    found = [(part.router, part.pages, part.config().page_size, part.train_s) for part in learned(tmp_path, None)]
    assert found == [(name, "self-sized by head, mean 12", 32, 4.5) for name in ("basis", "box")]


def test_a_page_that_sizes_itself_costs_what_it_holds() -> None:
    own = paid_for(Part("box", 32, 3, policy=SelfSizedPages(mean_tokens=16)), 0.2, 4096, 64)
    assert own.budget_pages == paid_for(Setting("box", 16, 3), 0.2, 4096, 64).budget_pages
    assert (own.pages, own.config().page_size) == ("self-sized by spread, mean 16", 32)
    sizes = {part.page_size for part in untrained() if part.router == "box" and part.policy is None}
    assert sizes == {8, 16, 32, 64}


def test_the_clock_counts_every_layer_and_puts_attention_back(model: Path) -> None:
    network, _ = load_model(str(model))
    attention = ALL_ATTENTION_FUNCTIONS["oval"]
    with attach(network, OvalConfig()), attention_clock() as seconds, torch.no_grad():
        network(torch.ones(1, 4, dtype=torch.long))
    assert len(seconds) == 3
    assert all(spent > 0 for spent in seconds)
    assert ALL_ATTENTION_FUNCTIONS["oval"] is attention
    with pytest.raises(KeyError), attention_clock():
        raise KeyError
    assert AttentionInterface().get("oval") is attention


@pytest.mark.parametrize("wrong", [["--positions", "1"], ["--share", "0"], ["--context", "6"]])
def test_impossible_settings_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        routers.main(wrong)
    assert "--positions takes 2 or more" in capsys.readouterr().err
