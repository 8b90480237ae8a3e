"""Reading a text with kvpress: one prefill, the caches that every press leaves of it, and decoding over those.

A press looks at a layer only after the layer has attended to everything, so presses and shares cannot influence each
other: one forward pass serves all of them. Each runs its own, unchanged `compress`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from kvpress import BasePress, ExpectedAttentionPress, ScorerPress, SnapKVPress, StreamingLLMPress
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

PRESSES: dict[str, type[ScorerPress]] = {
    "snapkv": SnapKVPress,
    "expected_attention": ExpectedAttentionPress,
    "streaming_llm": StreamingLLMPress,
}
DENSE = ("dense", 1.0)
WARM_UP_TOKENS = 1  # as for OVAL, whose first step is dense: read token by token, but not compared
Setting = tuple[str, float]  # name of a press, share of the entries that it keeps
Layers = list[tuple[Tensor, Tensor]]  # keys and values of every layer, [1, kv_heads, entries, head_dim]


class KeepEverything(BasePress):
    """Lets every press compress every layer, keeps what each would leave, and leaves the cache as it was.

    Args:
        settings: the presses and shares.
    """

    def __init__(self, settings: list[Setting]) -> None:
        self.presses = {(name, kept): PRESSES[name](compression_ratio=1 - kept) for name, kept in settings}
        self.left: dict[Setting, Layers] = {setting: [] for setting in settings}

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        """Pass the model on to every press."""
        for press in self.presses.values():
            press.post_init_from_model(model)

    def compress(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Called by kvpress after each layer of the prefill, in order."""
        for setting, press in self.presses.items():
            left = press.compress(module, hidden_states, keys, values, attentions, kwargs)
            self.left[setting].append(left)
        return keys, values


@dataclass(frozen=True)
class Pressed:
    """A prefilled text.

    Attributes:
        tokens: int64 `[1, context]`; all but the last `positions` (and the warm-up) are prefilled.
        logits: the dense model's for the last positions, float32 `[positions, vocabulary]`.
        left: what each press left of the prefilled entries.
    """

    tokens: Tensor
    logits: Tensor
    left: dict[Setting, Layers]

    @property
    def prefilled(self) -> int:
        """Tokens that were read before anything was evicted."""
        return self.tokens.shape[1] - self.logits.shape[0] - WARM_UP_TOKENS

    def entries(self, setting: Setting) -> int:
        """Entries of a KV head that are left after the prefill."""
        return self.left[setting][0][0].shape[2]

    def bytes_ratio(self, setting: Setting) -> float:
        """Entries read by an average step over those of a dense one; eviction reads no metadata."""
        left, steps = self.entries(setting), range(1, self.tokens.shape[1] - self.prefilled + 1)
        return sum((left + step) / (self.prefilled + step) for step in steps) / len(steps)


@torch.inference_mode()
def prefill(
    model: PreTrainedModel, tokens: Tensor, positions: int, settings: list[Setting], advance: Callable[[int], object]
) -> Pressed:
    """Read a text densely and let every press compress it. `advance` is told how many tokens were read."""
    split = tokens.shape[1] - positions - WARM_UP_TOKENS
    press, cache = KeepEverything(settings), DynamicCache()
    with press(model):
        model(tokens[:, :split], past_key_values=cache, logits_to_keep=1)  # in one piece: presses see one chunk only
    advance(split)
    logits = model(tokens[:, split:], past_key_values=cache).logits[0, WARM_UP_TOKENS:]
    advance(tokens.shape[1] - split)
    return Pressed(tokens, logits.float(), press.left)


@torch.inference_mode()
def reread(model: PreTrainedModel, text: Pressed, setting: Setting, advance: Callable[[int], object]) -> Tensor:
    """Read the last positions token by token over what `setting` left; float32 `[positions, vocabulary]`.

    The cache is shorter than the text, so every token is told its true position.
    """
    cache: DynamicCache = DynamicCache()
    for index, (keys, values) in enumerate(text.left[setting]):
        cache.update(keys, values, index)
    rows = []
    for position in range(text.prefilled, text.tokens.shape[1]):
        token, where = text.tokens[:, position : position + 1], torch.tensor([[position]])
        rows.append(model(token, past_key_values=cache, position_ids=where).logits[0, -1].float())
        advance(1)
    return torch.stack(rows[WARM_UP_TOKENS:])
