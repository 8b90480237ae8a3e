"""`OvalCache`: the explicit form of the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from oval_core.config import AUTO, OvalConfig
from oval_core.layer import OvalLayer
from oval_core.routers import Router, make_router


class OvalCache(DynamicCache):
    """A `DynamicCache` whose full-attention layers are paged; all other layers keep their class.

    Given to a model that is not attached it works as a plain dense cache, and warns once.

    Args:
        config: of the model (or its text model).
        oval_config: how to page; default `OvalConfig()`.

    Example:
        `model.generate(**inputs, cache=OvalCache(model.config, OvalConfig(budget_pages=32)))`
    """

    def __init__(self, config: PretrainedConfig, oval_config: OvalConfig | None = None) -> None:
        super().__init__(config=config)
        page_layers(self, oval_config or OvalConfig())

    def crop_rows(self, lengths: Sequence[int]) -> None:
        """Keep the first `lengths[row]` tokens of each row. Raises ValueError if a layer is not paged."""
        for layer in self._paged("crop_rows"):
            layer.crop_rows(lengths)

    def keep(self, indices: Sequence[Sequence[int]], start: Sequence[int]) -> None:
        """See `PageStore.keep`. Raises ValueError if a layer is not paged."""
        for layer in self._paged("keep"):
            layer.keep(indices, start)

    def _paged(self, operation: str) -> list[OvalLayer]:
        paged = [layer for layer in self.layers if isinstance(layer, OvalLayer)]
        if len(paged) != len(self.layers):
            raise ValueError(f"{operation} needs every layer to be paged; this cache has {self.layers}")
        return paged


def page_layers(cache: DynamicCache, config: OvalConfig, router: Router | None = None) -> None:
    """Replace the full-attention layers of `cache` by paged ones, in place; tokens that they hold are taken over."""
    if router is None and config.router != AUTO:
        router = make_router(config)
    for index, layer in enumerate(cache.layers):
        if type(layer) is not DynamicLayer:
            continue
        paged = OvalLayer(config, router, index)
        if layer.keys is not None and layer.values is not None and layer.get_seq_length():
            paged.update(layer.keys, layer.values)
        cache.layers[index] = paged
