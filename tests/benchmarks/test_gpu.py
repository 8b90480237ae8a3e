"""The GPU benchmark's logic, with tiny shapes on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_checks, gpu_clock, gpu_model
from benchmarks.gpu_layer import Case, measure_layer
from benchmarks.gpu_rows import Check, Row
from oval_core.kernels import Partial, cpu

SIZES = ["--device", "cpu", "--contexts", "900", "1000", "--batches", "1", "2", "--rounds", "2", "--impls", "cpu"]
ROW = {
    *("part", "shape", "context", "batch", "impl", "reason", "dense_ms", "oval_ms"),
    *("vs_dense", "floor_ms", "of_floor", "read_ratio", "parts_ms"),
}


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SHAPES", {"grouped": (4, 2, 16), "alone": (2, 2, 16)})
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    monkeypatch.setattr(gpu, "MODEL_SIZES", sizes)


def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    gpu.main([*SIZES, "--out", str(tmp_path), *options])
    lines = capsys.readouterr().out.splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    assert result == json.loads((tmp_path / "gpu.json").read_text())
    assert lines[-2].startswith("| ")
    return result


def test_every_row_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(tmp_path, capsys)
    assert result["bandwidth_bytes_per_s"] > 0
    assert {"cpu", "gpu", "torch", "transformers", "device", "cuda", "packages"} <= {*result["machine"]}
    assert all(check["passed"] for check in result["checks"])
    layers, eager, graphs = (
        [row for row in result["rows"] if row["part"] == part] for part in ("layer", "eager", "graph")
    )
    sizes = [(context, batch) for context in (900, 1000) for batch in (1, 2)]
    assert (
        [(row["context"], row["batch"]) for row in eager] == [(row["context"], row["batch"]) for row in graphs] == sizes
    )
    assert [(row["shape"], row["context"], row["batch"]) for row in layers] == [
        (shape, *size) for size in sizes for shape in ("grouped", "alone")
    ]
    for row in layers:
        assert set(row) == ROW
        assert set(row["parts_ms"]) == {"tier 1", "tier 2", "exact", "merge"}
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["oval_ms"])
    for row in layers + eager:
        assert row["reason"] is None
        assert row["vs_dense"] > 0
        assert 0.5 < row["read_ratio"] < 1.2
    assert all(row["reason"] == "no CUDA graphs on cpu" and row["oval_ms"] is None for row in graphs)


def test_a_wrong_kernel_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cpu.attend_pages

    def wrong(*arguments: Any) -> Partial:
        part = right(*arguments)
        return part._replace(lse=part.lse + 1)

    monkeypatch.setattr(cpu, "attend_pages", wrong)
    result = run(tmp_path, capsys, "--quick")
    assert {check["kernel"].split(",")[0] for check in result["checks"] if not check["passed"]} == {"exact"}
    (row,) = result["rows"]
    assert "failed the check of exact" in row["reason"]
    assert row["vs_dense"] is row["oval_ms"] is row["dense_ms"] is None


def test_a_kernel_that_raises_has_no_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(cpu, "merge", broken)
    (row,) = run(tmp_path, capsys, "--quick")["rows"]
    assert "RuntimeError: no such instruction" in row["reason"]


@pytest.mark.parametrize("got", [torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.inf]), torch.ones(3)])
def test_what_is_no_number_fails(got: torch.Tensor) -> None:
    assert not Check("x", "y", "z", *gpu_checks._difference(got, torch.ones(2))).passed
    assert Check("x", "y", "z", *gpu_checks._difference(torch.ones(2), torch.ones(2))).passed


def test_nothing_is_begun_when_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "random_model", lambda *_: pytest.fail("a model was made"))
    rows = run(tmp_path, capsys, "--minutes", "0")["rows"]
    assert len(rows) == 4 * 2 + 2 * 4
    assert all(row["reason"] == "time is up" and row["oval_ms"] is None for row in rows)


def test_a_row_that_fails_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: Case, *arguments: Any) -> list[Row]:
        if case.shape == "alone":
            raise RuntimeError("out of memory\nand more")
        return measure_layer(case, *arguments)

    monkeypatch.setattr(gpu, "measure_layer", measure)
    layers = run(tmp_path, capsys, "--quick")["rows"][:2]
    assert [row["reason"] for row in layers] == [None, "RuntimeError: out of memory"]


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000_000_000, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000_000)
    cuda = torch.device("cuda")
    assert gpu_clock.lacking_memory(cuda, 4e9) is None
    assert gpu_clock.lacking_memory(cuda, 9e9) == "needs 9 GB of memory, 4 GB are free"


def test_a_step_that_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any) -> Any:
        if step() == "oval":
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            except RuntimeError as cause:
                raise RuntimeError("capture was invalidated") from cause
        return step

    monkeypatch.setattr(gpu_model, "_graph_of", capture)
    graphs, refused = gpu_model._captured({name: lambda name=name: name for name in ("dynamic", "static", "oval")})  # type: ignore[misc]
    assert list(graphs) == ["static"]
    assert refused == "oval was not captured: RuntimeError: operation not permitted when stream is capturing"
    figures = gpu_model._figures({"static": [1.0, 3.0]}, None)
    assert (figures["dense_ms"], figures["oval_ms"], figures["vs_dense"]) == (2000, None, None)


@pytest.mark.parametrize(
    ("options", "message"), [([], "needs a CUDA device"), (["--device", "cpu", "--impls", "x"], "got 'x'")]
)
def test_without_a_gpu_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        gpu.main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
