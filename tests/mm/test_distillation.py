import dataclasses
import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from oval_core import OvalConfig
from oval_mm import HybridRouter, attach
from oval_mm.concepts import concept_list
from oval_mm.distillation import divergence, main, make_embedding, measure, train_head
from oval_mm.hybrid_head import HeadSizes, HybridHead
from oval_mm.lessons import ANSWERS, LayerLesson, Lesson, Teacher, lessons
from oval_mm.page_embeddings import KINDS, PageEmbedding
from oval_mm.recipes.llava_batches import Batch, Pack, make_batch, packs
from oval_mm.recipes.question_packing import IGNORED, packed_outputs
from oval_mm.recipes.tiny_llava import save_llava
from tests.mm.tiny_concepts import clip_folder, llava_of_clip

pytest.importorskip("open_clip")


def some_packs(count: int, source: str = "two", split: str = "train") -> list[Pack]:
    return list(islice(packs(source, split, 64), count))


def untrained(model: Any, kind: str = "clip-text") -> tuple[HybridHead, PageEmbedding]:
    embedding = make_embedding(kind, model, str(clip_folder()), concept_list("scene")[:20], seed=0)
    return HybridHead(HeadSizes.of(model, embedding.size, dim=8), seed=0), embedding


def learned(model: Any, processor: Any, some: list[Pack], **how: Any) -> list[Lesson]:
    return list(lessons(model, processor, some, Teacher(*untrained(model), base="box"), page_size=8, **how))


def eagerly(model: Any, batch: Batch) -> Any:
    """The outputs of transformers' eager attention, which adds masks, with attention weights and hidden states."""
    model.set_attn_implementation("eager")
    added = torch.where(batch.packed.visible, 0.0, torch.finfo(torch.float32).min)
    packed = dataclasses.replace(batch.packed, visible=added)
    with torch.no_grad():
        return packed_outputs(model, packed, batch.pixels, output_attentions=True, output_hidden_states=True)


@pytest.mark.parametrize("tokens", ["all", "answers"])
def test_lessons_are_where_the_dense_model_looks(tokens: str) -> None:
    """Compared with the attention weights of transformers' eager attention."""
    model, processor = llava_of_clip()
    pack = some_packs(1)[0]
    (lesson,) = learned(model, processor, [pack], tokens=tokens)
    batch = make_batch([pack], processor)
    output = eagerly(model, batch)
    is_answer = torch.nn.functional.pad(batch.packed.labels[0, 1:] != IGNORED, (0, 1))
    chosen = is_answer if tokens == ANSWERS else torch.ones_like(is_answer)
    first = batch.packed.prefix[0].tolist().index(model.config.image_token_id)
    assert len(lesson) == len(output.attentions) == 2
    for number, layer in enumerate(lesson):
        on_images = output.attentions[number][0][:, chosen, first : first + 32].unflatten(-1, (4, 8)).sum(-1)
        share = (on_images / on_images.sum(-1, keepdim=True)).unflatten(0, (2, 2)).mean(1)
        torch.testing.assert_close(layer.share, share, atol=1e-4, rtol=1e-3)
        assert layer.coarse.shape == (2, 2, int(chosen.sum()), 4)
        before = output.hidden_states[number][0, chosen]
        hidden = model.model.language_model.layers[number].input_layernorm(before).detach()
        torch.testing.assert_close(layer.hidden, hidden, atol=1e-4, rtol=1e-3)
        assert (layer.share - layer.guess(None, number)).abs().max() > 1e-3


def test_a_teacher_leaves_the_model_as_it_is() -> None:
    model, processor = llava_of_clip()
    pack = some_packs(1)[0]
    batch = make_batch([pack], processor)
    with torch.no_grad():
        plain = packed_outputs(model, batch.packed, batch.pixels).logits
        found: Any = lessons(model, processor, [pack], Teacher(*untrained(model), base="box"), page_size=8)
        next(found)
        attached = packed_outputs(model, batch.packed, batch.pixels).logits
        found.close()
        assert torch.equal(packed_outputs(model, batch.packed, batch.pixels).logits, plain)
    torch.testing.assert_close(attached, plain, atol=1e-3, rtol=1e-4)


def test_a_head_learns() -> None:
    model, processor = llava_of_clip()
    head, _ = untrained(model)
    train = learned(model, processor, some_packs(2))
    before = measure(train, None)
    assert measure(train, head) == before
    losses = train_head(head, train, steps=60, rate=1e-2, seed=0)
    after = measure(train, head)
    assert after["kl"] < 0.8 * before["kl"]
    assert after["mass_recall"] > before["mass_recall"]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    again, _ = untrained(model)
    assert train_head(again, train, steps=60, rate=1e-2, seed=0) == losses


def test_the_figures() -> None:
    """Two heads, one token, eight pages: the guess ranks the truly heaviest page first in one head only."""
    share = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.04, 0.03, 0.02, 0.01]).expand(2, 1, 8)
    coarse = torch.zeros(2, 1, 1, 8)
    coarse[0, ..., [0, 1]] = 5.0
    coarse[1, ..., [6, 7]] = 5.0
    lesson = [LayerLesson(torch.zeros(1, 3), coarse, share, torch.zeros(1, 8, 2))]
    found = measure([lesson], None)
    assert found["page_recall"] == pytest.approx(0.5)
    assert found["mass_recall"] == pytest.approx((0.7 + 0.03) / 2)
    guess = coarse[:, 0].softmax(-1)
    assert found["kl"] == pytest.approx((share * (share / guess).log()).sum(-1).mean().item(), rel=1e-5)
    exact = [LayerLesson(torch.zeros(1, 3), share.log()[:, None], share, torch.zeros(1, 8, 2))]
    assert divergence(exact, None).abs() < 1e-6


def folder_of_llava(path: Path) -> Path:
    save_llava(*llava_of_clip(), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_the_command(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model_folder, out = folder_of_llava(tmp_path / "llava"), tmp_path / "heads" / "head.safetensors"
    counts = ["--sources", "one", "--packs", "2", "--held-out", "1", "--steps", "4", "--page-size", "8", "--dim", "8"]
    more = ["--block", "2"] if kind == "clip-text" else []
    clip = ["--clip", str(clip_folder())] if kind in ("clip-text", "random") else []
    main(["--model", str(model_folder), "--out", str(out), "--init", kind, *counts, *clip, *more])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["init"] == kind
    assert set(report["held_out"]["training_free"]) == set(report["held_out"]["head"])
    assert report["held_out"]["head"] != report["held_out"]["training_free"]
    model, processor = llava_of_clip()
    router = HybridRouter.load(out, model)
    assert router.embedding.kind == kind
    assert router.head.gate.any()
    config = OvalConfig(page_size=8, budget_pages=3, seal_tokens=1, router=router, impl="reference")
    inputs = processor(images=some_packs(1, "one")[0].images(), text="USER: <image> what", return_tensors="pt")
    with attach(model, processor, config) as handle:
        model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        stats = handle.stats()
    assert stats["dense_steps"] == {"empty cache": 1}
    assert stats.get("pictures_without_embedding", 0) == 0


def test_bad_options_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--model", str(tmp_path / "none"), "--out", str(tmp_path / "head")]
    for options, message in (
        ([], "--init clip-text needs --clip"),
        (["--init", "mean-key", "--held-out", "0"], "--held-out must be at least 1, got 0"),
        (["--init", "guess"], "invalid choice: 'guess'"),
    ):
        with pytest.raises(SystemExit):
            main([*needed, *options])
        assert message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"must hold a LLaVA in transformers' format, but has no config\.json"):
        main([*needed, "--init", "mean-key"])


def test_only_concepts_need_open_clip(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = llava_of_clip()
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(ImportError, match="pip install open_clip_torch"):
        untrained(model)
    for kind in ("mean-key", "text-only"):
        assert untrained(model, kind)[1].kind == kind
    with pytest.raises(ValueError, match=r"init must be one of .* got 'clip-text' and CLIP None"):
        make_embedding("clip-text", model, None, ("a", "b"), 0)
    teacher = Teacher(*untrained(model, "mean-key"), base="box")
    with pytest.raises(ValueError, match=r"tokens must be one of \('all', 'answers'\), got 'some'"):
        next(lessons(model, processor, some_packs(1), teacher, tokens="some"))
