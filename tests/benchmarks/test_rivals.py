import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rivals import oval_quality
from benchmarks.rivals.late_questions import FACTS, MAX_PROMPTS, make_prompt, score_answers
from benchmarks.rivals.tables import rivals_table
from tests.tiny_checkpoint import save_tiny_checkpoint


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(tokens: list[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@pytest.mark.parametrize("index", range(MAX_PROMPTS))
def test_facts_stand_in_the_passage_and_answers_behind_the_questions(index: int) -> None:
    prompt = make_prompt(encode, index, 12_000)
    assert len(prompt.prefix) == 12_000
    pair = (FACTS[index], FACTS[(index + 1) % len(FACTS)])
    for fact, depth, place, answer in zip(pair, (0.25, 0.70), prompt.facts, prompt.answers, strict=True):
        assert decode(prompt.prefix[place.start : place.stop]) == fact.sentence + "\n\n"
        assert depth * 12_000 <= place.start < depth * 12_000 + 4_000  # the longest paragraph
        assert decode(prompt.suffix[answer.start : answer.stop]) == f" {fact.answer}"
        assert decode(prompt.prefix).count(fact.answer) == 1
    assert decode(prompt.suffix).index(pair[0].question) < decode(prompt.suffix).index(pair[1].question)


def test_prompts_differ_and_repeat() -> None:
    digests = [make_prompt(encode, index, 12_000).digest for index in (0, 1, 0)]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize(("index", "context"), [(-1, 12_000), (MAX_PROMPTS, 12_000), (0, 100)])
def test_impossible_prompts_are_refused(index: int, context: int) -> None:
    with pytest.raises(ValueError, match=r"got 100 tokens|unknown prompt"):
        make_prompt(encode, index, context)


def test_scores_of_known_logits() -> None:
    prompt = make_prompt(encode, 0, 12_000)
    logits = torch.zeros(len(prompt.suffix), 256)
    first = prompt.answers[0]
    logits[range(first.start - 1, first.stop - 1), prompt.suffix[first.start : first.stop]] = 50.0
    score = score_answers(logits, prompt)
    assert score.nll == pytest.approx((0, torch.tensor(256.0).log().item()), abs=1e-5)
    assert score.greedy == (True, False)


def test_prompts_and_figures_need_no_transformers() -> None:
    block = "import sys; sys.modules['transformers'] = sys.modules['oval_core'] = None"
    modules = "import benchmarks.differences, benchmarks.rivals.late_questions"
    subprocess.run([sys.executable, "-c", f"{block}; {modules}"], check=True)


@pytest.fixture
def result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    model = save_tiny_checkpoint(tmp_path / "model")
    sizes = ["--context", "4000", "--prompts", "1", "--kept", "0.2", "1.5"]
    oval_quality.main(["--model", str(model), "--out", str(tmp_path), *sizes])
    printed: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed == json.loads((tmp_path / "rivals_oval.json").read_text())
    return printed


def test_oval_is_asked_late(result: dict[str, Any]) -> None:
    rows = {(row["router"], row["kept"]): row for row in result["rows"]}
    assert list(rows) == [("dense", 1.0), *((router, kept) for router in ("box", "basis") for kept in (0.2, 1.5))]
    dense = rows["dense", 1.0]
    for (router, kept), row in rows.items():
        assert row["digest"] == dense["digest"]
        assert len(row["nll"]) == len(row["greedy"]) == 2
        if router != "dense" and kept > 1:  # the budget covers everything
            assert row["bytes_ratio"] == 1
            assert row["nll"] == pytest.approx(dense["nll"], abs=1e-4)
        elif router != "dense":
            assert row["bytes_ratio"] < 0.6


def test_the_readme_shows_the_shares_that_all_were_measured_at() -> None:
    machine = {"cpu": "C", "threads": 2, "simd": "S", "torch": "1", "transformers": "2", "kvpress": "3"}
    same = {"command": "c", "machine": machine, "places": 2, "positions": 4}
    late = {"kind": "late", "digest": "d", "nll": [1.0, 2.0], "greedy": [True, False]}
    text = {"kind": "text", "text": "novel", "context": 9}
    pressed = [late | {"press": "snapkv", "kept": kept} for kept in (0.12, 0.5)]
    pressed += [text | {"press": "snapkv", "kept": 0.12, "kl": kl} for kl in (0.1, 0.3)]
    ours = [late | {"router": "dense", "kept": 1.0}, late | {"router": "box", "kept": 0.12}]
    equal = {
        "group": "equal",
        "text": "novel",
        "context": 9,
        "page_size": 16,
        "router": "box",
        "share": 0.12,
        "kl": 0.5,
    }
    tables = rivals_table(same | {"rows": pressed}, same | {"rows": ours}, same | {"rows": [equal]})
    assert "| kvpress, `snapkv` | 0.2000 |\n| OVAL, `box` | 0.5000 |" in tables
    assert "| late questions; dense: 1 of 2, NLL 1.50 | 12% |" in tables
    with pytest.raises(ValueError, match="places differ: 2 with kvpress, 1 with OVAL"):
        rivals_table(same | {"rows": pressed}, same | {"rows": ours}, same | {"rows": [equal], "places": 1})
