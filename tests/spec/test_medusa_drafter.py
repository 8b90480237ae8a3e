from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import OvalConfig, attach
from oval_spec import Drafter, MedusaDrafter, MedusaHeads, Tree, speculative_generate
from oval_spec.cached_model import CachedModel, head_of, watch_head
from oval_spec.drafters import Seen
from oval_spec.drafters.medusa import MOST_TOKENS
from tests.core.tiny_models import PAD, VOCAB, llama, prompt
from tests.spec.counting_model import CYCLE, counted, counting_model
from tests.spec.test_medusa_heads import HIDDEN, random_heads

CHAIN = [(0,), (0, 0), (0, 0, 0)]
BUSHY = [(0,), (1,), (0, 0), (4,), (1, 0), (0, 2), (0, 0, 0), (1, 0, 1)]
NEW = 20


def _batch() -> dict[str, Tensor]:
    """Three prompts of different length, padded on the left."""
    ids, mask = prompt(24, rows=3), torch.ones(3, 24, dtype=torch.long)
    for row, padding in enumerate((0, 5, 11)):
        ids[row, :padding], mask[row, :padding] = PAD, 0
    return {"input_ids": ids, "attention_mask": mask}


def _plain(model: Any, **settings: Any) -> Tensor:
    found: Tensor = model.generate(**_batch(), max_new_tokens=NEW, do_sample=False, **settings)
    return found


@pytest.mark.parametrize("paths", [None, CHAIN, BUSHY], ids=["likely", "chain", "bushy"])
@pytest.mark.parametrize("own_heads", [False, True])
def test_greedy_text_is_that_of_the_target(paths: Any, own_heads: bool) -> None:
    model = llama()
    plain = _plain(model)
    drafter = MedusaDrafter(random_heads(own_heads=own_heads), paths)
    out = speculative_generate(model, _batch(), drafter, max_new_tokens=NEW, do_sample=False, adapt=False)
    assert out.sequences is not None
    assert out.stats is not None
    assert out.sequences.tolist() == plain.tolist()
    assert out.stats.drafted_steps > 0


def test_greedy_text_ends_where_that_of_the_target_ends() -> None:
    model = llama()
    eos = int(_plain(model)[1, 24 + NEW // 2])
    plain = _plain(model, eos_token_id=eos)
    out = speculative_generate(
        model, _batch(), MedusaDrafter(random_heads(), BUSHY), max_new_tokens=NEW, do_sample=False, eos_token_id=eos
    )
    assert out.sequences is not None
    assert out.sequences.tolist() == plain.tolist()
    assert plain[1, -1] == PAD


def _counting_heads(count: int) -> MedusaHeads:
    """Heads that are right about the counting model: theirs are the target's rows, moved on by 1, 2, ..."""
    model: Any = counting_model()
    heads = MedusaHeads.for_target(model, count, own_heads=True)
    assert heads.own_weight is not None
    with torch.no_grad():
        for head in range(count):
            ids = counted(CYCLE)
            heads.own_weight[head][ids.roll(-1 - head)] = model.lm_head.weight[ids]
    return heads.requires_grad_(False)


@pytest.mark.parametrize("paths", [CHAIN, BUSHY], ids=["chain", "bushy"])
def test_right_heads_have_every_token_accepted(paths: Any) -> None:
    out = speculative_generate(
        counting_model(),
        torch.stack([counted(7), counted(7, first=5)]),
        MedusaDrafter(_counting_heads(3), paths),
        max_new_tokens=21,
        do_sample=False,
        adapt=False,
    )
    assert out.sequences is not None
    assert out.stats is not None
    assert out.sequences.tolist() == [counted(28).tolist(), counted(28, first=5).tolist()]
    assert out.stats.accept_rate == {1: 1, 2: 1, 3: 1}
    assert out.stats.steps == 5, "after the prompt's token four at a time"


class _Recorder(MedusaDrafter):
    """Compares what it is shown, and what it makes of it, with the whole text read again."""

    def __init__(self, model: Any) -> None:
        super().__init__(random_heads(), BUSHY)
        self.target, self.calls = model, 0

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        trees, mask = super().draft(seen, most), _batch()["attention_mask"]
        assert seen.hidden is not None
        for row, (text, tree) in enumerate(zip(seen.texts, trees, strict=True)):
            ids = torch.tensor([text.tokens[int((mask[row] == 0).sum()) : -1]])
            noted: list[Tensor] = []
            with watch_head(self.target, noted.append):
                self.target(ids)
            torch.testing.assert_close(seen.hidden[row], noted[0][0, -1], atol=1e-4, rtol=1e-4)
            logits = self.heads.logits(self.heads.states(seen.hidden[row]), head_of(self.target))
            for token, depth, path in zip(tree.tokens, tree.depths, self.paths, strict=False):
                assert token == int(logits[depth - 1].argsort(descending=True)[path[-1]])
        self.calls += 1
        return trees


@pytest.mark.parametrize("logits_to_keep", [1, 0])
def test_drafts_come_from_the_hidden_state_that_gave_the_root(logits_to_keep: int) -> None:
    model = llama()
    recorder = _Recorder(model)
    speculative_generate(model, _batch(), recorder, max_new_tokens=8, do_sample=False, logits_to_keep=logits_to_keep)
    assert recorder.calls > 3


def test_small_drafts_are_the_first_nodes() -> None:
    drafter = MedusaDrafter(random_heads(), BUSHY, most_tokens=3)
    assert drafter.paths == ((0,), (1,), (0, 0))
    assert drafter.most_tokens == 3
    assert isinstance(drafter, Drafter)


def test_the_shape_follows_the_accuracies() -> None:
    sure = random_heads(2, accuracies=[[0.9, 0.1], [0.8, 0.1]])
    unsure = random_heads(2, accuracies=[[0.5, 0.4], [0.1, 0.1]])
    assert MedusaDrafter(sure, most_tokens=2).paths == ((0,), (0, 0))
    assert MedusaDrafter(unsure, most_tokens=2).paths == ((0,), (1,))
    unmeasured = MedusaDrafter(random_heads(3), most_tokens=5)
    assert unmeasured.paths == ((0,), (0, 0), (1,), (0, 0, 0), (0, 1))
    assert MedusaDrafter(random_heads(3)).most_tokens == MOST_TOKENS


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)], r"path \(0, 0, 0, 0\) needs 4 Medusa heads, got 3"),
        ([(0,), (1, 0)], r"path \(1, 0\) needs its parent \(1,\) before it"),
        ([(0,), (0,)], r"path \(0,\) is there twice"),
        ([], "paths must name at least one node, got none"),
    ],
)
def test_impossible_shapes_are_refused(paths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MedusaDrafter(random_heads(), paths)


def test_what_does_not_fit_is_refused() -> None:
    model: Any = llama()
    with pytest.raises(TypeError, match="heads must be MedusaHeads, got list"):
        MedusaDrafter([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="most_tokens must be an integer >= 1, got 0"):
        MedusaDrafter(random_heads(), most_tokens=0)
    with pytest.raises(ValueError, match="a vocabulary of 97, got LlamaForCausalLM with 64 and 96"):
        speculative_generate(model, prompt(8), MedusaDrafter(MedusaHeads(HIDDEN, 1, 1, 97)), max_new_tokens=2)
    with pytest.raises(ValueError, match="below the vocabulary of 96, got 96"):
        speculative_generate(model, prompt(8), MedusaDrafter(random_heads(), [(VOCAB,)]), max_new_tokens=2)


@pytest.mark.parametrize("own_heads", [False, True])
def test_only_tokens_that_were_learned_are_drafted(own_heads: bool) -> None:
    """The candidates are the best among `words`, whatever else has higher logits."""
    model, words = counting_model(), torch.tensor([3, 4, 8, 11, 50])
    heads = MedusaHeads.for_target(model, 2, own_heads=own_heads)
    torch.nn.init.normal_(heads.weight, std=0.2)
    heads.words = words
    drafter, hidden = (
        MedusaDrafter(heads.requires_grad_(False), ((0,), (1,), (0, 0))),
        torch.randn(3, heads.hidden_size),
    )
    expected = heads.logits(heads.states(hidden), head_of(model))[..., words].topk(2).indices
    with attach(model, OvalConfig()), torch.no_grad():
        target = CachedModel(model, OvalConfig())
        target.hidden = hidden
        with drafter.begin(target, {}, []):
            assert drafter._candidates(hidden, 2, 2) == words[expected].tolist()


def test_more_candidates_than_words(tmp_path: Path) -> None:
    heads = MedusaHeads.for_target(counting_model(), 1)
    heads.words = torch.tensor([5, 9])
    loaded = MedusaHeads.load(heads.save(tmp_path))
    assert loaded.words is not None
    assert loaded.words.tolist() == [5, 9]
    with pytest.raises(ValueError, match="ranks of paths must be below the vocabulary of 2, got 2"):
        MedusaDrafter(loaded, ((0,), (1,), (2,))).check(counting_model())
