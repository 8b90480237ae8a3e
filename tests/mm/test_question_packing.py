import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from oval_mm.recipes.llava_batches import (
    Asked,
    Pack,
    conversation_pack,
    make_batch,
    make_symbols_batch,
    pictures_of,
)
from oval_mm.recipes.patches import image_tokens, show_some, symbols_of
from oval_mm.recipes.question_packing import (
    IGNORED,
    make_block,
    make_prefix,
    pack,
    packed_outputs,
)
from oval_mm.recipes.scenes import make_scene
from oval_mm.recipes.tiny_llava import make_tokenizer
from tests.mm.test_tiny_llava import tiny_llava

TOLERANCE = 1e-5


def _packs() -> list[Pack]:
    """Two images each; conversations of one and of two turns, more of them in the second."""
    return [conversation_pack(seed, 2, 64, most=most) for seed, most in ((1, 3), (2, 5))]


def _prompt(model: Any, processor: Any, one: Pack, talk: tuple[Asked, ...]) -> Tensor:
    """The logits `[T, words]` of a prompt of its own, after the images."""
    messages: list[dict[str, Any]] = []
    for turn in talk:
        images = [] if messages else [{"type": "image"} for _ in one.pictures]
        messages.append({"role": "user", "content": [*images, {"type": "text", "text": turn.question}]})
        messages.append({"role": "assistant", "content": turn.answer})
    prompt = processor.apply_chat_template(messages)
    inputs = processor(images=one.images(), text=prompt, return_tensors="pt")
    logits: Tensor = model(**inputs).logits[0, 2 + 2 * image_tokens(processor) :]
    return logits


@torch.no_grad()
@pytest.mark.parametrize("strategy", ["default", "full"])
def test_a_packed_block_has_the_logits_of_a_prompt_of_its_own(strategy: str) -> None:
    model, processor = tiny_llava(strategy)
    packs = _packs()
    batch = make_batch(packs, processor)
    packed = packed_outputs(model, *batch)
    for row, one in enumerate(packs):
        for number, talk in enumerate(one.dialogues):
            alone = _prompt(model, processor, one, talk)
            assert alone.std() > 0.1
            together = packed.logits[row, batch.packed.block[row] == number]
            torch.testing.assert_close(together, alone, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_4d_mask_reaches_the_attention_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = tiny_llava()
    batch = make_batch(_packs(), processor)
    masks: list[Tensor | None] = []
    attention: Any = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors: Any, attn_mask: Tensor | None = None, **rest: Any) -> Any:
        masks.append(attn_mask)
        return attention(*tensors, attn_mask=attn_mask, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    packed_outputs(model, *batch)
    assert len(masks) == 2 + 2 + 2  # layers of the tower, and of the language model for prefix and blocks
    assert all(mask is None for mask in masks[:4])
    assert all(mask is batch.packed.visible for mask in masks[4:])


@torch.no_grad()
def test_prefix_and_blocks_may_also_be_one_sequence() -> None:
    model, processor = tiny_llava()
    batch = make_batch(_packs()[:1], processor)
    packed = batch.packed
    length = packed.prefix.shape[1]
    above = torch.ones(length, length, dtype=torch.bool).tril()
    above = torch.nn.functional.pad(above, (0, packed.tokens.shape[1]))[None, None]
    whole = model(
        input_ids=torch.cat([packed.prefix, packed.tokens], dim=1),
        pixel_values=batch.pixels,
        attention_mask=torch.cat([above, packed.visible], dim=2),
        position_ids=torch.cat([packed.prefix_positions, packed.positions], dim=1),
    )
    expected = packed_outputs(model, *batch).logits
    torch.testing.assert_close(whole.logits[:, length:], expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_tokens_left_out_are_tokens_not_seen() -> None:
    model, processor = tiny_llava()
    packs = _packs()
    shown = show_some(pictures_of(packs), processor, 1.0, 0.2, random.Random(0))
    few, all_of_them = make_batch(packs, processor, shown), make_batch(packs, processor)
    assert few.packed.prefix.shape[1] < all_of_them.packed.prefix.shape[1]
    seen = torch.cat([torch.ones(2, 2, dtype=torch.bool), shown.view(2, -1)], dim=1)
    length = seen.shape[1]
    own = seen[:, None, None] & torch.ones(length, length, dtype=torch.bool).tril()
    own |= torch.eye(length, dtype=torch.bool)  # what nobody sees must see something itself
    packed = all_of_them.packed
    visible = packed.visible.clone()
    visible[..., :length] &= seen[:, None, None]
    read = model(input_ids=packed.prefix, pixel_values=all_of_them.pixels, attention_mask=own, use_cache=True)
    expected = model(
        input_ids=packed.tokens, position_ids=packed.positions, attention_mask=visible, cache=read.cache
    ).logits
    is_real = packed.block >= 0
    logits = packed_outputs(model, *few).logits
    torch.testing.assert_close(logits[is_real], expected[is_real], atol=TOLERANCE, rtol=TOLERANCE)


def test_objects_are_shown() -> None:
    _, processor = tiny_llava("full")
    scene = make_scene(3, 64)
    packs = [Pack((scene,), ())]
    for share in (0.0, 0.5, 1.0):
        shown = show_some(pictures_of(packs), processor, share, 0.0, random.Random(0))
        patches = shown[0, 1:].view(4, 4)
        assert shown[0, 0]
        for thing in scene.objects:
            x0, y0, x1, y1 = thing.box
            inside = patches[y0 // 16 : -(-y1 // 16), x0 // 16 : -(-x1 // 16)]
            assert inside.any()
            assert share < 1 or inside.all()
    assert show_some(pictures_of(packs), processor, 1.0, 1.0, random.Random(0)).all()


def test_symbols_say_what_is_on_a_patch() -> None:
    _, processor = tiny_llava("full")
    scene = make_scene(3, 64)
    symbols = symbols_of([scene], processor)
    assert symbols.shape == (1, 17, 5)
    words = [processor.tokenizer.decode(ids[ids >= 0]) for ids in symbols[0]]
    assert words[0] == "nothing"
    for y in range(4):
        for x in range(4):
            here = [t for t in scene.objects if t.box[0] <= 16 * x + 8 < t.box[2] and t.box[1] <= 16 * y + 8 < t.box[3]]
            said = words[1 + 4 * y + x].split()
            if here:
                glyph = [here[0].glyph.lower()] if here[0].glyph else []
                assert said == [here[0].colour, here[0].shape, *glyph, *here[0].place.split()]
            else:
                assert said == [
                    "nothing",
                    ("top", "middle", "bottom", "bottom")[y],
                    ("left", "center", "right", "right")[x],
                ]
    with pytest.raises(ValueError, match=r"symbols can only stand for scenes, got image\.png"):
        symbols_of([Path("image.png")], processor)


@torch.no_grad()
def test_symbols_are_read_in_place_of_images() -> None:
    model, processor = tiny_llava()
    packs = _packs()
    shown = show_some(pictures_of(packs), processor, 0.0, 0.2, random.Random(0))
    batch = make_symbols_batch(packs, processor, shown)
    assert batch.pixels is None
    assert batch.symbols is not None
    words: Any = model.get_input_embeddings().weight
    said = [words[ids[ids >= 0]].sum(0) for ids in batch.symbols[shown]]
    tokens = model.get_input_embeddings()(batch.packed.prefix)
    tokens[batch.packed.prefix == processor.tokenizer.convert_tokens_to_ids("<image>")] = torch.stack(said)
    read = model.model.language_model(
        inputs_embeds=tokens, position_ids=batch.packed.prefix_positions, use_cache=True
    ).past_key_values
    expected = model(
        input_ids=batch.packed.tokens,
        attention_mask=batch.packed.visible,
        position_ids=batch.packed.positions,
        cache=read,
    ).logits
    is_real = batch.packed.block >= 0
    logits = packed_outputs(model, *batch).logits
    torch.testing.assert_close(logits[is_real], expected[is_real], atol=TOLERANCE, rtol=TOLERANCE)


def test_only_answers_have_labels() -> None:
    tokenizer = make_tokenizer()
    block = make_block(tokenizer, [("is there a star?", "no"), ("what is the red shape?", "cross")])
    words = tokenizer.convert_ids_to_tokens(list(block.tokens))
    assert " ".join(words) == (
        "is there a star ? ASSISTANT: no </s> USER: what is the red shape ? ASSISTANT: cross </s>"
    )
    labelled = [word for word, label in zip(words, block.labels, strict=True) if label != IGNORED]
    assert labelled == ["no", "</s>", "cross", "</s>"]
    assert all(label in (IGNORED, token) for token, label in zip(block.tokens, block.labels, strict=True))


def test_the_loss_is_the_mean_over_answer_tokens() -> None:
    model, processor = tiny_llava()
    batch = make_batch(_packs(), processor)
    outputs = packed_outputs(model, *batch)
    labels = batch.packed.labels[:, 1:]
    chances = outputs.logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    expected = -chances[labels != IGNORED].mean()
    torch.testing.assert_close(outputs.loss, expected)
    halved = packed_outputs(model, *batch, num_items_in_batch=2 * batch.packed.answer_tokens).loss
    torch.testing.assert_close(halved, expected / 2)


def test_prefixes_of_different_lengths_and_gradients() -> None:
    model, processor = tiny_llava()
    tokenizer = processor.tokenizer
    prefixes = [make_prefix(tokenizer, words) for words in ("a red star", "a red star and a blue cross")]
    blocks = [[make_block(tokenizer, [("is there a star?", "yes")])]] * 2
    both = packed_outputs(model, pack(prefixes, blocks, tokenizer.pad_token_id))
    alone = packed_outputs(model, pack(prefixes[:1], blocks[:1], tokenizer.pad_token_id))
    torch.testing.assert_close(both.logits[:1], alone.logits, atol=TOLERANCE, rtol=TOLERANCE)
    both.loss.backward()
    gradient = model.get_input_embeddings().weight.grad
    assert isinstance(gradient, Tensor)
    assert gradient[tokenizer.get_vocab()["cross"]].abs().sum() > 0  # reaches what is only in the prefix


def test_bad_input_is_named() -> None:
    tokenizer = make_tokenizer()
    with pytest.raises(ValueError, match=r"turns must be at least one \(question, answer\), got none"):
        make_block(tokenizer, [])
    prefix = make_prefix(tokenizer, "a red star")
    with pytest.raises(ValueError, match=r"each of 2 prefixes must have at least 1 block, got blocks \[0\]"):
        pack([prefix, prefix], [[]], 0)
