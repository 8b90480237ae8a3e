"""Put OVAL on a stock vision-language model: every image gets pages of its own.

get_image_features   how many tokens each picture has, and in which grid       (noted when it is called)
before forward       where they are in this pass; a mismatch is an error here  (nothing has changed yet)
after forward        spans are marked in the page tables, before those tokens are sealed (at the next `update`)
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oval_core import Handle as CoreHandle
from oval_core import OvalConfig
from oval_core import attach as attach_core
from oval_core.attach import CACHE_ARGUMENTS
from oval_core.layer import OvalLayer
from oval_core.stats import TraceEntry
from oval_mm.image_spans import marks
from oval_mm.models import family_of
from oval_mm.prompt_reader import Found, PromptReader

ENCODER = "get_image_features"


def attach(model: PreTrainedModel, processor: Any = None, config: OvalConfig | None = None) -> Handle:
    """`oval_core.attach` for a model that reads images; no page mixes image and text, or two images.

    `model.generate(**processor(...))` works as before. The pages of a picture carry its number in its row as their tag,
    counted over all turns of a conversation. Videos are paged like text.

    Args:
        model: a stock model of `oval_mm.models.FAMILIES`.
        processor: its processor, to check that both count image tokens alike; None: found out at the first image.
        config: default `OvalConfig()`. Images that are short are paged, too; pages are only left out where
            the budget is smaller than their number.

    Returns: a handle with `stats()`, `trace()` and `detach()`; also a context manager.

    Raises:
        TypeError, ValueError, RuntimeError: not such a model, a processor that does not fit it, a config that cannot
            work, or already attached. The model is unchanged then.
    """
    reader = PromptReader(family_of(model, processor))
    handle = Handle(attach_core(model, config), reader)
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

    def __init__(self, core: CoreHandle, reader: PromptReader) -> None:
        self._core, self._reader = core, reader
        self.model, self.config, self.impl = core.model, core.config, core.impl
        self._signature = inspect.signature(core.model.forward)
        self._encoder: nn.Module | None = None
        self._found: Found | None = None
        self._hooks: list[Any] = []

    def stats(self) -> dict[str, Any]:
        """See `oval_core.attach.Handle.stats`."""
        return self._core.stats()

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
        if not model.training:
            self._found = self._reader.read(arguments, 0 if cache is None else cache.get_seq_length())

    def _after_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        found, self._found = self._found, None
        self._reader.passed()
        if found is None:
            return
        for layer in getattr(_cache(self._arguments(args, kwargs)), "layers", ()):
            if isinstance(layer, OvalLayer):
                _mark(layer, found)

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


def _mark(layer: OvalLayer, found: Found) -> None:
    """Give the pictures that begin in this pass pages of their own; those of earlier turns count on."""
    earlier = [[span.tag for span in table.spans if span.start < found.start] for table in layer.tables]
    first = [1 + max(tags, default=-1) for tags in earlier]
    for row, start, stop, tag in marks(found.spans):
        if found.start + start >= found.fresh:
            layer.mark(row, found.start + start, found.start + stop, first[row] + tag)
