"""Draft with another, smaller model."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oval_core import OvalConfig, attach
from oval_core.attach import binding_of
from oval_core.checks import check_count, check_share
from oval_core.stats import TraceEntry
from oval_spec.cached_model import DENSE, CachedModel
from oval_spec.drafters.base import Drafter, Seen, check_vocabulary
from oval_spec.drafters.step_by_step import draft_chains, read_chains
from oval_spec.page_sets import Ask
from oval_spec.selections import tokens_read, traced
from oval_spec.text import Text
from oval_spec.tree import Tree


class ModelDrafter(Drafter):
    """A smaller causal model with the target's tokenizer; of a vision-language target, one that reads the same images.

    Args:
        model: may be the target itself.
        most_tokens: of a draft.
        min_confidence: a draft ends before a token that the model gives a smaller probability.
        config: how the draft model's cache is paged and read; None: densely.

    Raises:
        TypeError, ValueError: an argument is out of range.
    """

    name = "draft model"
    model: PreTrainedModel

    def __init__(
        self,
        model: PreTrainedModel,
        most_tokens: int = 8,
        min_confidence: float = 0.4,
        config: OvalConfig | None = None,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be a transformers PreTrainedModel, got {type(model).__name__}")
        if config is not None and not isinstance(config, OvalConfig):
            raise TypeError(f"config must be an OvalConfig or None, got {type(config).__name__}")
        self.model, self.config = model, config
        self.most_tokens = check_count("most_tokens", most_tokens)
        self.min_confidence = check_share("min_confidence", min_confidence)
        self._reader: CachedModel | None = None
        self._selections: list[TraceEntry] = []
        self._target_layers = 1
        self._read: list[list[int]] = []  # of each row, the tokens in the draft model's cache

    def check(self, target: PreTrainedModel) -> None:
        """See `Drafter.check`."""
        check_vocabulary(self.model, target)
        if self.model.config.is_encoder_decoder:
            raise ValueError(f"the draft model must be a decoder, got {type(self.model).__name__}")

    @contextmanager
    def begin(self, target: CachedModel, model_inputs: dict[str, Any], texts: Sequence[Text]) -> Iterator[None]:
        """See `Drafter.begin`: the draft model reads the prompt, images included."""
        config = (self.config or DENSE).for_device(self.model.device)
        attached: AbstractContextManager[Any] = nullcontext()
        if binding_of(self.model) is None:
            attached = attach(self.model, config)
        with attached:
            self._reader, self._target_layers = CachedModel(self.model, config), len(target.layers)
            self._reader.prefill(self._prompt(model_inputs, texts))
            self._read = [text.tokens.copy() for text in texts]
            try:
                yield
            finally:
                self._reader, self._read = None, []

    def _prompt(self, model_inputs: dict[str, Any], texts: Sequence[Text]) -> dict[str, Any]:
        """What the target was given, as far as the draft model knows it; the whole text if that was its end only."""
        known = inspect.signature(self.model.forward).parameters
        inputs = {name: value for name, value in model_inputs.items() if name in known and value is not None}
        if not len(texts[0]):
            raise ValueError("a draft model reads token ids: give input_ids beside inputs_embeds")
        if "input_ids" not in inputs or inputs["input_ids"].shape[1] < len(texts[0]):
            return {
                "input_ids": torch.cat([text.ids for text in texts]),
                "attention_mask": inputs.get("attention_mask"),
            }
        return inputs

    def draft(self, seen: Seen, most: int) -> list[Tree]:
        """See `Drafter.draft`."""
        assert self._reader is not None
        new = self._forget_what_was_refused(seen)
        with traced(self.model, seen.wants_pages) as self._selections:
            logits = read_chains(self._reader, new)
            trees = draft_chains(self._reader, logits, seen.running, most, self.min_confidence)
        for tokens, fresh, tree in zip(self._read, new, trees, strict=True):
            tokens += [*fresh, *tree.tokens[:-1]]
        return trees

    def expects(self, layer_idx: int, ask: Ask) -> Tensor | None:
        """See `Drafter.expects`: what any head of the draft model's layer at that depth has read."""
        assert self._reader is not None
        layers = self._reader.layers
        read = tokens_read(self._selections, layers[layer_idx * len(layers) // self._target_layers])
        return None if read is None else read.any(1, keepdim=True)

    def _forget_what_was_refused(self, seen: Seen) -> list[list[int]]:
        """Crop the cache to what the texts begin with, their roots left out; what each row has still to read."""
        assert self._reader is not None
        lengths = []
        for text, read in zip(seen.texts, self._read, strict=True):
            pairs = zip(read, text.tokens[:-1])  # noqa: B905
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(read), len(text) - 1))
            del read[same:]
            lengths.append(same)
        self._reader.crop(lengths)
        return [
            text.tokens[same:] if goes_on else []
            for text, same, goes_on in zip(seen.texts, lengths, seen.running, strict=True)
        ]
