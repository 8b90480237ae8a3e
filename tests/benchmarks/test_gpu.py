"""The GPU benchmark's logic, with tiny shapes on a CPU."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import gpu, gpu_checks, gpu_clock, gpu_graph, gpu_model, gpu_parts, gpu_process, gpu_profile
from benchmarks.gpu_layer import measure_layer
from benchmarks.gpu_parts import Part
from benchmarks.gpu_rows import Case, Check, Row
from oval_core import memory, page_view
from oval_core.kernels import Partial, cpu
from tests.benchmarks import ends

SIZES = ["--device", "cpu", "--contexts", "900", "1000", "--batches", "1", "2", "--rounds", "2", "--impls", "cpu"]
ROW = {
    *("part", "shape", "context", "batch", "impl", "reason", "dense_ms", "oval_ms"),
    *("graph_ms", "vs_dense", "graph_vs_dense", "floor_ms", "of_floor", "read_ratio", "parts_ms"),
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
        assert sum(row["parts_ms"].values()) > 0
        assert row["graph_ms"] is None
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["oval_ms"])
    for row in eager:
        assert set(row["parts_ms"]) == {"store", "static", "dynamic"}
        assert row["dense_ms"] == min(row["parts_ms"].values())
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


@pytest.fixture
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that Triton's interpreter gets through."""
    monkeypatch.setattr(gpu_checks, "CONTEXT", 200)
    monkeypatch.setattr(gpu_checks, "ROWS", 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.usefixtures("few_tokens")
def test_the_triton_kernels_pass(dtype: torch.dtype) -> None:
    checks = gpu_checks.check_kernels("triton", "tiny", (4, 2, 16), dtype, torch.device("cpu"))
    assert len(checks) == 2 * 10
    assert [check for check in checks if not check.passed] == []


def a_page_on(written: Tensor) -> Tensor:
    return written + 1


def one_left_out(written: Tensor) -> Tensor:
    """The first of a list of pages."""
    return torch.cat([torch.full_like(written[..., :1], -1), written[..., 1:]], -1)


def a_hundredth_off(written: Tensor) -> Tensor:
    return written + 0.01


def all_but_one_too_light(written: Tensor) -> Tensor:
    """Of several parts; if all were, nothing would change."""
    return torch.cat([written[:1], written[1:] - 0.1])


def a_token_short(written: Tensor) -> Tensor:
    return (written - 1).clamp_min(0)


@pytest.mark.parametrize(
    ("kernel", "argument", "fault", "caught"),
    [
        ("box_kernel", "chosen.pages", a_page_on, "box step, pages"),
        ("box_kernel", "chosen.lengths", a_token_short, "box step, output"),
        ("shortlist_kernel", "pages", one_left_out, "basis step, output"),
        ("mass_kernel", "mass", a_hundredth_off, "basis step, output"),
        ("impact_kernel", "chosen.pages", a_page_on, "basis step, pages"),
        ("impact_kernel", "chosen.starts", a_token_short, "basis step, output"),
        ("tail_kernel", "lses", all_but_one_too_light, "basis step, output"),
        ("tail_kernel", "outs", a_hundredth_off, "basis step, output"),
    ],
)
@pytest.mark.usefixtures("few_tokens")
def test_a_broken_kernel_of_a_step_is_caught(
    monkeypatch: pytest.MonkeyPatch, kernel: str, argument: str, fault: Callable[[Tensor], Tensor], caught: str
) -> None:
    cascade = importlib.import_module("oval_core.kernels.triton_cascade")
    monkeypatch.setattr(cascade, kernel, _Broken(getattr(cascade, kernel), argument, fault))
    monkeypatch.setattr(gpu_checks, "QUERIES", (1,))
    checks = gpu_checks.check_kernels("triton", "tiny", (2, 1, 16), torch.float32, torch.device("cpu"))
    failed = {check.kernel.removesuffix(", float32, 1 queries") for check in checks if not check.passed}
    assert caught in failed
    assert all("step" in name for name in failed)


class _Broken:
    """A kernel whose `argument` has a fault after every launch."""

    def __init__(self, kernel: Any, argument: str, fault: Callable[[Tensor], Tensor]) -> None:
        self.kernel, self.argument, self.fault = kernel, argument, fault

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.kernel[grid](*args, **kwargs)
            name, _, field = self.argument.partition(".")
            written = {**dict(zip(self.kernel.arg_names, args, strict=False)), **kwargs}[name]
            written = getattr(written, field) if field else written
            written.copy_(self.fault(written))

        return launch


@pytest.mark.parametrize("got", [torch.tensor([1.0, torch.nan]), torch.tensor([1.0, -torch.inf]), torch.ones(3)])
def test_what_is_no_number_fails(got: torch.Tensor) -> None:
    assert not Check("x", "y", "z", gpu_checks._difference(got, torch.ones(2))[0], 1.0).passed
    assert Check("x", "y", "z", gpu_checks._difference(torch.ones(2), torch.ones(2))[0], 0.0).passed


def test_nothing_is_begun_when_the_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "random_model", lambda *_: pytest.fail("a model was made"))
    rows = run(tmp_path, capsys, "--minutes", "0")["rows"]
    assert len(rows) == 4 * 2 + 2 * 4
    assert all(row["reason"] == "time is up" and row["oval_ms"] is None for row in rows)


def test_a_row_that_fails_loses_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(case: Case, *arguments: Any, **named: Any) -> Row:
        if case.shape == "alone":
            raise RuntimeError("out of memory\nand more")
        return measure_layer(case, *arguments, **named)

    monkeypatch.setattr(gpu_parts, "measure_layer", measure)
    layers = run(tmp_path, capsys, "--quick")["rows"][:2]
    assert [row["reason"] for row in layers] == [None, "RuntimeError: out of memory"]


def test_what_does_not_fit_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000_000_000, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1_000_000_000)
    cuda = torch.device("cuda")
    assert gpu_clock.lacking_memory(cuda, 4e9) is None
    assert gpu_clock.lacking_memory(cuda, 9e9) == "needs 9 GB of memory, 4 GB are free"


def test_a_case_that_ends_its_process_loses_no_other() -> None:
    cases = tuple(Case("x", (2, 2, 16), context, 1) for context in (1, 2, 3, 4))
    budget = gpu_clock.Budget(1)
    part = Part("layer", "cpu", cases, {}, {}, (torch.float32,), torch.device("cpu"), 1, budget, 1.0)

    def dies_at_2(part: Part) -> Iterator[Any]:
        yield gpu_parts.Bandwidth(1.0)
        for case in part.cases:
            if case.context == 2:
                raise RuntimeError("its process ended with exit status -6")
            yield part.empty(case, "measured")

    rows = [item for item in gpu._rows(part, dies_at_2) if isinstance(item, Row)]
    assert [row.context for row in rows] == [1, 2, 3, 4]
    assert [row.reason for row in rows] == [
        *("measured", "RuntimeError: its process ended with exit status -6", "measured", "measured")
    ]


@pytest.mark.parametrize(
    ("how", "message"), [("well", ""), ("killed", "exit status -9"), ("raises", "OSError: no such thing")]
)
def test_what_a_process_has_yielded_is_not_lost(how: str, message: str) -> None:
    seen: list[str] = []
    with pytest.raises(RuntimeError, match=message) if message else nullcontext():
        for item in gpu_process.apart(time.monotonic() + 300, ends.work, how):
            seen.append(item)
    assert seen == ["first", "second"]


def test_a_process_that_takes_too_long_is_given_up() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    sender.send("first")
    items = gpu_process._received(receiver, time.monotonic())
    assert next(items) == "first"
    with pytest.raises(TimeoutError, match="taking too long"):
        next(items)


def test_a_run_that_is_stopped_leaves_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(part: Part) -> Iterator[Any]:
        if part.kind == "layer":
            yield part.empty(part.cases[0], "measured")
            assert json.loads((tmp_path / "gpu.json").read_text())["rows"][0]["reason"] == "measured"
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(gpu, "measure", measure)
    with pytest.raises(SystemExit) as stop:
        gpu.main([*SIZES, "--out", str(tmp_path)])
    assert stop.value.code == 128 + signal.SIGTERM
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == json.loads((tmp_path / "gpu.json").read_text())
    assert "measured" in lines[-2]


def test_a_step_that_cannot_be_captured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def capture(step: Any) -> Any:
        if step() == "oval":
            try:
                raise RuntimeError("operation not permitted when stream is capturing\nand more")
            except RuntimeError as cause:
                raise RuntimeError("capture was invalidated") from cause
        return step

    monkeypatch.setattr(gpu_graph, "_graph_of", capture)
    graphs, refused = gpu_graph.captured({"static": lambda: "static", "oval": lambda: "oval"})
    assert list(graphs) == ["static"]
    assert refused == "oval was not captured: RuntimeError: operation not permitted when stream is capturing"
    figures = gpu_model._figures({"static": [1.0, 3.0]}, None)
    assert (figures["dense_ms"], figures["oval_ms"], figures["vs_dense"]) == (2000, None, None)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("exact_kernel", "exact_kernel"),
        ("void at::native::radix_sort<float, at::native::Less<float> >(float*, int)", "radix_sort"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
    ],
)
def test_kernels_have_short_names(name: str, short: str) -> None:
    assert gpu_profile._short(name) == short


def test_numbers_that_a_graph_copies_stay_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    names, device = vars(page_view), torch.device("cpu")
    before = names["on_device"]
    with gpu_graph._kept_numbers() as kept:
        first, again, other = (names["on_device"](numbers, device) for numbers in ([1, 2], [1, 2], [3]))
        assert first is again
        assert (first.tolist(), other.tolist()) == ([1, 2], [3])
        assert len(kept) == 2
    assert names["on_device"] is before is memory.on_device


def test_only_the_baselines_that_fit_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = gpu_model.random_model(gpu.MODEL_SIZES, torch.float32, torch.device("cpu"))
    case = Case("x", (4, 2, 16), 100, 2)
    cache_bytes = 2 * 100 * 2 * 2 * 2 * 16 * 4
    for room, fitting in ((4.5, 3), (4.4, 2), (2.5, 1), (2.4, 0)):
        monkeypatch.setattr(gpu_model, "lacking_memory", lambda _, n, r=room: "full" if n > r * cache_bytes else None)
        names, lacking = gpu_model._fitting(model, case, gpu_model.BASELINES)
        assert names == gpu_model.BASELINES[:fitting]
        assert lacking == (None if fitting else "full")


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
