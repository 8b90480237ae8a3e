"""Claims are counted as the module says, by hand; the page says what holds, what does not, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks import claim_judges as judges
from benchmarks import claims, claims_page
from benchmarks.claims import in_pages, needed_pairs, page_use, top_pages
from demos.smollm2 import load_model
from demos.texts import load_text
from oval_core.routers import Pages
from tests.tiny_checkpoint import save_tiny_checkpoint

MASS = torch.tensor([[0.5, 0.05, 0.05, 0.3, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
FOUND: dict[str, Any] = {
    "command": "python -m benchmarks.claims", "layers": 30, "needed_pairs": 100.0, "first_token_mass": 0.5,
    "pairs_on_top": {"3": 0.993, "4": 0.995, "5": 0.9995}, "needed_mass_on_top": {"4": 0.9}, "again": {"3": 0.95},
    "near": 0.5, "near_mass": 0.6, "pages_often": 0.3, "pages_ever": 0.9, "page_tokens": {"2": 22, "12": 68, "20": 10},
}  # fmt: skip


def test_needed_pairs_are_the_fewest_that_hold_the_share() -> None:
    assert needed_pairs(MASS, 0.8).tolist() == [[True, False, False, True, False], [True] * 4 + [False]]
    assert needed_pairs(MASS, 0.45).sum(-1).tolist() == [1, 3]


def test_pages_are_runs_from_the_start_and_the_last_may_be_short() -> None:
    by_page = in_pages(MASS, 2)
    assert by_page[0].tolist() == pytest.approx([0.55, 0.35, 0.1])
    assert top_pages(by_page, 1)[0].tolist() == [True, False, False]
    assert top_pages(by_page, 9).all()


def test_use_counts_the_positions_at_which_a_page_was_wanted() -> None:
    wanted = [torch.tensor([[True, False]]), torch.tensor([[True, False, True]])]
    assert page_use(wanted).tolist() == [[1.0, 0.0]]
    wanted[1] = torch.tensor([[False, True, True]])
    assert page_use(wanted).tolist() == [[0.5, 0.5]]


def test_the_onlooker_sees_what_the_model_attends_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' own attention weights, and the onlooker's."""
    path, seen = save_tiny_checkpoint(tmp_path / "model"), list[Tensor]()
    real = claims.token_mass

    def kept(query: Tensor, pages: Pages) -> Tensor:
        seen.append(real(query, pages))
        return seen[-1]

    monkeypatch.setattr(claims, "token_mass", kept)
    claims.main(["--model", str(path), "--context", "200", "--positions", "3", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "claims.json").read_text())
    _, tokenizer = load_model(str(path))
    tokens = tokenizer(load_text("novel")[:400], return_tensors="pt", add_special_tokens=False).input_ids
    eager = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        weights = eager(tokens[:, :200], output_attentions=True).attentions
    assert len(seen) == 3 * 3
    for number, mass in enumerate(seen):
        position, layer = 197 + number // 3, number % 3
        torch.testing.assert_close(mass, weights[layer][0, :, position, : position + 1], atol=1e-5, rtol=1e-4)
    mean_first = torch.stack([mass[:, 0] for mass in seen]).mean()
    assert result["first_token_mass"] == pytest.approx(float(mean_first), rel=1e-5)


def test_a_small_run_ends_in_one_json_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_checkpoint(tmp_path / "model")
    claims.main(["--model", str(model), "--context", "320", "--positions", "4", "--out", str(tmp_path)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "claims.json").read_text())
    for name in ("pairs_on_top", "needed_mass_on_top", "mass_on_top", "again"):
        assert list(result[name]) == ["3", "4", "5", "12"]
    for name in ("pairs_on_top", "needed_mass_on_top", "mass_on_top"):
        assert 0 < result[name]["3"] < result[name]["5"] <= 1 + 1e-6
        assert result[name]["12"] == pytest.approx(1), "320 tokens are 10 pages of 32"
    assert 0 < result["near"] < 1
    assert 0 < result["pages_often"] <= result["pages_ever"] <= 1
    tokens = sum(int(size) * pages for size, pages in result["page_tokens"].items())
    assert tokens == 3 * 315, "all but the last positions and the warm-up, in three layers"


def test_verdicts_follow_the_figures() -> None:
    assert judges.needed_on_top(FOUND)[1] == judges.HOLDS
    assert judges.needed_on_top(FOUND | {"pairs_on_top": {"3": 0.9, "5": 1.0}})[1] == judges.FAILS
    assert judges.mass_on_top(FOUND)[1] == judges.FAILS
    assert judges.same_again(FOUND)[1] == judges.HOLDS
    assert judges.near(FOUND)[1] == judges.FAILS
    assert judges.often(FOUND)[1] == judges.HOLDS
    assert judges.humps(FOUND) == ("68% of 8-16, 22.0% of 1-4, 10% of 17-32 tokens", judges.HOLDS)
    assert judges.humps(FOUND | {"page_tokens": {"15": 75, "20": 25}})[1] == judges.FAILS


def test_routers_are_judged_by_their_rows() -> None:
    rows = [
        {"router": router, "pages": "16", "hit_rate": rate, "kl": 0.1}
        for router, rate in (("basis", 0.7), ("box", 0.8), ("basis + decay 0.5", 0.87))
    ]
    found = {"rows": rows, "share": 0.2}
    assert judges.locality(found) == ("hit rate 70.0%, at best 87.0% (`basis + decay 0.5`)", judges.HOLDS)
    assert judges.hit_rate(found) == ("at 20% of the bytes: `basis` 70.0%, `box` 80.0%", judges.FAILS)
    assert judges.repaired(found)[1] == judges.UNKNOWN
    rows += [{"router": f"r, q, {place} repair", "hit_rate": rate, "kl": None}
             for place, rate in (("before", 0.45), ("after", 0.9))]  # fmt: skip
    assert judges.repaired(found) == ("r, q, before repair: 45.0%; r, q, after repair: 90.0%", judges.HOLDS)


@pytest.mark.parametrize(
    ("ms", "verdict"),
    [
        (0.05, judges.HOLDS),
        (3.0, "does not hold for a step; holds for a layer with `box`"),
        (9.0, judges.FAILS),
    ],
)
def test_the_time_of_a_router_is_that_of_a_step(ms: float, verdict: str) -> None:
    parts = [("box", "tier 1", 0.5), ("box", "selection", 0.5), ("box", "exact", 99), ("basis", "tier 2", 3)]
    rows = [{"router": router, "context": 8128, "part": part, "ms": ms * of} for router, part, of in parts]
    words, found = judges.cheap({"rows": [*rows, rows[0] | {"context": 32768}]}, FOUND | {"layers": 29})
    assert found == verdict
    assert f"`box` {ms / 29:.2f} ms a layer, {ms:.1f} ms a step" in words


def test_page_sets_are_compared_with_exact_verification() -> None:
    shared = {"dtype": "float32", "context": 8, "group": "copy", "drafter": "d"}
    rows = [
        shared | {"mode": "exact", "tokens_per_s": 10.0, "accepted_mean": 2.0},
        shared | {"mode": "pages, agreed", "tokens_per_s": 15.0, "accepted_mean": 2.5},
    ]
    words, verdict = judges.page_sets({"rows": rows})
    assert (words, verdict) == ("d, copy: 2.00 -> 2.50 draft tokens, 1.50x", judges.HOLDS)


def test_the_page_names_commands_and_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "claims.json").write_text(json.dumps(FOUND))
    page = tmp_path / "claims.md"
    claims_page.main(["--results", str(tmp_path), "--page", str(page)])
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(claims_page.CLAIMS)
    assert lines[2].endswith("| `python -m benchmarks.claims` | holds |")
    assert "| no results of speculative_long | `make bench` | not measured yet |" in page.read_text()


def test_the_page_of_this_repository_has_every_claim() -> None:
    text = (Path(__file__).parents[2] / "docs" / "claims.md").read_text(encoding="utf-8")
    for claim in claims_page.CLAIMS:
        assert f"\n| {claim.text} | " in text


@pytest.mark.parametrize("wrong", [["--positions", "1"], ["--needed", "1"], ["--context", "6"]])
def test_impossible_settings_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        claims.main(wrong)
    assert "--positions takes 2 or more" in capsys.readouterr().err
