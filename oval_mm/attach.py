"""Put OVAL on a stock vision-language model: every image gets pages of its own.

get_image_features   how many tokens each picture has, and in which grid       (noted when it is called)
before forward       where they are in this pass; a mismatch is an error here  (nothing has changed yet)
after forward        spans are marked in the page tables, before those tokens are sealed (at the next `update`)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel

from oval_core import Handle as CoreHandle
from oval_core import OvalConfig
from oval_core import attach as attach_core
from oval_core.attach import CACHE_ARGUMENTS
from oval_core.layer import OvalLayer
from oval_core.stats import TraceEntry
from oval_mm.hybrid_router import hybrid_of
from oval_mm.image_spans import marks
from oval_mm.models import family_of
from oval_mm.page_embeddings import PictureTag, Shown, shown_pictures
from oval_mm.prompt_reader import Found, PromptReader

# Measured: README, "Questions about images".
IMAGE_CONFIG = OvalConfig(router="basis", shortlist_ratio=0.6, budget_ratio=0.25)
ENCODER = "get_image_features"
AUTO = "auto"


def attach(
    model: PreTrainedModel,
    processor: Any = None,
    config: OvalConfig | None = None,
    block: int | Literal["auto"] | None = "auto",
) -> Handle:
    """`oval_core.attach` for a model that reads images; no page mixes image and text, or two images.

    `model.generate(**processor(...))` works as before. The pages of a picture carry its number in its row as their tag,
    counted over all turns of a conversation. Videos are paged like text.

    Args:
        model: a stock model of `oval_mm.models.FAMILIES`.
        processor: its processor, to check that both count image tokens alike; None: found out at the first image.
        config: default `IMAGE_CONFIG`, which keeps answers best on any device. Images that are short are paged, too;
            pages are only left out where the budget is smaller than their number. A `HybridRouter` in it is told what
            the pictures show.
        block: side, in patches, of the square blocks that the pages of a picture show; its square is at most
            `config.page_size`. At the lower and right border of the grid blocks are smaller; a newline token that ends
            a row of patches (LLaVA-NeXT, OneVision) counts as a patch. Tokens whose grid is not known are paged in
            runs. None: runs, row after row of patches. "auto": squares that fill a page (4 for pages of 16), or runs
            where none do.

    Returns: a handle with `stats()`, `trace()` and `detach()`; also a context manager.

    Raises:
        TypeError, ValueError, RuntimeError: not such a model, a processor that does not fit it, a config that cannot
            work, or already attached. The model is unchanged then.
    """
    config = IMAGE_CONFIG if config is None else config
    if not isinstance(config, OvalConfig):
        raise TypeError(f"config must be an OvalConfig, got {type(config).__name__}")
    router = hybrid_of(getattr(config, "router", None))
    reader = PromptReader(family_of(model, processor), router.of_pictures if router else None)
    if router is not None:
        router.check(model)
    side = _side(block, config.page_size)
    handle = Handle(attach_core(model, config), reader, side)
    try:
        handle._install()
    except BaseException:
        handle.detach()
        raise
    return handle


class Handle:
    """An attached model; made by `attach`. Leaving it as a context manager detaches.

    Attributes:
        model, config, impl: see `oval_core.attach.Handle`.
    """

    def __init__(self, core: CoreHandle, reader: PromptReader, block: int | None = None) -> None:
        self._core, self._reader, self._block = core, reader, block
        self.model, self.config, self.impl = core.model, core.config, core.impl
        self._signature = inspect.signature(core.model.forward)
        self._encoder: nn.Module | None = None
        self._found: Found | None = None
        self._unknown: set[tuple[int, int, int]] = set()  # pictures without an embedding: turn, row, number in the turn
        self._hooks: list[Any] = []

    def stats(self) -> dict[str, Any]:
        """See `oval_core.attach.Handle.stats`; with a `HybridRouter` also `pictures_without_embedding`.

        Those, counted in every row, were routed without the head.
        """
        stats, router = self._core.stats(), hybrid_of(self.config.router)
        if router is not None and router.embedding.needs_pictures:
            stats["pictures_without_embedding"] = len(self._unknown)
        return stats

    def trace(self) -> AbstractContextManager[list[TraceEntry]]:
        """See `oval_core.attach.Handle.trace`."""
        return self._core.trace()

    def detach(self) -> None:
        """Restore the model. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        if self._encoder is not None:
            delattr(self._encoder, ENCODER)
        self._hooks, self._encoder = [], None
        self._core.detach()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def _install(self) -> None:
        """Change the model. If this raises, `detach` undoes what was done."""
        before = self.model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        self._hooks = [before, self.model.register_forward_hook(self._after_forward, with_kwargs=True)]
        encoder = self.model.base_model
        if ENCODER in vars(encoder):
            raise RuntimeError(f"{type(encoder).__name__}.{ENCODER} has been replaced; restore it to attach")
        setattr(encoder, ENCODER, _Encoder(getattr(encoder, ENCODER), self._reader))
        self._encoder = encoder

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self._arguments(args, kwargs)
        cache = _cache(arguments)
        self._found = None
        past_tokens = 0 if cache is None else cache.get_seq_length()
        if past_tokens == 0:
            self._unknown = set()
        if not model.training:
            self._found = self._reader.read(arguments, past_tokens)
        _unblock_what_is_hidden(_paged_layers(cache), arguments.get("attention_mask"))

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        found, self._found = self._reader.passed(self._found), None
        if found is None:
            return
        shown = shown_pictures(found.spans, found.embeddings, found.start)
        for row, spans in enumerate(found.spans):
            unknown = [span for span in spans if shown[row, span.start].embedding is None]
            self._unknown |= {(found.start, row, span.image) for span in unknown}
        for layer in _paged_layers(_cache(self._arguments(args, kwargs))):
            _mark(layer, found, self._block, shown)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        arguments = self._signature.bind_partial(*args, **kwargs).arguments
        return {**arguments, **arguments.get("kwargs", {})}


class _Encoder:
    """`get_image_features`, noted: `generate` calls it before `forward`, which then gets nothing but the features."""

    def __init__(self, encode: Callable[..., Any], reader: PromptReader) -> None:
        functools.update_wrapper(self, encode)
        self.__signature__ = inspect.signature(encode)  # `generate` chooses arguments by it
        self._encode, self._reader = encode, reader

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = self._encode(*args, **kwargs)
        self._reader.encoded(self.__signature__.bind_partial(*args, **kwargs).arguments, output)
        return output


def _cache(arguments: dict[str, Any]) -> Any:
    return next((arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


def _paged_layers(cache: Any) -> list[OvalLayer]:
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, OvalLayer)]


def _side(block: Any, page_size: int) -> int | None:
    """The side of a block in patches."""
    if block is None:
        return None
    if block == AUTO:
        side = math.isqrt(page_size)
        return side if side**2 == page_size else None
    if not isinstance(block, int) or isinstance(block, bool):
        raise TypeError(f"block must be an integer >= 1, 'auto' or None, got {block!r} ({type(block).__name__})")
    if block < 1 or block * block > page_size:
        raise ValueError(f"block must be an integer >= 1 whose square is at most page_size = {page_size}, got {block}")
    return block


def _mark(layer: OvalLayer, found: Found, block: int | None, shown: Mapping[tuple[int, int], Shown]) -> None:
    """Give the pictures that begin in this pass pages of their own; those of earlier turns count on."""
    earlier = [[span.tag for span in table.spans if span.start < found.start] for table in layer.tables]
    first = [1 + max(tags, default=-1) for tags in earlier]
    for row, start, stop, tag, blocks in marks(found.spans, block):
        if found.start + start >= found.fresh:
            number = PictureTag(first[row] + tag, shown[row, start])
            layer.mark(row, found.start + start, found.start + stop, number, blocks)


def _unblock_what_is_hidden(layers: list[OvalLayer], mask: Any) -> None:
    """A mask goes by position: of whatever it hides some tokens only, all tokens are stored in order again.

    Args:
        layers: of one cache.
        mask: `[B, T]`, `[B, h, Q, T]`, or anything else, which is not looked into.
    """
    tables = layers[0].tables if layers else []
    blocked = [(row, span) for row, table in enumerate(tables) for span in table.spans if span.blocks]
    if not blocked or mask is None:
        return
    shown = mask.cpu() if isinstance(mask, Tensor) else None
    for row, span in blocked:
        tokens = None if shown is None else shown[min(row, len(shown) - 1), ..., span.start : span.stop]
        if tokens is None or bool((tokens != tokens[..., :1]).any()):
            for layer in layers:
                layer.unblock(row, span.start)
