from pathlib import Path

import pytest

from demos import long_document
from tests.tiny_checkpoint import save_tiny_checkpoint


def run(tmp_path: Path, *arguments: str) -> Path:
    picture = tmp_path / "out" / "pages.png"
    model = save_tiny_checkpoint(tmp_path / "model")
    long_document.main(["--model", str(model), "--picture", str(picture), *arguments])
    return picture


def test_both_runs_and_the_picture_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = run(tmp_path, "--context", "300", "--new-tokens", "6", "--budget-pages", "6")
    shown = capsys.readouterr().out
    assert "300 tokens read" in shown
    assert "Agreement: " in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_budget_that_covers_everything_agrees_and_draws_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = run(tmp_path, "--context", "200", "--new-tokens", "5")
    shown = capsys.readouterr().out
    assert "Agreement: all 5 tokens are identical" in shown
    assert "budget covers every page" in shown
    assert not picture.exists()


@pytest.mark.parametrize("option", ["--context", "--new-tokens", "--budget-pages"])
def test_sizes_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        long_document.main([option, "0"])
    assert "must be at least 1, got 0" in capsys.readouterr().err
