"""Many questions about the same images in one sequence: the images are read once, every question sees them and itself.

    prefix            <s> USER: <image> <image> ...
    block 0           which digit is in the star? ASSISTANT: 7 </s>
    block 1           is there a heart? ASSISTANT: no </s> USER: what is the red shape? ASSISTANT: cross </s>

A block is what follows the images in a prompt of its own: it attends to the prefix and to itself only, and its
positions go on where the prefix ends, whatever other blocks stand before it. The prefix runs first and leaves its keys
and values in a cache; all blocks then run together under a 4D mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutputWithPooling

from oval_mm.recipes.tiny_llava import ASSISTANT, END, IMAGE, USER

IGNORED = -100  # label of a token that need not be predicted


@dataclass(frozen=True)
class Block:
    """Tokens of questions and answers, and their labels: an answer's own tokens, IGNORED for everything else."""

    tokens: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Prefix:
    """Tokens and their positions; some of those before `end` may be left out."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    end: int


@dataclass(frozen=True)
class Packed:
    """B prefixes of up to P tokens with up to Q tokens of blocks each, padded on the right.

    Args:
        prefix, prefix_positions: int64 `[B, P]`.
        tokens, positions, labels: int64 `[B, Q]`.
        block: int64 `[B, Q]`, the number of the block in its row; -1 for padding.
        visible: bool `[B, 1, Q, P + Q]`, what each token of the blocks attends to.
    """

    prefix: Tensor
    prefix_positions: Tensor
    tokens: Tensor
    positions: Tensor
    labels: Tensor
    block: Tensor
    visible: Tensor

    def to(self, device: torch.device | str) -> Packed:
        """The same on another device."""
        return Packed(*(getattr(self, field.name).to(device) for field in fields(self)))

    @property
    def answer_tokens(self) -> int:
        """How many tokens have a label."""
        return int((self.labels != IGNORED).sum())


def make_prefix(tokenizer: PreTrainedTokenizerFast, words: str, shown: Sequence[bool] | None = None) -> Prefix:
    """What stands before the questions.

    Args:
        tokenizer: see `tiny_llava.make_tokenizer`.
        words: `<image>`s, one a token of the images, or text in their place.
        shown: for every `<image>`, whether it stays; None: all do. What is left keeps its position.
    """
    ids: list[int] = tokenizer(f"{USER} {words}").input_ids
    keep = iter([True] * len(ids) if shown is None else shown)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    left = [(token, position) for position, token in enumerate(ids) if token != image or next(keep)]
    tokens, positions = zip(*left, strict=True)
    return Prefix(tokens, positions, len(ids))


def make_block(tokenizer: PreTrainedTokenizerFast, turns: Sequence[tuple[str, str]]) -> Block:
    """Questions and answers of one conversation, in turn. Raises ValueError where there are none."""
    if not turns:
        raise ValueError("turns must be at least one (question, answer), got none")
    ids: Any = tokenizer.convert_tokens_to_ids([USER, ASSISTANT, END])
    user, assistant, end = ids
    tokens, labels = list[int](), list[int]()
    for number, (question, answer) in enumerate(turns):
        asked = [user] * (number > 0) + tokenizer(question, add_special_tokens=False).input_ids + [assistant]
        answered = [*tokenizer(answer, add_special_tokens=False).input_ids, end]
        tokens += asked + answered
        labels += [IGNORED] * len(asked) + answered
    return Block(tuple(tokens), tuple(labels))


def pack(prefixes: Sequence[Prefix], blocks: Sequence[Sequence[Block]], pad_id: int) -> Packed:
    """One row for every prefix, with the blocks that belong to it.

    Raises:
        ValueError: not as many lists of blocks as prefixes, or a prefix without any.
    """
    if len(prefixes) != len(blocks) or not all(blocks):
        counts = [len(row) for row in blocks]
        raise ValueError(f"each of {len(prefixes)} prefixes must have at least 1 block, got blocks {counts}")
    prefix = padded([one.tokens for one in prefixes], pad_id)
    number = padded([[index for index, block in enumerate(row) for _ in block.tokens] for row in blocks], -1)
    positions = [
        [one.end + index for block in row for index in range(len(block.tokens))]
        for one, row in zip(prefixes, blocks, strict=True)
    ]
    return Packed(
        prefix=prefix,
        prefix_positions=padded([one.positions for one in prefixes], 0),
        tokens=padded([[token for block in row for token in block.tokens] for row in blocks], pad_id),
        positions=padded(positions, 0),
        labels=padded([[label for block in row for label in block.labels] for row in blocks], IGNORED),
        block=number,
        visible=_visible([len(one.tokens) for one in prefixes], number),
    )


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """int64 `[rows, longest]`, filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows])


def _visible(prefix_tokens: Sequence[int], block: Tensor) -> Tensor:
    """bool `[B, 1, Q, P + Q]`: the row's own prefix, and what came before in the same block (padding sees padding)."""
    own = (block[:, :, None] == block[:, None, :]).tril()
    before = torch.arange(max(prefix_tokens)) < torch.tensor(prefix_tokens)[:, None]
    return torch.cat([before[:, None].expand(-1, block.shape[1], -1), own], dim=-1)[:, None]


def packed_outputs(
    model: Any,
    packed: Packed,
    pixel_values: Tensor | None = None,
    symbols: Tensor | None = None,
    shown: Tensor | None = None,
    **how: Any,
) -> Any:
    """What a `LlavaForConditionalGeneration` makes of the blocks: `.logits [B, Q, words]`, `.loss` of the answers.

    Args:
        model: on the device of everything else.
        packed: see `pack`; the right padding of a prefix is behind all that it could disturb, so it needs no mask.
        pixel_values: float `[images, 3, height, width]`, None where the prefixes have no images or symbols for them.
        symbols: int64 `[images, image tokens, words]`, in place of pixels: see `symbol_features`.
        shown: bool `[images, image tokens]`, the features that have a token in the prefixes; None: all.
        how: more arguments for the model, for example `num_items_in_batch`: what to divide the sum of losses by.
    """
    seen = {}
    features = None if symbols is None else symbol_features(model, symbols)
    if pixel_values is not None:
        features = model.get_image_features(pixel_values).pooler_output
    if features is not None:
        chosen: Any = [*features] if shown is None else [one[kept] for one, kept in zip(features, shown, strict=True)]
        seen = {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=chosen)}}
    read = model(
        input_ids=packed.prefix, position_ids=packed.prefix_positions, use_cache=True, logits_to_keep=1, **seen
    )
    return model(
        input_ids=packed.tokens,
        attention_mask=packed.visible,
        position_ids=packed.positions,
        labels=packed.labels,
        cache=read.cache,
        use_cache=True,
        **how,
    )


def symbol_features(model: Any, symbols: Tensor) -> Tensor:
    """float `[images, image tokens, hidden]`: the sum of the embeddings of the words `[..., words]` of a token.

    Words of -1 are none.
    """
    embeddings = model.get_input_embeddings()(symbols.clamp_min(0))
    features: Tensor = (embeddings * (symbols >= 0)[..., None]).sum(-2)
    return features
