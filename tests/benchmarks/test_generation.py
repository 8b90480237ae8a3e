"""Generation is measured once, small; what is compared and planted is what the module says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import generation, readme
from benchmarks.continuations import continuation, distinct_share, same_tokens
from benchmarks.greedy import continue_greedily
from benchmarks.needles import DEPTHS, FACTS, needles, plant
from benchmarks.prompts import chat_frame, make_prompts
from benchmarks.teacher_forcing import prefill, shared
from demos.smollm2 import load_model
from demos.texts import TEXTS, load_text
from oval_core import OvalConfig, attach
from tests.tiny_checkpoint import save_tiny_checkpoint

CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}[assistant]"


@pytest.fixture(name="checkpoint")
def _checkpoint(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "model")


def ignore(tokens: int) -> None:
    """Nobody watches the progress."""


def test_a_small_run_ends_in_one_json_line_that_the_readme_shows(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--prompts", "2", "--prompt-tokens", "300", "--new-tokens", "6", "--contexts", "500", "--documents", "1"]
    setting = ["--router", "box", "--budget-pages", "8"]
    generation.main(["--model", str(checkpoint), "--out", str(tmp_path), *sizes, *setting])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads((tmp_path / "generation.json").read_text())
    assert (result["router"], result["budget_pages"]) == ("box", 8)
    assert [(row["text"], row["context"], row["tokens"]) for row in result["rows"]] == [
        ("novel", 300, 6),
        ("reference", 300, 6),
    ]
    assert all(row["pages_read"] == 8 and row["read_ratio"] < 1 for row in result["rows"])
    assert [answer["depth"] for answer in result["needles"]] == list(DEPTHS)
    assert result["summary"]["asked"] == len(FACTS)
    page = tmp_path / "README.md"
    page.write_text("<!-- generation -->\nold\n<!-- /generation -->\n")
    readme.main(["--results", str(tmp_path), "--pages", str(page)])
    text = page.read_text()
    assert "| novel, from token" in text
    assert "| 500 |" in text
    assert "old" not in text


def test_the_readme_counts_answers_among_those_of_the_dense_model() -> None:
    asked = [(0.0, True, True), (0.0, False, True), (1.0, True, False)]
    answers = [{"context": 2000, "depth": depth, "dense": a, "oval": b, "read_ratio": 0.5} for depth, a, b in asked]
    result: dict[str, Any] = {"command": "C", "router": "box", "budget_pages": 96, "page_size": 16, "rows": []}
    result["machine"] = {"cpu": "C", "threads": 2, "simd": "S", "torch": "1", "transformers": "2"}
    result["summary"] = {"asked": 3, "dense_answers": 2, "oval_answers": 2, "both_answer": 1}
    table = readme.TABLES["generation"][1]({**result, "needles": answers})
    assert "| context | bytes / dense | depth 0% | depth 100% | all |" in table
    assert "| 2,000 | 50.0% | 1 of 1 | 0 of 1 | 1 of 2 |" in table
    assert "Of 3 questions the dense model answers 2, OVAL 2, of those that the dense model answers 1." in table


def test_a_full_budget_writes_the_dense_text(checkpoint: Path) -> None:
    model, tokenizer = load_model(str(checkpoint))
    config = OvalConfig(budget_pages=100, always_paged=True)
    (prompt,) = make_prompts(tokenizer, 1, 200)
    row = continuation(model, prompt, config, 20, ignore)
    assert (row.tokens, row.same_tokens, row.same_share, row.forced_share) == (20, 20, 1, 1)
    answers = needles(model, tokenizer, 400, (1, 2), config, ignore)
    assert [answer.dense_text for answer in answers] == [answer.oval_text for answer in answers]
    assert [answer.answer for answer in answers] == [FACTS[i].answer for i in (1, 2, 3, 4, 0)]


def test_the_cache_route_gives_what_generate_gives(checkpoint: Path) -> None:
    from transformers import DynamicCache

    model, _ = load_model(str(checkpoint))
    prompt = torch.randint(1, 250, (1, 90))
    expected = generate(model, prompt, 12)
    cache = DynamicCache(config=model.config)
    assert continue_greedily(model, cache, prompt, 12, ignore) == expected
    assert cache.get_seq_length() == 90 + 11
    assert model.generation_config is not None
    model.generation_config.eos_token_id = expected[3]
    stopped = continue_greedily(model, DynamicCache(config=model.config), prompt, 12, ignore)
    assert stopped == generate(model, prompt, 12)


def test_oval_writes_what_an_attached_model_generates(checkpoint: Path) -> None:
    model, _ = load_model(str(checkpoint))
    prompt = torch.randint(1, 250, (1, 300))
    prefix = prefill(model, prompt, 0, ignore)
    with attach(model, OvalConfig(router="box", budget_pages=4)) as handle:
        own = continue_greedily(model, shared(model, prefix.cache), prompt[:, -1:], 20, ignore)
        assert handle.stats()["pages_read_mean"] == 4
        assert own == generate(model, prompt, 20)
    dense = continue_greedily(model, shared(model, prefix.cache), prompt[:, -1:], 20, ignore)
    assert dense == generate(model, prompt, 20)


def generate(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    run: Any = model.generate
    output = run(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens)
    return [int(token) for token in output[0, prompt.shape[1] :]]


def test_identical_until_a_difference_or_an_end() -> None:
    assert same_tokens([1, 2, 3], [1, 2, 4]) == 2
    assert same_tokens([1, 2, 3], [1, 2]) == 2
    assert same_tokens([1, 2], [1, 2]) == 2
    assert distinct_share([7] * 13) == pytest.approx(0.1)
    assert distinct_share(list(range(9))) == 1


def test_facts_stand_at_their_depths_and_nowhere_else() -> None:
    paragraphs = [f"paragraph {i:03}" for i in range(101)]
    planted = plant("\n\n".join(paragraphs), FACTS).split("\n\n")
    assert [planted.index(fact.sentence) for fact in FACTS] == pytest.approx([0, 27, 53, 78, 105], abs=2)
    assert [part for part in planted if part.startswith("paragraph")] == paragraphs
    novel = load_text("novel").lower()
    for fact in FACTS:
        assert fact.is_answered(fact.sentence)
        assert fact.answer.lower() not in novel


def test_prompts_come_from_different_places_in_the_chat_template(checkpoint: Path) -> None:
    _, tokenizer = load_model(str(checkpoint))
    assert chat_frame(tokenizer) == ("", "\n\n")
    tokenizer.chat_template = CHAT
    assert chat_frame(tokenizer) == ("[user]", "[end][assistant]")
    prompts = make_prompts(tokenizer, 8, 500)
    assert {prompt.text for prompt in prompts} == set(TEXTS)
    assert len({(prompt.text, prompt.start) for prompt in prompts}) == 8
    for prompt in prompts:
        assert prompt.tokens.shape == (1, 500)
        words = str(tokenizer.decode(prompt.tokens[0]))
        assert words.startswith("[user]")
        assert words.endswith(f"\n\n{prompt.instruction}[end][assistant]")
