import json
from pathlib import Path

import pytest

from benchmarks import quality
from tests.tiny_checkpoint import save_tiny_checkpoint


def test_quick_run_ends_in_one_json_line_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_checkpoint(tmp_path / "model")
    out = tmp_path / "out"
    sizes = ["--contexts", "320", "--positions", "5", "--texts", "novel", "reference"]
    quality.main(["--groups", "quick", "ablation", "equal", "--model", str(model), "--out", str(out), *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((out / "quality.json").read_text())
    assert (out / "quality.png").read_bytes().startswith(b"\x89PNG")
    rows = result["rows"]
    assert {row["router"] for row in rows if row["group"] == "quick"} == {"basis", "box", "random"}
    assert {row["share"] for row in rows if row["group"] == "equal"} == {0.12, 0.16, 0.20}
    assert {row["router"] for row in rows} >= {"quest int8", "box every 4", "box to 90%"}
    assert {row["text"] for row in rows} == {"novel", "reference"}
    for row in rows:
        assert {"text", "context", "router", "budget_pages", "bytes_ratio", "kl", "top1", "ppl_ratio"} <= row.keys()
        assert row["kl"] >= -1e-6
        assert 0 < row["bytes_ratio"] < (1.2 if row["group"] == "quick" else 2)  # small pages, much metadata


def test_full_budget_is_dense(tmp_path: Path) -> None:
    import torch

    from benchmarks.teacher_forcing import compare, prefill
    from demos.smollm2 import load_model
    from oval_core import OvalConfig

    model, _ = load_model(str(save_tiny_checkpoint(tmp_path)))
    tokens = torch.randint(1, 250, (2, 200))
    prefix = prefill(model, tokens, positions=6, advance=lambda tokens: None)
    result = compare(model, prefix, OvalConfig(budget_pages=100, always_paged=True), lambda tokens: None)
    assert result.kl == pytest.approx([0, 0], abs=1e-6)
    assert result.top1 == [1, 1]
    assert result.ppl_ratio == pytest.approx([1, 1], abs=1e-5)
    assert result.stats["pages_read_mean"] > 10
