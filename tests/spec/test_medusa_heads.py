import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from oval_spec import MedusaHeads
from oval_spec.cached_model import head_of
from oval_spec.medusa_heads import FILE, IGNORED, labels_for
from tests.core.tiny_models import VOCAB, llama

HIDDEN = 64


def random_heads(count: int = 3, blocks: int = 2, own_heads: bool = False, **settings: Any) -> MedusaHeads:
    """Heads that have learned something meaningless."""
    heads = MedusaHeads(HIDDEN, count, blocks, VOCAB, own_heads=own_heads, **settings)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return heads.requires_grad_(False)


def test_a_head_guesses_the_token_after_the_next_one() -> None:
    tokens = torch.tensor([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    assert labels_for(tokens, 0).tolist() == [[12, 13, 14, IGNORED, IGNORED], [22, 23, 24, IGNORED, IGNORED]]
    assert labels_for(tokens[0], 2).tolist() == [14, *[IGNORED] * 4]
    assert labels_for(tokens[0], 9).tolist() == [IGNORED] * 5
    with pytest.raises(ValueError, match="head must be an integer >= 0, got -1"):
        labels_for(tokens, -1)


@pytest.mark.parametrize("own_heads", [False, True])
def test_untrained_heads_repeat_the_target(own_heads: bool) -> None:
    model = llama()
    lm_head, hidden = head_of(model), torch.randn(2, 5, HIDDEN)
    heads = MedusaHeads.for_target(model, 3, own_heads=own_heads)
    logits = heads.logits(heads.states(hidden), lm_head)
    assert logits.shape == (3, 2, 5, VOCAB)
    torch.testing.assert_close(logits, lm_head(hidden).expand(3, -1, -1, -1))


class Quantised:
    """An output head whose weight holds no rows to pick from."""

    weight = torch.zeros(0, dtype=torch.int8)

    def __init__(self, lm_head: Any) -> None:
        self.lm_head = lm_head

    def __call__(self, states: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(states)
        return logits


@pytest.mark.parametrize("own_heads", [False, True])
def test_heads_compute_what_the_docstring_says(own_heads: bool) -> None:
    heads, lm_head, hidden = random_heads(own_heads=own_heads), head_of(llama()), torch.randn(5, HIDDEN)
    states = heads.states(hidden, most=2)
    assert len(states) == 2
    together = heads.logits(states, lm_head)
    for head in range(2):
        expected = hidden
        for weight, bias in zip(heads.weight[head], heads.bias[head], strict=True):
            expected = expected + torch.nn.functional.silu(expected @ weight.T + bias)
        torch.testing.assert_close(states[head], expected)
        expected = lm_head(expected)
        if heads.own_weight is not None and heads.own_bias is not None:
            expected = states[head] @ heads.own_weight[head].T + heads.own_bias[head]
        torch.testing.assert_close(together[head], expected)
        torch.testing.assert_close(heads.logits_of(head, states[head], lm_head), expected)
        words = torch.tensor([3, 90, 17])
        for found in (lm_head, Quantised(lm_head)):
            torch.testing.assert_close(heads.logits_of(head, states[head], found, words), expected[:, words])


@pytest.mark.parametrize("own_heads", [False, True])
def test_saved_heads_are_the_same_to_float16(tmp_path: Path, own_heads: bool) -> None:
    heads = random_heads(own_heads=own_heads, model="tiny", accuracies=[[0.5, 0.25], [0.25, 0.0], [0, 1]])
    assert heads.save(tmp_path / "new") == tmp_path / "new" / FILE
    loaded = MedusaHeads.load(tmp_path / "new")
    again = MedusaHeads.load(heads.save(tmp_path / "other.safetensors"))
    for name, parameter in heads.named_parameters():
        for found in (loaded, again):
            assert found.get_parameter(name).tolist() == parameter.half().float().tolist()
            assert not found.get_parameter(name).requires_grad
    assert (loaded.model, loaded.accuracies) == ("tiny", [[0.5, 0.25], [0.25, 0], [0, 1]])
    assert (loaded.hidden_size, loaded.num_heads, loaded.num_blocks, loaded.vocab_size) == (HIDDEN, 3, 2, VOCAB)
    assert loaded.own_heads == own_heads


def _change(file: Path, **entries: Any) -> None:
    """Rewrite the metadata of a file."""
    with safe_open(file, framework="pt") as saved:
        about = json.loads(saved.metadata()["about"])
        tensors = {name: saved.get_tensor(name) for name in saved.keys()}  # noqa: SIM118
        save_file(tensors, file, {"format": saved.metadata()["format"], "about": json.dumps(about | entries)})


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"num_heads": 4}, r"expected tensor bias to be \(torch.float16, \[4, 2, 64\]\), got .*\[3, 2, 64\]"),
        ({"num_blocks": 1}, r"expected tensor bias to be .*\[3, 1, 64\]"),
        ({"hidden_size": 32}, r"expected tensor bias to be .*\[3, 2, 32\]"),
        ({"own_heads": True}, r"expected tensor own_bias to be .*\[3, 96\]\), got None"),
        ({"num_heads": 0}, "num_heads must be an integer >= 1, got 0"),
        ({"num_heads": "3"}, "num_heads must be an integer >= 1, got '3'"),
        ({"accuracies": [[0.5]]}, r"accuracies must be 3 lists of equal length, got lists of lengths \[1\]"),
        ({"accuracies": [[0.5], [0.5], [1.5]]}, r"an accuracy must be a number in \[0, 1\], got 1.5"),
        ({"colour": "red"}, "expected metadata about .*'vocab_size'"),
    ],
)
def test_a_file_that_is_not_as_it_says_is_refused(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    file = random_heads().save(tmp_path)
    _change(file, **entries)
    with pytest.raises(ValueError, match=rf"{FILE}: {message}"):
        MedusaHeads.load(tmp_path)


@pytest.mark.parametrize("words", [[], [5, 4], [4, 4], [-1, 3], [3, VOCAB]])
def test_words_that_are_no_tokens_are_refused(tmp_path: Path, words: list[int]) -> None:
    heads = random_heads()
    heads.words = torch.tensor(words, dtype=torch.long)
    heads.save(tmp_path)
    with pytest.raises(ValueError, match="expected words as int32 tokens of a vocabulary of 96 in ascending order"):
        MedusaHeads.load(tmp_path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected Medusa heads in .*, got no file"):
        MedusaHeads.load(tmp_path)
    (tmp_path / FILE).write_text("no tensors")
    with pytest.raises(ValueError, match="expected Medusa heads, got no safetensors file"):
        MedusaHeads.load(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="expected metadata format 'oval medusa heads 1', got None"):
        MedusaHeads.load(tmp_path)
    save_file({"weight": torch.zeros(1)}, tmp_path / FILE, {"format": "oval medusa heads 1", "about": "{"})
    with pytest.raises(ValueError, match=r"metadata about cannot be read, got '\{'"):
        MedusaHeads.load(tmp_path)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        (MedusaHeads(32, 2, vocab_size=VOCAB, model="other"), "other: .* hidden size 32 .* LlamaForCausalLM with 64"),
        (MedusaHeads(HIDDEN, 2, vocab_size=97), "unnamed model: .* a vocabulary of 97, got LlamaForCausalLM .* 96"),
    ],
)
def test_another_target_is_refused(heads: MedusaHeads, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        heads.check(llama())


def test_a_target_that_fits_is_taken() -> None:
    model: PreTrainedModel = llama()
    for heads in (MedusaHeads.for_target(model, 1), MedusaHeads(HIDDEN, 2)):
        heads.check(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((HIDDEN, 0), "num_heads must be an integer >= 1, got 0"),
        ((HIDDEN, 1, 0), "num_blocks must be an integer >= 1, got 0"),
        ((0, 1), "hidden_size must be an integer >= 1, got 0"),
        ((HIDDEN, 1, 1, 0), "vocab_size must be an integer >= 1, got 0"),
    ],
)
def test_sizes_below_one_are_refused(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaHeads(*arguments)


def test_own_heads_need_a_vocabulary() -> None:
    with pytest.raises(ValueError, match="own_heads needs vocab_size, got None"):
        MedusaHeads(HIDDEN, 1, own_heads=True)
