"""Speculative decoding is measured once, small; prompts and tables are what the modules say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import readme, speculative
from benchmarks.speculative_prompts import COPY, GROUPS, make_group
from benchmarks.speculative_tables import page_sets_table, speculative_table
from benchmarks.speculative_variants import BASELINE, LONG_TOKENS, make_variants
from demos.smollm2 import load_model
from demos.token_clock import TokenClock
from oval_spec import MedusaHeads
from tests.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(scope="module", name="files")
def _files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("speculative")
    save_tiny_checkpoint(folder / "model")
    MedusaHeads(32, 2, vocab_size=257).save(folder / "heads")
    return folder / "model", folder / "heads"


def run(files: tuple[Path, Path], out: Path, *arguments: str) -> dict[str, Any]:
    sizes = ["--prompts", "2", "--new-tokens", "12", "--out", str(out)]
    speculative.main(["--model", str(files[0]), "--heads", str(files[1]), *sizes, *arguments])
    result: dict[str, Any] = json.loads((out / "speculative.json").read_text())
    return result


def test_a_small_run_ends_in_one_json_line_that_the_readme_shows(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run(files, tmp_path, "--contexts", "90", "--groups", "continuation", "noise")
    assert result == json.loads(capsys.readouterr().out.splitlines()[-1])
    expected = [BASELINE, "transformers' prompt lookup", "no drafts", "prompt lookup", "medusa"]
    assert [row["drafter"] for row in result["rows"]] == expected * 2
    ours = [row for row in result["rows"] if "transformers" not in row["drafter"]]  # theirs draws other random numbers
    assert all(row["identical"] == row["agreement"] == 1 for row in ours)
    assert all(row["speedup"] > 0 and (row["step_tokens"] or 1) >= 1 for row in result["rows"])
    page = tmp_path / "README.md"
    page.write_text("<!-- speculative -->\nold\n<!-- /speculative -->\n")
    readme.main(["--results", str(tmp_path), "--pages", str(page)])
    assert "| prompt lookup, exact |" in page.read_text()


def test_a_long_context_has_pages_and_page_sets(files: tuple[Path, Path], tmp_path: Path) -> None:
    wanted = ["sparse self-draft, exact", "medusa, pages, union"]
    arguments = ["--contexts", str(LONG_TOKENS), "--groups", "continuation", "--look-every", "2"]
    result = run(files, tmp_path, *arguments, "--variants", *wanted, "medusa, exact")
    assert [(row["drafter"], row["mode"]) for row in result["rows"]] == [
        (BASELINE, "dense"),
        ("medusa", "exact"),
        ("sparse self-draft", "exact"),
        ("medusa", "pages, union"),
    ]
    looked = [row for row in result["rows"] if row["pages"] is not None]
    assert [row["drafter"] for row in looked] == ["medusa"], "the other one is never sure enough to draft"
    for row in looked:
        assert 0 < row["pages"]["D & T"] <= row["pages"]["D | T"] < row["pages"]["context"]
        assert 0 < row["covered"]["D & T"] <= row["covered"]["D | T"] < 1
    text = page_sets_table(result)
    assert text.count("\n| medusa | 2,048 |") == 1
    assert "| medusa, pages, union |" in speculative_table(result)


def test_prompts_are_as_long_as_wanted(files: tuple[Path, Path]) -> None:
    _, tokenizer = load_model(str(files[0]))
    for group in GROUPS[1:]:  # chats are those of `benchmarks.prompts`
        prompts = make_group(tokenizer, group, 4, 300)
        assert [prompt.tokens.shape for prompt in prompts] == [(1, 300)] * 4
        assert len({tuple(prompt.tokens[0].tolist()) for prompt in prompts}) == 4
    assert COPY in tokenizer.decode(make_group(tokenizer, "copy", 1, 300)[0].tokens[0])
    with pytest.raises(ValueError, match="group must be one of"):
        make_group(tokenizer, "verse", 1, 10)


def test_unknown_variants_are_refused(files: tuple[Path, Path]) -> None:
    model, _ = load_model(str(files[0]))
    with pytest.raises(ValueError, match="unknown variants"):
        make_variants(model, files[1], 64, ["psychic"])


def test_a_clock_counts_new_tokens_only() -> None:
    clock = TokenClock()
    for tokens in (torch.zeros(1, 7), torch.zeros(1), torch.zeros(3)):
        clock.put(tokens)
    clock.end()
    assert len(clock.times) == 4
    clock.times = [10.0, 12.0, 12.0, 13.0]
    assert clock.token_s == 1.0
