from pathlib import Path
from typing import Any

import pytest
import torch
from rich.text import Text

from demos import medusa
from demos.smollm2 import load_model
from demos.smollm2_heads import HEADS, load_heads
from demos.texts import load_text
from oval_spec import MedusaDrafter, MedusaHeads, speculative_generate
from tests.tiny_checkpoint import save_tiny_checkpoint


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    return save_tiny_checkpoint(tmp_path / "model")


def test_both_texts_are_shown_and_identical(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    MedusaHeads(32, 2, vocab_size=257).save(tmp_path / "heads")
    picture = tmp_path / "out" / "medusa.png"
    where = ["--model", str(model), "--heads", str(tmp_path / "heads"), "--picture", str(picture)]
    medusa.main(["why is the sky blue?", "--new-tokens", "20", *where])
    shown = capsys.readouterr().out
    assert "The two texts are identical." in shown
    assert "tokens a pass" in shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_guessed_tokens_are_coloured(model: Path) -> None:
    _, tokenizer = load_model(str(model))
    text: Text = medusa._coloured(tokenizer, torch.tensor(tokenizer("abcdef").input_ids), [[2], [0], [None], [1]])
    assert text.plain == "abcdef"
    assert [text.plain[span.start : span.end] for span in text.spans] == ["b", "c"]


def test_heads_for_another_model(model: Path, tmp_path: Path) -> None:
    other, _ = load_model(str(model))
    assert load_heads(other) is None
    MedusaHeads(16, 2).save(tmp_path)
    with pytest.raises(ValueError, match="expected a target with hidden size 16"):
        load_heads(other, tmp_path)


def test_the_shipped_heads_are_for_smollm2() -> None:
    heads = MedusaHeads.load(HEADS)
    assert (heads.hidden_size, heads.num_heads, heads.vocab_size) == (576, 4, 49152)
    assert heads.model == "smollm2-135m-instruct"
    assert heads.words is not None
    assert heads.accuracies is not None
    assert heads.accuracies[0][0] > 0.3


@pytest.mark.slow
def test_shipped_heads_guess_what_the_model_says() -> None:
    model, tokenizer = load_model(None)
    heads = load_heads(model)
    assert heads is not None
    ids = torch.tensor([tokenizer(f"{load_text('novel')[medusa.PASSAGE]}").input_ids])
    settings: Any = {"max_new_tokens": 48, "do_sample": False}
    out = speculative_generate(model, {"input_ids": ids}, MedusaDrafter(heads), adapt=False, **settings)
    plain: Any = model.generate
    assert torch.equal(out.sequences, plain(ids, **settings))
    assert out.stats.accepted_mean > 0.5
