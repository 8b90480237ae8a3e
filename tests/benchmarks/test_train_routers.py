"""All optional routers and repairs are trained by one command, into folders that the benchmark reads."""

from __future__ import annotations

from pathlib import Path

from benchmarks import train_routers
from benchmarks.router_parts import learned, learned_on, repairs
from demos.smollm2 import load_model
from demos.texts import load_text
from tests.tiny_checkpoint import save_tiny_checkpoint


def test_a_small_training_of_all(tmp_path: Path) -> None:
    checkpoint, out = save_tiny_checkpoint(tmp_path / "model"), tmp_path / "routers"
    arguments = ["--model", str(checkpoint), "--out", str(out), "--texts", "novel", "--context", "512", "--steps", "4"]
    train_routers.main([*arguments, "--passages", "2", "--repair-passages", "1", "--budget", "6", "--asked", "4"])
    model, _ = load_model(str(checkpoint))
    names = [part.router for part in learned(out, model)]
    assert sorted(names) == ["output-head", "output-head + coarse", "position-mlp", "position-mlp + coarse"]
    assert [repair.quantised for repair in repairs(out)] == ["int4-weights", "int8-dynamic"]
    assert [settings["steps"] for settings in learned_on(out)] == [4, 1]


def test_what_benchmarks_read_is_not_learned() -> None:
    (rest,) = train_routers.texts_to_learn(["novel"]).values()
    whole = load_text("novel")
    assert whole.endswith(rest)
    assert len(whole) - len(rest) > 4 * 8192  # characters, of more tokens than any benchmark reads
