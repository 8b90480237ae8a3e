"""Training the head that sizes pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from oval_core.page_sizing.head import SizingHead
from oval_core.page_sizing.self_sized import page_error
from oval_core.page_sizing.training import loss_of, main, measure, record_of, train
from tests.core.tiny_models import VOCAB, llama


def uneven(seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values that hardly change for a long time, then all the time, and so on."""
    chance = torch.Generator().manual_seed(seed)
    calm = torch.randn(2, 6, 1, 4, generator=chance).expand(-1, -1, 37, -1)
    busy = torch.randn(2, 6, 10, 4, generator=chance)
    states = torch.cat([calm, busy], 2).flatten(1, 2)
    return states + 0.05 * torch.randn(states.shape, generator=chance), states


def test_the_error_by_hand() -> None:
    """Two pages of two tokens: one whose tokens are alike, one of a pair around its mean."""
    states = torch.tensor([[1.0], [1.0], [-2.0], [0.0]])
    shares = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    assert float(page_error(states, shares)) == pytest.approx(2 / 6)


def test_training_lowers_the_error() -> None:
    layers = [uneven(seed) for seed in range(6)]
    head = train(layers[1:], 40, 2, 8, seed=0)
    found = {name: measure(layers[:1], way, 8, 32) for name, way in (("full", None), ("head", head))}
    assert all(way["mean_tokens"] == pytest.approx(8, abs=0.5) for way in found.values())
    assert found["head"]["error"] < 0.8 * found["full"]["error"]
    fresh = train(layers[1:], 1, 1, 8, seed=0)
    assert float(loss_of(head, layers[0], 8)) < float(loss_of(fresh, layers[0], 8))
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_training_is_repeatable_and_leaves_the_random_numbers_alone() -> None:
    layers, before = [uneven(0)], torch.get_rng_state()
    first, second = (train(layers, 2, 1, 8, seed=3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_to_train_on_is_refused() -> None:
    with pytest.raises(ValueError, match="got no layer"):
        train([], 1, 1, 16, 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "model")
    llama().save_pretrained(tmp_path / "model")
    (tmp_path / "text").write_text(" ".join(f"w{i * i % VOCAB}" for i in range(1100)))
    out = tmp_path / "heads" / "sizing.safetensors"
    arguments = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text"), "--out", str(out)]
    main([*arguments, "--stretches", "2", "--steps", "2", "--batch", "1"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found) == {"full pages", "spread", "head"}
    assert all(0 < way["error"] < 1 for way in found.values())
    assert float(SizingHead.load(out)(torch.zeros(1, 4))) > 0
    record = json.loads(record_of(out).read_text())
    assert (record["mean_tokens"], record["measured"]) == (16, found)
    assert record["train_s"] > 0
    with pytest.raises(SystemExit, match="do not fit"):
        main([*arguments, "--stretches", "3"])
    with pytest.raises(SystemExit):
        main([*arguments, "--stretches", "1"])
