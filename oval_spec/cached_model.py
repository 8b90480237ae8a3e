"""A model over a paged cache whose rows may have different lengths: it reads trees, and keeps what was accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from oval_core import OvalCache, OvalConfig
from oval_core.cache import page_layers
from oval_core.layer import OvalLayer
from oval_core.routers import Router
from oval_spec.tree import Tree

NEVER_TOKENS = 2**62  # shorter contexts are read densely
PAGING = ("page_size", "page_policy", "seal_tokens", "rank", "router")  # what cannot change once there are pages
DENSE = OvalConfig(router="box", impl="reference", min_context_tokens=NEVER_TOKENS)  # with the cheapest metadata


class CachedModel:
    """One generation of one attached model.

    Args:
        model: attached to OVAL.
        config: how its cache is paged and read; a cache that is paged already stays so.
        cache: to go on from; None: an empty one.

    Raises:
        ValueError: the model's layers, or those of the cache, cannot all be paged and cropped.

    Attributes:
        hidden: what the newest pass gave to the language model's head, `[B, Q, hidden]`; None unless `watch_hidden`.
    """

    def __init__(self, model: PreTrainedModel, config: OvalConfig, cache: Any = None) -> None:
        self.model = model
        self.cache = _paged_cache(model, config, cache)
        self.config = replace(config, **{name: getattr(self.layers[0].config, name) for name in PAGING})
        for layer in self.layers:
            layer.config = self.config
        self.hidden: Tensor | None = None
        self._next_position = torch.zeros(0)  # int64 [..., B], of each row's next token
        self._visible: Tensor | None = None  # bool [B, n], which of the first n tokens may be read; None: all

    @property
    def layers(self) -> list[OvalLayer]:
        """The layers of the cache."""
        return [layer for layer in self.cache.layers if isinstance(layer, OvalLayer)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row in the cache, padding included."""
        return self.layers[0].store.lengths

    @contextmanager
    def watch_hidden(self) -> Iterator[None]:
        """Keep what the head is given, in `hidden`. Raises ValueError if the model has no head."""

        def note(hidden: Tensor) -> None:
            self.hidden = hidden

        with watch_head(self.model, note):
            yield

    @contextmanager
    def reading(self, config: OvalConfig, router: Router | None = None) -> Iterator[None]:
        """Read the cache as `config` says, inside the `with` block, with another router; how it is paged stays."""
        before = [(layer.config, layer.router) for layer in self.layers]
        for layer in self.layers:
            layer.config, layer.router = config, router or layer.router
        try:
            yield
        finally:
            for layer, (old_config, old_router) in zip(self.layers, before, strict=True):
                layer.config, layer.router = old_config, old_router

    def prefill(self, model_inputs: dict[str, Any]) -> Tensor:
        """Read the prompt, given as `prepare_inputs_for_generation` makes it; logits of the next token `[B, V]`."""
        out = self.model(**{**model_inputs, "cache": self.cache, "use_cache": True}, return_dict=True)
        mask = model_inputs.get("attention_mask")  # a layer that cannot be paged never learns what it hides
        self._visible = None if mask is None else mask.bool()
        positions = model_inputs.get("position_ids")
        if positions is None:
            rows = out.logits.shape[0]
            positions = torch.full((rows, 1), self.cache.get_seq_length() - 1, device=out.logits.device)
        self._next_position = positions[..., -1] + 1
        if self.hidden is not None:
            self.hidden = self.hidden[:, -1:]  # models that know no `logits_to_keep` give the head every token
        logits: Tensor = out.logits[:, -1]
        return logits

    def read(self, roots: Sequence[int], trees: Sequence[Tree]) -> Tensor:
        """Append a token and the tree below it to every row.

        Args:
            roots: the token of each row that the cache does not hold yet.
            trees: what follows it; the rows need not have as many nodes.

        Returns: logits `[B, 1 + nodes, V]` of what follows the root (index 0) and node i (index 1 + i); those beyond
            the nodes of a row mean nothing.
        """
        device = self._next_position.device
        nodes = max(map(len, trees))
        padded = [[root, *tree.tokens, *[0] * (nodes - len(tree))] for root, tree in zip(roots, trees, strict=True)]
        depths = [[0, *tree.depths, *[0] * (nodes - len(tree))] for tree in trees]
        positions = self._next_position[..., None] + torch.tensor(depths, device=device)
        out = self.model(
            input_ids=torch.tensor(padded, device=device),
            position_ids=positions,
            attention_mask=self._mask(trees, nodes),
            cache=self.cache,
            use_cache=True,
            return_dict=True,
        )
        logits: Tensor = out.logits
        return logits

    def positions_ahead(self, count: int) -> Tensor:
        """Of the next `count` tokens of each row, int64 `[B, count]` (or as the model has them)."""
        return self._next_position[..., None] + torch.arange(count, device=self._next_position.device)

    def keep(self, nodes: int, paths: Sequence[Sequence[int] | None]) -> None:
        """Of each row's newest `1 + nodes` tokens keep the root and the nodes of a path; None: not even the root."""
        start = [length - 1 - nodes for length in self.lengths]
        kept = [
            [] if path is None else [first, *(first + 1 + node for node in path)]
            for first, path in zip(start, paths, strict=True)
        ]
        if all(row == [*range(first, first + len(row))] for row, first in zip(kept, start, strict=True)):
            lengths = [first + len(row) for row, first in zip(kept, start, strict=True)]
            for layer in self.layers:
                layer.crop_rows(lengths)
        else:
            for layer in self.layers:
                layer.keep(kept, start)
        self._next_position = self._next_position + torch.tensor(
            list(map(len, kept)), device=self._next_position.device
        )

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row from `lengths[row]` on; they were not padding."""
        removed = [have - want for have, want in zip(self.lengths, lengths, strict=True)]
        for layer in self.layers:
            layer.crop_rows(lengths)
        self._next_position = self._next_position - torch.tensor(removed, device=self._next_position.device)

    def _mask(self, trees: Sequence[Tree], nodes: int) -> Tensor | None:
        """Who reads whom, bool `[B, 1, 1 + nodes, T + 1 + nodes]`; None: everyone what is before."""
        store, visible = self.layers[0].store, self._visible
        alike = not store.is_ragged and visible is None and min(map(len, trees)) == nodes
        if alike and all(tree.is_chain for tree in trees):
            return None
        device, tokens = self._next_position.device, store.num_tokens
        mask = torch.zeros(len(trees), 1, 1 + nodes, tokens + 1 + nodes, dtype=torch.bool, device=device)
        for row, (tree, length) in enumerate(zip(trees, store.lengths, strict=True)):
            mask[row, :, :, :length] = True
            if visible is not None:
                mask[row, :, :, : min(length, visible.shape[1])] = visible[row, :length]
            mask[row, 0, :, length : length + 1 + nodes] = _ancestors(tree, nodes).to(device)
        return mask


def dense(config: OvalConfig) -> OvalConfig:
    """The same paging, but everything is read."""
    return replace(config, min_context_tokens=NEVER_TOKENS, always_paged=False)


def head_of(model: PreTrainedModel) -> Any:
    """The module that turns hidden states into logits. Raises ValueError if the model has none."""
    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(model).__name__} has no output embeddings")
    return head


@contextmanager
def watch_head(model: PreTrainedModel, note: Callable[[Tensor], None]) -> Iterator[None]:
    """Hand over what the head of `model` is given at every pass. Raises ValueError if the model has no head."""

    def before_forward(module: Any, args: tuple[Any, ...]) -> None:
        note(args[0])

    hook = head_of(model).register_forward_pre_hook(before_forward)
    try:
        yield
    finally:
        hook.remove()


def _ancestors(tree: Tree, nodes: int) -> Tensor:
    """Which of root and nodes each of them reads, bool `[1 + nodes, 1 + nodes]`: itself and those above it."""
    above = torch.eye(1 + nodes, dtype=torch.bool)
    for node, parent in enumerate(tree.parents):
        above[1 + node] |= above[1 + parent]  # ROOT is index 0
    return above


def _paged_cache(model: PreTrainedModel, config: OvalConfig, cache: Any) -> DynamicCache:
    """A cache whose layers are all paged; one that is given is taken over, in place."""
    if not isinstance(cache, DynamicCache | None) or getattr(cache, "offloading", False):
        raise ValueError(
            "speculative decoding takes rejected tokens back, row by row, from a DynamicCache or an OvalCache; "
            f"got {'an offloaded ' if isinstance(cache, DynamicCache) else ''}{type(cache).__name__}"
        )
    if cache is None or not cache.get_seq_length():
        new = OvalCache(model.config.get_text_config(decoder=True), config)
        cache = new if cache is None else cache
        cache.layers, cache.layer_class_to_replicate = new.layers, None
    page_layers(cache, config)
    others = sorted({type(layer).__name__ for layer in cache.layers if not isinstance(layer, OvalLayer)})
    if others:
        raise ValueError(
            f"speculative decoding needs full attention in every layer of {type(model).__name__}: "
            f"{', '.join(others)} cannot take back a rejected token of one row"
        )
    return cache
