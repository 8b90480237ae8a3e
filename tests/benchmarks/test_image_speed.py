"""The speed benchmark over images runs once, small."""

import json
from pathlib import Path

import pytest

from benchmarks import image_speed
from benchmarks.image_tables import image_speed_table


def test_every_row_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_speed, "KV_HEADS", 2)
    monkeypatch.setattr(image_speed, "HEADS", 2)
    sizes = ["--images", "1", "2", "--model-images", "1", "--calls", "2", "--shares", "0.25", "0.5"]
    image_speed.main(["--dtypes", "float32", "--out", str(tmp_path), *sizes])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "image_speed.json").read_text())
    rows = result["rows"]
    assert [(row["images"], row["tokens"], row["read_share"]) for row in rows] == [
        (images, tokens, share) for share in (0.25, 0.5) for images, tokens in ((1, 576), (2, 1152), (1, 256))
    ]
    for row in rows:
        assert row["vs_dense"] > 0
        assert 0.5 * row["read_share"] < row["bytes_ratio"] < row["read_share"] + 0.2
    assert "| small LLaVA, end to end | 1 | 256 | float32 | 25% |" in image_speed_table(result)
