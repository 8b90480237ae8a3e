import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from oval_mm.head_file import load_head, save_head
from oval_mm.hybrid_head import HeadSizes, HybridHead, shift_within
from oval_mm.hybrid_router import HybridRouter
from oval_mm.page_embeddings import ConceptEmbedding, MeanKeyEmbedding, PageEmbedding, PlaceEmbedding
from tests.mm.tiny_concepts import random_space
from tests.mm.tiny_vlms import tiny

SIZES = HeadSizes(layers=2, kv_heads=2, hidden_size=64, embedding_size=8, dim=4)
KINDS: dict[str, Callable[[], PageEmbedding]] = {
    "clip-text": lambda: ConceptEmbedding(random_space()),
    "random": lambda: ConceptEmbedding(random_space().with_random_texts(0), "random"),
    "mean-key": lambda: MeanKeyEmbedding(16),
    "text-only": PlaceEmbedding,
}


def saved(path: Path, kind: str = "clip-text", **changes: int) -> tuple[HybridHead, PageEmbedding]:
    embedding = KINDS[kind]()
    sizes = HeadSizes(**{**vars(SIZES), "embedding_size": embedding.size, **changes})
    head = HybridHead(sizes, seed=3)
    torch.nn.init.normal_(head.gate)
    save_head(path, head, embedding)
    return head, embedding


def test_scores_are_those_of_one_attention_a_head() -> None:
    head = HybridHead(SIZES, seed=1).requires_grad_(False)
    head.gate.normal_()
    hidden, embeddings = torch.randn(3, 5, 64), torch.randn(3, 1, 7, 8)
    scores = head.scores(1, hidden, head.page_keys(1, embeddings))
    query = head.query[1, 0] @ hidden[2, 4]
    key = head.key[1, 0] @ embeddings[2, 0, 6]
    torch.testing.assert_close(scores[2, 0, 4, 6], head.gate[1, 0] * (query @ key) / 2)
    by_head = torch.randn(3, 2, 7, 8)
    torch.testing.assert_close(head.page_keys(0, by_head)[1, 1, 2], head.key[0, 1] @ by_head[1, 1, 2])


def test_sizes_are_positive() -> None:
    with pytest.raises(ValueError, match=r"sizes of a head must be at least 1, got \{'layers': 0\}"):
        HeadSizes(0, 2, 64, 8)


def test_an_untrained_head_says_nothing_and_can_learn() -> None:
    head = HybridHead(SIZES)
    scores = head.scores(0, torch.randn(1, 5, 64), head.page_keys(0, torch.randn(1, 1, 7, 8)))
    assert not scores.any()
    scores.square().sub(scores).sum().backward()
    assert head.gate.grad is not None
    assert head.gate.grad[0].abs().min() > 0
    assert torch.equal(HybridHead(SIZES, 1).query, HybridHead(SIZES, 1).query)
    assert not torch.equal(HybridHead(SIZES, 1).query, HybridHead(SIZES, 2).query)


def test_a_shift_moves_mass_among_its_pages_only() -> None:
    torch.manual_seed(0)
    scores, extra = torch.randn(2, 2, 3, 1, 6), torch.randn(2, 2, 1, 1, 6)
    scores[..., 0] = -torch.inf  # a page without tokens
    among = torch.tensor([[True, True, True, True, False, False], [False] * 6])[:, None, None, None]
    before, after = scores.softmax(-1), (scores + shift_within(scores, extra, among)).softmax(-1)
    torch.testing.assert_close(after[0, ..., 4:], before[0, ..., 4:])
    assert torch.equal(after[1], before[1])
    inside = (scores + extra)[0, ..., :4].softmax(-1)
    torch.testing.assert_close(after[0, ..., :4], inside * before[0, ..., :4].sum(-1, keepdim=True))
    assert not shift_within(scores, torch.zeros(1), among).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_head_is_the_same(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without open_clip."""
    monkeypatch.setitem(sys.modules, "open_clip", None)
    head, embedding = saved(tmp_path / "new" / "head.safetensors", kind)
    loaded, again = load_head(tmp_path / "new" / "head.safetensors")
    assert loaded.sizes == head.sizes
    assert (again.kind, again.size, type(again)) == (kind, embedding.size, type(embedding))
    assert all(torch.equal(head.state_dict()[name], tensor) for name, tensor in loaded.state_dict().items())
    assert not any(weights.requires_grad for weights in loaded.parameters())
    if isinstance(embedding, ConceptEmbedding):
        assert isinstance(again, ConceptEmbedding)
        assert again.space.concepts == embedding.space.concepts
        states = torch.randn(2, 32)
        assert torch.equal(again.space.describe(states), embedding.space.describe(states))


def rewritten(path: Path, change: Callable[[dict[str, str], dict[str, Any]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        about, tensors = file.metadata(), {name: file.get_tensor(name) for name in names}
    change(about, tensors)
    save_file(tensors, path, about)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about, _: about.pop("kv_heads"), r"expected metadata \[.*'kv_heads'.*\], got \["),
        (lambda about, _: about.update(more="1"), r"expected metadata .*'more'"),
        (lambda about, _: about.update(layers="two"), r"metadata layers cannot be read, got 'two'"),
        (lambda about, _: about.update(concepts="[red"), r"metadata concepts cannot be read"),
        (lambda about, _: about.update(format="1"), r"expected metadata format 'oval hybrid head 1' and kind one of"),
        (lambda about, _: about.update(kind="guess"), r"kind one of \('clip-text', .*\), got \(.*, 'guess'\)"),
        (lambda about, _: about.update(layers="3"), r"head.gate to be \(torch.float32, \[3, 2\]\), got .*\[2, 2\]"),
        (lambda _, tensors: tensors.pop("head.query"), r"expected tensor head.query to be .*\[2, 2, 4, 64\].*got None"),
        (
            lambda _, tensors: tensors.update(x=torch.zeros(1)),
            r"expected tensor x to be None, got \(torch.float32, \[1",
        ),
        (
            lambda _, tensors: tensors.update({"concepts.texts": torch.zeros(5, 8)}),
            r"expected tensor concepts.texts to be \(torch.float32, \[6, 8\]\), got \(torch.float32, \[5, 8\]\)",
        ),
        (
            lambda _, tensors: tensors.update({"head.gate": torch.zeros(2, 2).half()}),
            r"expected tensor head.gate to be \(torch.float32, \[2, 2\]\), got \(torch.float16, \[2, 2\]\)",
        ),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "head.safetensors"
    saved(path)
    rewritten(path, change)
    with pytest.raises(ValueError, match=message):
        load_head(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "head.safetensors"
    with pytest.raises(FileNotFoundError, match=r"expected a hybrid head in .*, got no file"):
        load_head(path)
    for content in (b"", b"not safetensors at all"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="expected a hybrid head, got no safetensors file"):
            load_head(path)
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"expected metadata format .*, got \(None, None\)"):
        load_head(path)
    with pytest.raises(ValueError, match="must have 8 dimensions, got 16"):
        save_head(path, HybridHead(SIZES), MeanKeyEmbedding(16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"another model: expected HeadSizes\(layers=2, .*, got HeadSizes\(layers=3"),
        ({"kv_heads": 4}, r"expected HeadSizes\(layers=2, kv_heads=2, .*, got HeadSizes\(layers=2, kv_heads=4"),
        ({"hidden_size": 32}, r"hidden_size=64, .*, got .*hidden_size=32"),
    ],
)
def test_a_head_of_another_model_is_refused(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    saved(tmp_path / "head", "clip-text", **changes)
    with pytest.raises(ValueError, match=message):
        HybridRouter.load(tmp_path / "head", tiny("llava").model)


def test_embeddings_of_another_model_are_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "head", tiny("llava").model
    save_head(path, HybridHead(SIZES), ConceptEmbedding(random_space(tower_width=24)))
    with pytest.raises(ValueError, match="another model: expected patches of 32 dimensions, got 24"):
        HybridRouter.load(path, model)
    save_head(path, HybridHead(SIZES), MeanKeyEmbedding(8))
    with pytest.raises(ValueError, match="another model: expected keys of 16 dimensions, got 8"):
        HybridRouter.load(path, model)
    head = HybridHead(HeadSizes.of(model, 8, 4))
    with pytest.raises(ValueError, match="expects page embeddings of 8 dimensions, got 24"):
        HybridRouter(head, PlaceEmbedding())
    with pytest.raises(ValueError, match=r"base must be 'auto' or one of \('box', 'basis'\), got 'quest'"):
        HybridRouter(head, MeanKeyEmbedding(8), base="quest")
