"""OVAL on stock vision-language models: the same text, and pictures in pages of their own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from oval_core import OvalConfig
from oval_core import attach as attach_core
from oval_core.page_table import TEXT, PageTable
from oval_mm import attach
from tests.mm.tiny_vlms import NAMES, TinyVlm, batch, generate, photo, tiny, two_turns, words

FULL = OvalConfig(page_size=8, budget_ratio=1.0, always_paged=True, seal_tokens=1)
SPARSE = OvalConfig(page_size=8, budget_pages=4, seal_tokens=1)
EXACT: dict[str, Any] = {"atol": 1e-4, "rtol": 1e-5}
SEPARATOR = 2  # the word "and"
every_model = pytest.mark.parametrize("name", NAMES)


def logits(output: Any) -> Tensor:
    return torch.stack(output.logits)


def tags(vlm: TinyVlm, ids: Tensor) -> list[int]:
    """Tag of every token of a prompt `[T]` in which "and" stands between pictures."""
    is_image = ids == vlm.model.config.image_token_id
    number = (ids == SEPARATOR).cumsum(0)
    return torch.where(is_image, number, TEXT).tolist()


def assert_pages_are_pure(table: PageTable, expected: list[int], starts: set[int]) -> None:
    """Pages of `table` cover tokens of one tag each, full but before a border; `starts` are those of spans."""
    token = table.first
    for start, length, tag in zip(table.starts, table.lengths, table.tags, strict=True):
        assert start == token
        assert set(expected[start : start + length]) == {tag}
        token = start + length
        is_border = token == len(expected) or token in starts or expected[token] != tag
        assert length == table.page_size or is_border
        assert not starts & set(range(start + 1, token))
    assert set(range(table.first, token)) >= {at for at, tag in enumerate(expected) if tag != TEXT}


def span_starts(expected: list[int]) -> set[int]:
    return {at for at, tag in enumerate(expected) if tag != TEXT and (at == 0 or expected[at - 1] != tag)}


@every_model
def test_same_text_and_pictures_in_their_own_pages(name: str) -> None:
    """A left-padded batch whose rows have different numbers of pictures."""
    vlm = tiny(name)
    inputs = batch(vlm)
    plain = generate(vlm, inputs)
    with attach(vlm.model, vlm.processor, FULL) as handle:
        paged = generate(vlm, inputs)
        assert handle.stats()["dense_steps"] == {"empty cache": 1}
        assert handle.stats()["layers"] == {"paged": 2}
    assert paged.sequences.tolist() == plain.sequences.tolist()
    assert_close(logits(paged), logits(plain), **EXACT)
    prompt = inputs["input_ids"].shape[1]
    for layer in paged.cache.layers:
        for row, table in zip(inputs["input_ids"], layer.tables, strict=True):
            expected = tags(vlm, row)
            assert table.first == int((row == 0).sum())
            spans = {span.start for span in table.spans}
            assert spans >= span_starts(expected)
            assert_pages_are_pure(table, [*expected, *[TEXT] * (table.length - prompt)], spans)
        assert layer.pages.tags[0, : layer.tables[0].num_pages].tolist() == layer.tables[0].tags
        assert [sorted({span.tag for span in table.spans}) for table in layer.tables] == [[0, 1], [0]]


@every_model
def test_pictures_matter_and_few_pages_do(name: str) -> None:
    vlm = tiny(name)
    with attach(vlm.model, vlm.processor, SPARSE) as handle:
        outputs = [generate(vlm, batch(vlm, last)) for last in (2, 3)]
        stats = handle.stats()
    assert stats["dense_steps"] == {"empty cache": 1}
    assert stats["pages_read_mean"] <= 4
    assert stats["pages"] > 5
    assert logits(outputs[0]).isfinite().all()
    same, other = (outputs[1].logits[0] - outputs[0].logits[0]).abs().amax(-1)
    assert same < 1e-4
    assert other > 0.05


@every_model
def test_rows_of_a_batch_are_as_alone(name: str) -> None:
    vlm = tiny(name)
    text = (f"{words(12, 1)} *", [photo(2)])
    with attach(vlm.model, config=FULL):
        alone = generate(vlm, vlm.inputs(text))
        together = generate(vlm, batch(vlm))
    assert_close(logits(together)[:, 1], logits(alone)[:, 0], **EXACT)


def test_pages_of_llava() -> None:
    """25 tokens a picture, side by side, the first at token 5: three full pages and a short one each."""
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} ** {words(9)}", [photo(0), photo(1)]))
    with attach(vlm.model, vlm.processor, FULL):
        (first, second) = (layer.tables[0] for layer in generate(vlm, inputs).cache.layers)
    assert first.lengths[:10] == second.lengths[:10] == [5, 8, 8, 8, 1, 8, 8, 8, 1, 8]
    assert first.tags[:10] == second.tags[:10] == [TEXT, 0, 0, 0, 0, 1, 1, 1, 1, TEXT]


def test_overview_and_tiles_share_no_page() -> None:
    vlm = tiny("llava_next")
    inputs = vlm.inputs((f"{words(3)} * {words(9)}", [photo(0, 28, 56)]))
    with attach(vlm.model, vlm.processor, FULL):
        table = generate(vlm, inputs).cache.layers[0].tables[0]
    assert table.lengths[:8] == [3, 8, 8, 8, 8, 8, 8, 4]  # 4 x 4 patches; 4 x 8 with a newline a row
    assert [(span.start, span.stop, span.tag) for span in table.spans] == [(3, 19, 0), (19, 55, 0)]


def continued(vlm: TinyVlm, first: Any, text: str, pictures: list[Any]) -> Any:
    """A later turn over the cache of `first`."""
    turn = vlm.inputs((text, pictures))
    ids = torch.cat([first.sequences, turn.pop("input_ids")], dim=1)
    for name in ("attention_mask", "mm_token_type_ids"):
        turn.pop(name, None)
    return generate(vlm, {**turn, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache=first.cache)


@pytest.mark.parametrize("name", [name for name in NAMES if "qwen" not in name])
def test_a_picture_in_a_later_turn(name: str) -> None:
    """Stock Qwen-VL cannot: `generate` wants the grids of all pictures for positions, of new ones for the encoder."""
    vlm = tiny(name)

    def talk() -> tuple[Any, Any]:
        first = generate(vlm, vlm.inputs((f"{words(5)} * and {words(2)} *", [photo(0), photo(1)])))
        tokens = first.sequences.shape[1]
        return tokens, continued(vlm, first, f"and {words(3, 1)} * {words(9, 2)}", [photo(2)])

    _, plain = talk()
    with attach(vlm.model, vlm.processor, FULL):
        tokens, paged = talk()
    assert_close(logits(paged), logits(plain), **EXACT)
    expected = tags(vlm, paged.sequences[0, :-1])
    for layer in paged.cache.layers:
        table = layer.tables[0]
        assert max(table.tags) == 2
        assert all(span.start >= tokens for span in table.spans if span.tag == 2)
        assert_pages_are_pure(table, expected, {span.start for span in table.spans})


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_later_turn_about_the_same_picture(name: str) -> None:
    vlm = tiny(name)

    def talk() -> Any:
        first = generate(vlm, vlm.inputs((f"{words(5)} * {words(3)}", [photo(0)])))
        return continued(vlm, first, words(9, 2), [])

    plain = talk()
    with attach(vlm.model, vlm.processor, FULL):
        assert_close(logits(talk()), logits(plain), **EXACT)


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl", "idefics3"])
@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["beams", "several answers"],
)
def test_rows_are_repeated_with_their_pictures(name: str, options: dict[str, Any]) -> None:
    vlm = tiny(name)
    outputs = []
    for attached in (False, True):
        handle = attach(vlm.model, vlm.processor, FULL) if attached else None
        torch.manual_seed(0)
        outputs.append(generate(vlm, batch(vlm), **options))
        if handle is not None:
            handle.detach()
    plain, paged = outputs
    assert paged.sequences.tolist() == plain.sequences.tolist()
    assert [max(table.tags) for table in paged.cache.layers[-1].tables] == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("name", "chunk"),
    [("llava", 1), ("llava", 7), ("llava_next", 7), ("llava_next", 30), ("qwen2_vl", 7), ("idefics3", 7)],
)
def test_chunked_prefill(name: str, chunk: int) -> None:
    """Chunks end within pictures; pages are those of a prompt read at once."""
    vlm = tiny(name)
    beside = " and " if "qwen" in name else ""  # stock Qwen-VL needs a token between pictures
    text = f"{words(5)} *{beside}* and {words(9)} * word1"
    inputs = vlm.inputs((text, [photo(0, 28, 56), photo(1, 60, 30), photo(2)]))
    with attach(vlm.model, vlm.processor, FULL):
        whole, cut = generate(vlm, inputs), generate(vlm, inputs, prefill_chunk_size=chunk)
    assert_close(logits(cut), logits(whole), **EXACT)
    for read_at_once, in_chunks in zip(whole.cache.layers, cut.cache.layers, strict=True):
        assert in_chunks.tables == read_at_once.tables


def test_chunked_prefill_of_several_rows() -> None:
    vlm = tiny("llava")
    with attach(vlm.model, vlm.processor, FULL):
        whole, cut = generate(vlm, batch(vlm)), generate(vlm, batch(vlm), prefill_chunk_size=11)
    assert [layer.tables for layer in cut.cache.layers] == [layer.tables for layer in whole.cache.layers]
    vlm = tiny("llava_next")
    with attach(vlm.model, vlm.processor, FULL), pytest.raises(ValueError, match="row by row or without prefill_chunk"):
        generate(vlm, batch(vlm), prefill_chunk_size=11)


@pytest.mark.parametrize("mode", ["assistant", "prompt lookup"])
def test_assisted_decoding(mode: str) -> None:
    vlm = tiny("llava")
    assistant = copy.deepcopy(vlm.model)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.2 * torch.randn_like(assistant.lm_head.weight))  # some drafts are rejected
    options: dict[str, Any] = {"assistant_model": assistant} if mode == "assistant" else {"prompt_lookup_num_tokens": 2}
    inputs = vlm.inputs((f"{words(5)} * word7 word8 word7 word8", [photo(0)]))
    plain = generate(vlm, inputs, max_new_tokens=8)
    with attach(vlm.model, vlm.processor, FULL), attach(assistant, vlm.processor, FULL):
        paged = generate(vlm, inputs, max_new_tokens=8, **options)
    assert paged.sequences.tolist() == plain.sequences.tolist()
    assert [(span.start, span.stop) for span in paged.cache.layers[0].tables[0].spans] == [(5, 30)]


@pytest.mark.parametrize("name", ["llava", "llava_next", "qwen2_vl", "idefics3"])
def test_forward_with_pixels(name: str) -> None:
    """As in a decoding loop of one's own."""
    vlm = tiny(name)
    inputs = batch(vlm)
    with torch.no_grad():
        plain = vlm.model(**inputs).logits
        with attach(vlm.model, vlm.processor, FULL):
            output = vlm.model(**inputs)
    assert_close(output.logits, plain, **EXACT)
    assert [{span.tag for span in table.spans} for table in output.cache.layers[0].tables] == [{0, 1}, {0}]


def test_features_from_outside() -> None:
    """Encoded before the model was attached: how many tokens a picture has is known, its grid is not."""
    vlm = tiny("llava_next")
    inputs = batch(vlm)
    with torch.no_grad():
        image = vlm.model.get_image_features(inputs.pop("pixel_values"), inputs.pop("image_sizes"))
        with attach(vlm.model, vlm.processor, FULL):
            cache = vlm.model(**inputs, mm_encoder_outputs={"image": image}).cache
            expected = vlm.model(**batch(vlm)).cache
            vlm.model.get_image_features(**{name: batch(vlm)[name] for name in ("pixel_values", "image_sizes")})
            for rows in (1, 2):  # features that nobody reads do no harm
                generate(vlm, vlm.inputs(*[(words(9), [])] * rows))
    assert [table.spans for table in cache.layers[0].tables] == [table.spans for table in expected.layers[0].tables]


def test_a_later_turn_of_a_padded_batch() -> None:
    vlm = tiny("llava")

    plain = two_turns(vlm)
    with attach(vlm.model, vlm.processor, FULL):
        paged = two_turns(vlm)
    assert_close(logits(paged), logits(plain), **EXACT)
    assert [[span.tag for span in table.spans] for table in paged.cache.layers[0].tables] == [[0, 1, 2], [0]]


def test_a_copy_of_an_attached_model() -> None:
    vlm = tiny("llava_next")
    with attach(vlm.model, vlm.processor, FULL):
        copied = TinyVlm(vlm.name, copy.deepcopy(vlm.model), vlm.processor, vlm.image)
        expected = generate(vlm, batch(vlm))
    paged = generate(copied, batch(vlm))
    assert [layer.tables for layer in paged.cache.layers] == [layer.tables for layer in expected.cache.layers]


def test_training_and_no_cache() -> None:
    vlm = tiny("llava")
    inputs = batch(vlm)
    with attach(vlm.model, vlm.processor, FULL) as handle:
        generate(vlm, inputs, use_cache=False)
        assert handle.stats()["dense_steps"] == {"no cache": 5}
        vlm.model.train()
        try:
            assert vlm.model(**inputs, labels=inputs["input_ids"]).loss.isfinite()
        finally:
            vlm.model.eval()


def test_text_alone_has_no_spans() -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((words(20), []))
    plain = generate(vlm, inputs)
    with attach(vlm.model, vlm.processor, FULL):
        paged = generate(vlm, inputs)
        embedded = vlm.model.generate(
            inputs_embeds=vlm.model.get_input_embeddings()(inputs["input_ids"]), max_new_tokens=5, do_sample=False
        )
    assert_close(logits(paged), logits(plain), **EXACT)
    assert embedded.tolist() == plain.sequences[:, 20:].tolist()
    assert paged.cache.layers[0].tables[0].spans == []


def test_pictures_need_input_ids() -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(3)} *", [photo(0)]))
    embeds = vlm.model.get_input_embeddings()(inputs.pop("input_ids"))
    with attach(vlm.model, vlm.processor, FULL), pytest.raises(ValueError, match="give input_ids instead"):
        generate(vlm, {**inputs, "inputs_embeds": embeds})


def drop_a_token(ids: Tensor) -> Tensor:
    return ids[:, [*range(6), *range(7, ids.shape[1])]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_a_token, "expected 25 image tokens for picture 1 of row 0, got 24 image tokens at token 30"),
        (lambda ids: torch.cat([ids, ids[:, 5:30]], dim=1), "expected no more than 2 pictures in row 0, got 25"),
        (lambda ids: ids[:, :30], "expected image tokens for 2 pictures, got some for 1"),
    ],
    ids=["a token too few", "a picture too few", "a picture too many"],
)
def test_a_mismatch_changes_nothing(change: Callable[[Tensor], Tensor], message: str) -> None:
    vlm = tiny("llava")
    inputs = vlm.inputs((f"{words(5)} **", [photo(0), photo(1)]))
    ids = change(inputs["input_ids"])
    cache = transformers.DynamicCache(config=vlm.model.config.get_text_config())
    with attach(vlm.model, vlm.processor, FULL), pytest.raises(ValueError, match=message) as caught:
        generate(vlm, {**inputs, "input_ids": ids, "attention_mask": torch.ones_like(ids)}, cache=cache)
    assert "`patch_size`" in str(caught.value)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicLayer"] * 2
    assert cache.get_seq_length() == 0


def state(model: Any) -> tuple[Any, ...]:
    """What attaching changes."""
    hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return hooks, attributes, model.config._attn_implementation, model.config.get_text_config()._attn_implementation


def test_detach_restores() -> None:
    vlm = tiny("llava")
    inputs = batch(vlm)
    plain = generate(vlm, inputs)
    before = state(vlm.model)
    with attach_core(vlm.model, FULL) as core:
        config, impl = core.config, core.impl
    handle = attach(vlm.model, vlm.processor, FULL)
    assert handle.model is vlm.model
    assert (handle.config, handle.impl) == (config, impl)
    assert state(vlm.model) != before
    with handle.trace() as entries:
        generate(vlm, inputs)
    assert entries
    handle.detach()
    handle.detach()
    assert state(vlm.model) == before
    assert logits(generate(vlm, inputs)).equal(logits(plain))


def test_a_failed_attach_leaves_the_model_alone() -> None:
    vlm = tiny("llava")
    before = state(vlm.model)
    with pytest.raises(ValueError, match="rank must be at most the head dimension"):
        attach(vlm.model, vlm.processor, OvalConfig(rank=64))
    assert state(vlm.model) == before
    with attach(vlm.model):
        attached = state(vlm.model)
        with pytest.raises(RuntimeError, match="already attached"):
            attach(vlm.model)
        assert state(vlm.model) == attached
    vlm.model.base_model.get_image_features = vlm.model.base_model.get_image_features
    with pytest.raises(RuntimeError, match="has been replaced"):
        attach(vlm.model)
    del vlm.model.base_model.get_image_features
    assert state(vlm.model) == before


def test_other_models_are_refused() -> None:
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8, **size))
    for model in (text, torch.nn.Linear(1, 1), None):
        with pytest.raises(TypeError, match=r"must be one of llava, llava_next, .*, smolvlm; got"):
            attach(model)  # type: ignore[arg-type]
