"""Each speed benchmark runs once, small, and gives what the README's tables are made of."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import alternating, decode, layer
from tests.tiny_checkpoint import save_tiny_checkpoint


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_decode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_checkpoint(tmp_path / "model")
    sizes = ["--contexts", "900", "1000", "--prefill", "900", "--batch", "2", "--steps", "2", "--dtypes", "float32"]
    decode.main(["--model", str(model), "--out", str(tmp_path), *sizes])
    result = last_line(capsys)
    assert [(row["context"], row["batch"]) for row in result["rows"]] == [(900, 1), (1000, 1), (900, 2)]
    for row in result["rows"]:
        assert set(row["step_ms"]) == {"dynamic", "static", "oval"}
        assert row["vs_dynamic"] > 0
        assert 0 < row["read_ratio"] < 1.1
    assert result["prefill_overhead"] > 0
    assert 0 < result["basis_bytes_ratio"] < 1


def test_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--shapes", "SmolLM2-135M", "--contexts", "1024", "--calls", "2", "--dtypes", "float32"]
    layer.main(["--out", str(tmp_path), *sizes])
    (row,) = last_line(capsys)["rows"]
    assert (row["shape"], row["context"], row["dtype"]) == ("SmolLM2-135M", 1024, "float32")
    assert row["vs_floor"] == pytest.approx(row["oval_ms"] / row["floor_ms"])


def test_ratios_are_taken_within_a_round() -> None:
    seconds = {"a": [2.0, 20.0, 2.0], "b": [1.0, 10.0, 4.0]}
    assert alternating.speedup(seconds, "a", "b") == 2
    assert alternating.median_ms(seconds["b"]) == 4000


def test_variants_take_turns() -> None:
    calls: list[str] = []
    seconds = alternating.time_in_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert calls == ["a", "b"] * (alternating.WARM_UP_ROUNDS + 2)
    assert {name: len(values) for name, values in seconds.items()} == {"a": 2, "b": 2}
