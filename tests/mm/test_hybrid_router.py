"""Routing by what pictures show: nothing changes until a head says so; every page has its own picture's embedding."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_core import OvalConfig
from oval_core.routers import Pages, Router, Selection
from oval_mm import HybridRouter, attach
from oval_mm.hybrid_router import hybrid_of
from oval_mm.image_spans import find_spans
from oval_mm.page_embeddings import ConceptEmbedding, MeanKeyEmbedding, PageEmbedding, PlaceEmbedding
from tests.mm.test_attach import continued, logits
from tests.mm.tiny_concepts import make_router, random_space
from tests.mm.tiny_vlms import TinyVlm, batch, generate, photo, tiny, words

TOKENS = 25  # of a picture of the tiny LLaVA


class Spy(HybridRouter):
    """Keeps what it was asked last in every layer."""

    def select(self, query: Tensor, pages: Pages) -> Selection:
        vars(self).setdefault("asked", {})[pages.layer_idx] = (query, pages)
        return super().select(query, pages)


class Wrapped(Router):
    """Asks another router."""

    name = "wrapped"
    needs_hidden_states = True

    def __init__(self, inner: Router) -> None:
        self.inner = inner

    def select(self, query: Tensor, pages: Pages) -> Selection:
        return self.inner.select(query, pages)


def config(router: Any, **settings: Any) -> OvalConfig:
    common: dict[str, Any] = {"page_size": 8, "seal_tokens": 1, "impl": "reference", "rank": 4, "stats_every": 0}
    return OvalConfig(**{**common, "budget_pages": 5, "router": router, **settings})


def everything(router: Any, **settings: Any) -> OvalConfig:
    return config(router, budget_pages=None, budget_ratio=1.0, always_paged=True, **settings)


def two_pictures(vlm: TinyVlm) -> dict[str, Any]:
    return vlm.inputs((f"{words(5)} ** {words(9)}", [photo(0), photo(1)]))


def described(vlm: TinyVlm, router: HybridRouter, *pictures: Any) -> Tensor:
    """Embeddings of all tokens of each picture, `[pictures, T, E]`, from the tower alone."""
    assert isinstance(router.embedding, ConceptEmbedding)
    pixels = vlm.inputs((" *" * len(pictures), list(pictures)))["pixel_values"]
    with torch.no_grad():
        states = vlm.model.model.vision_tower(pixels).last_hidden_state[:, 1:]
        return torch.stack([router.embedding.space.describe(one) for one in states])


def assert_pages_show(router: Any, tables: Any, ids: Tensor, expected: list[Tensor]) -> None:
    """Each layer's page keys are those of the means over the tokens that stand in the page; no other page has any.

    Args:
        ids: `[B, T]` of the prompts; expected: `[pictures, T, E]` of each row.
    """
    rows = find_spans(ids, tiny("llava").model.config.image_token_id, TOKENS)
    assert sorted(router.asked) == [0, 1]
    for layer, (_, pages) in router.asked.items():
        keys, known, _ = router.looked_up(pages)
        for row, spans in enumerate(rows):
            of_token = {token: (one.image, token - one.start) for one in spans for token in range(one.start, one.stop)}
            assert sum(known[row].tolist()) == sum(tag >= 0 for tag in tables[row].tags) > 0
            for page in range(tables[row].num_pages):
                tokens = [of_token[token] for token in tables[row].positions(page) if token in of_token]
                assert bool(known[row, page]) == bool(tokens)
                if tokens:
                    mean = torch.stack([expected[row][image][token] for image, token in tokens]).mean(0)
                    want = router.head.page_keys(layer, mean[None, None, None])[0, :, 0]
                    torch.testing.assert_close(keys[row, :, page].float(), want, atol=5e-3, rtol=5e-3)


@pytest.mark.parametrize("base", ["box", "basis"])
def test_with_closed_gates_it_is_the_training_free_router(base: str) -> None:
    vlm, results = tiny("llava"), []
    inputs = batch(vlm)
    for router in (base, make_router(vlm.model, gate=0.0, base=base), make_router(vlm.model, gate=3.0, base=base)):
        with attach(vlm.model, vlm.processor, config(router)) as handle, handle.trace() as entries:
            results.append((logits(generate(vlm, inputs)), [entry.read for entry in entries], handle.stats()))
    (plain, its_pages, its_stats), (closed, same_pages, stats), (_, other_pages, _) = results
    assert closed.equal(plain)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(same_pages, its_pages, strict=True))
    assert any(not torch.equal(ours, theirs) for ours, theirs in zip(other_pages, its_pages, strict=True))
    assert stats["pages_read_mean"] == its_stats["pages_read_mean"] < its_stats["pages"]
    assert stats["metadata_bytes"] > its_stats["metadata_bytes"]
    assert stats["pictures_without_embedding"] == 0


@pytest.mark.parametrize("base", ["box", "basis"])
def test_the_hidden_state_decides_among_image_pages_alone(base: str) -> None:
    vlm = tiny("llava")
    router = make_router(vlm.model, gate=2.0, base=base, kind=Spy)
    with attach(vlm.model, vlm.processor, config(router)):
        generate(vlm, two_pictures(vlm))
    query, pages = router.asked[1]
    other = dataclasses.replace(pages, hidden_states=-pages.hidden_states)
    ours, theirs = router.score(query, pages), router.score(query, other)
    is_image = pages.tags[0] >= 0
    assert (ours - theirs)[..., is_image].abs().min() > 1e-3
    assert torch.equal(ours[..., ~is_image], theirs[..., ~is_image])
    torch.testing.assert_close(ours[..., is_image].logsumexp(-1), theirs[..., is_image].logsumexp(-1))
    chosen = [router.select(query, one).pages.sort(-1).values for one in (pages, other)]
    assert not torch.equal(*chosen)
    with pytest.raises(ValueError, match="needs the hidden states of an attached model, got none"):
        router.select(query, dataclasses.replace(pages, hidden_states=None))


def test_estimates_of_pages_that_are_not_read_stay_as_they_are() -> None:
    """A head only ranks: with everything read but a tail, the output is as near to dense as without it."""
    vlm = tiny("llava")
    router = make_router(vlm.model, gate=2.0, base="basis", kind=Spy)
    with attach(vlm.model, vlm.processor, config(router, shortlist_ratio=1.0)):
        generate(vlm, two_pictures(vlm))
    query, pages = router.asked[0]
    selection = router.select(query, pages)
    read = torch.zeros(1, 2, len(pages.index), dtype=torch.bool).scatter_(-1, selection.pages, selection.valid)
    every = pages.index.expand(1, 2, -1)
    page = pages.kernels.evaluate_bases(query, pages.basis, every, pages.scaling, pages.softcap)
    expected = page.lse.masked_fill(read[:, :, None, None], -torch.inf).logsumexp(-1)
    assert selection.tail is not None
    torch.testing.assert_close(selection.tail.lse, expected)


@pytest.mark.parametrize("block", [None, 2])
def test_embeddings_follow_their_pictures_over_rows_and_turns(block: int | None) -> None:
    """A left-padded batch of two and one pictures; then a turn with one more in the first row."""
    vlm = tiny("llava")
    router = make_router(vlm.model, gate=1.0, kind=Spy)
    first, second, third, new = described(vlm, router, photo(0), photo(1, 60, 30), photo(2), photo(3))
    with attach(vlm.model, vlm.processor, everything(router), block=block) as handle:
        inputs = batch(vlm)
        output = generate(vlm, inputs)
        rows = [torch.stack([first, second]), third[None]]
        assert_pages_show(router, output.cache.layers[0].tables, output.sequences, rows)
        turn = vlm.inputs((f"{words(3)} * {words(9)}", [photo(3)]), (words(4), []))
        ids = torch.cat([output.sequences, turn.pop("input_ids")], dim=1)
        answer = torch.ones_like(output.sequences[:, inputs["input_ids"].shape[1] :])
        mask = torch.cat([inputs["attention_mask"], answer, turn.pop("attention_mask")], dim=1)
        later = generate(vlm, {**turn, "input_ids": ids, "attention_mask": mask}, cache=output.cache)
        rows = [torch.stack([first, second, new]), third[None]]
        assert_pages_show(router, later.cache.layers[0].tables, later.sequences, rows)
        assert handle.stats()["pictures_without_embedding"] == 0


def test_embeddings_follow_rows_that_change_places() -> None:
    vlm = tiny("llava")
    router = make_router(vlm.model, gate=1.0, kind=Spy)
    first, second, third = described(vlm, router, photo(0), photo(1, 60, 30), photo(2))
    both, alone = torch.stack([first, second]), third[None]
    with attach(vlm.model, vlm.processor, everything(router)):
        output = generate(vlm, batch(vlm), num_beams=2, num_return_sequences=2)
        prompts = batch(vlm)["input_ids"].repeat_interleave(2, 0)
        tables = output.cache.layers[0].tables
        assert_pages_show(router, tables, prompts, [both, both, alone, alone])
        cache = copy.deepcopy(output.cache)
        order = torch.tensor([3, 0, 2])
        cache.batch_select_indices(order)
        seen = batch(vlm)["attention_mask"].repeat_interleave(2, 0)[order]
        seen = torch.nn.functional.pad(seen, (0, cache.get_seq_length() + 1 - seen.shape[1]), value=1)
        with torch.no_grad():
            vlm.model(input_ids=torch.full((3, 1), 3), attention_mask=seen, cache=cache)
        assert_pages_show(router, cache.layers[0].tables, prompts[order], [alone, both, alone])


@pytest.mark.parametrize("how", ["pixels", "chunks"])
def test_embeddings_of_a_plain_forward_pass_and_of_chunks(how: str) -> None:
    vlm = tiny("llava")
    router = make_router(vlm.model, gate=1.0, kind=Spy)
    expected = described(vlm, router, photo(0), photo(1))
    inputs = two_pictures(vlm)
    with attach(vlm.model, vlm.processor, everything(router)):
        if how == "chunks":
            cache = generate(vlm, inputs, prefill_chunk_size=7).cache
        else:
            with torch.inference_mode():
                cache = vlm.model(**inputs).cache
                vlm.model(input_ids=torch.tensor([[4]]), cache=cache)
    assert_pages_show(router, cache.layers[0].tables, inputs["input_ids"], [expected])


def test_pictures_are_described_once() -> None:
    vlm, calls = tiny("llava"), []

    class Counted(ConceptEmbedding):
        def of_pictures(self, features: Any, states: Any) -> list[Tensor | None]:
            calls.append(len(features))
            return super().of_pictures(features, states)

    router = make_router(vlm.model, 1.0, Counted(random_space()))
    with attach(vlm.model, vlm.processor, config(router)):
        first = generate(vlm, two_pictures(vlm))
        assert calls == [2]
        continued(vlm, first, words(9, 2), [])
    assert calls == [2]


def test_pictures_without_an_embedding_are_routed_without_the_head_and_counted() -> None:
    """Encoded before the model was attached; in chunks, of several rows; by a tower that is not understood."""
    vlm, results = tiny("llava"), []
    ids = two_pictures(vlm)["input_ids"]
    with torch.no_grad():
        image = vlm.model.get_image_features(two_pictures(vlm)["pixel_values"])
    for router in ("box", make_router(vlm.model, gate=3.0)):
        with attach(vlm.model, vlm.processor, config(router)) as handle, torch.no_grad():
            cache = vlm.model(input_ids=ids, mm_encoder_outputs={"image": image}).cache
            results.append(vlm.model(input_ids=torch.tensor([[4]]), cache=cache).logits)
            stats = handle.stats()
            if router != "box":
                generate(vlm, batch(vlm), prefill_chunk_size=11)
                assert handle.stats()["pictures_without_embedding"] == 3
                generate(vlm, two_pictures(vlm))
                assert handle.stats()["pictures_without_embedding"] == 0
    assert torch.equal(*results)
    assert stats["pictures_without_embedding"] == 2
    other = tiny("idefics3")
    with attach(other.model, other.processor, config(make_router(other.model, gate=3.0))) as handle:
        assert logits(generate(other, batch(other))).isfinite().all()
        assert handle.stats()["pictures_without_embedding"] == 3


def kinds() -> Iterator[PageEmbedding]:
    yield ConceptEmbedding(random_space().with_random_texts(0), "random")
    yield MeanKeyEmbedding(16)
    yield PlaceEmbedding()


@pytest.mark.parametrize("embedding", [*kinds()], ids=lambda one: one.kind)
@pytest.mark.parametrize("base", ["box", "basis"])
def test_other_page_embeddings(embedding: PageEmbedding, base: str) -> None:
    vlm, results = tiny("llava"), []
    for gate in (0.0, 3.0):
        router = make_router(vlm.model, gate, embedding, base, kind=Spy)
        with attach(vlm.model, vlm.processor, config(router)) as handle, handle.trace() as entries:
            generate(vlm, batch(vlm))
            results.append([entry.read for entry in entries])
            assert handle.stats().get("pictures_without_embedding", 0) == 0
        for _, pages in router.asked.values():
            assert torch.equal(router.looked_up(pages)[1], (pages.tags >= 0) & (pages.index < pages.counts[:, None]))
    assert any(not torch.equal(*reads) for reads in zip(*results, strict=True))


def test_a_router_that_wraps_it_gets_pictures_too() -> None:
    vlm, router = tiny("llava"), make_router(tiny("llava").model, gate=3.0)
    outputs = []
    for one in (router, Wrapped(router)):
        with attach(vlm.model, vlm.processor, config(one)) as handle:
            outputs.append(logits(generate(vlm, two_pictures(vlm))))
            assert handle.stats()["pictures_without_embedding"] == 0
    assert torch.equal(*outputs)
    assert hybrid_of(Wrapped(Wrapped(router))) is router
    assert hybrid_of("box") is None


def test_copies_of_a_cache_share_the_router() -> None:
    router = make_router(tiny("llava").model, gate=3.0)
    assert copy.deepcopy({"router": router})["router"] is router


def test_a_head_of_another_model_changes_nothing() -> None:
    vlm, other = tiny("llava"), tiny("idefics3")
    router = make_router(other.model, 0.0)
    router.head.sizes = dataclasses.replace(router.head.sizes, layers=3)
    with pytest.raises(ValueError, match="the routing head is for another model"):
        attach(vlm.model, vlm.processor, config(router))
    with attach(vlm.model, vlm.processor):  # nothing was left behind
        generate(vlm, two_pictures(vlm))
