"""Ways to read conversations about images: the dense model, the attached one, and rivals that read less otherwise.

Images are prefilled once, without a question; every conversation then starts from a copy of that cache, so no token of
a question has seen an image page that its own step did not select.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from benchmarks.image_questions import ImageBatch, Rows
from benchmarks.image_regions import RegionsRead, make_grid, regions_read
from benchmarks.image_routers import ImageBudget
from benchmarks.settings import BYTES_PER_ELEMENT
from oval_core import OvalConfig
from oval_core.routers import Router
from oval_mm import attach

NOTHING = RegionsRead()
BYTES = ("bytes_read", "metadata_bytes", "bytes_dense")


@dataclass(frozen=True)
class Outcome:
    """What came of some rows.

    Args:
        logits: float32 `[n, words]` of the answer tokens, row after row.
        bytes_read, bytes_dense: of all rows and steps, in one unit.
        regions: nothing where no pages were selected.
    """

    logits: Tensor
    bytes_read: float
    bytes_dense: float
    regions: RegionsRead = NOTHING


class Reader:
    """Reads the dense model. The rivals override what differs; used as a context manager.

    Args:
        model: a `LlavaForConditionalGeneration` that is not attached.
        processor: its `LlavaProcessor`.
        shares: of the image tokens, what `read` will be asked for.
    """

    def __init__(self, model: Any, processor: Any, shares: tuple[float, ...] = (1.0,)) -> None:
        self.model, self.processor, self.shares = model, processor, shares

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Leave the model as it was."""

    def fill(self, batch: ImageBatch) -> Any:
        """What `read` starts from."""
        return prefill(self.model, self.processor, batch)

    def read(self, filled: Any, rows: Rows, share: float) -> Outcome:
        """Read all tokens of `rows` with `share` of their images."""
        cache = rows_of(filled, rows.packs)
        past, steps = cache.get_seq_length(), rows.tokens.shape[1]
        with torch.inference_mode():
            logits = self.model(input_ids=rows.tokens, cache=cache).logits
        tokens = len(rows.tokens) * float(sum(past + step + 1 for step in range(steps)))
        return Outcome(logits[rows.is_answer].float(), tokens, tokens)


class OvalReader(Reader):
    """The attached model, one token a step, with pages selected at every step, those of the question included.

    Args:
        router: decides which image pages are read; text pages always are.
        settings: of `OvalConfig`, but for router and budget.
        block: side of the square blocks that image pages show, see `oval_mm.attach`.
    """

    def __init__(
        self,
        model: Any,
        processor: Any,
        shares: tuple[float, ...],
        router: Router,
        settings: Mapping[str, Any],
        block: Any = None,
    ) -> None:
        super().__init__(model, processor, shares)
        self.router, self.grid, self.block = ImageBudget(router), make_grid(processor), block
        self.config = OvalConfig(**settings, router=self.router, budget_pages=3, always_paged=True, stats_every=0)

    def __enter__(self) -> Self:
        self.handle = attach(self.model, self.processor, self.config, self.block)
        return self

    def __exit__(self, *_: object) -> None:
        self.handle.detach()

    def fill(self, batch: ImageBatch) -> Any:
        """See `Reader.fill`; pages are sealed once here, not in every row that is copied from this cache."""
        cache = super().fill(batch)
        for layer in cache.layers:
            layer.pages.seal(layer.store, layer.store.lengths)
        return cache

    @torch.inference_mode()
    def read(self, filled: Any, rows: Rows, share: float) -> Outcome:
        """See `Reader.read`. Raises RuntimeError if a step was not paged."""
        self.router.share = share
        cache = rows_of(filled, rows.packs)
        before = self.handle.stats()
        with self.handle.trace() as entries:
            steps = [self.model(input_ids=token, cache=cache).logits[:, -1] for token in rows.tokens.split(1, dim=1)]
        after = self.handle.stats()
        if len(entries) != len(steps) * len(cache.layers):
            raise RuntimeError(f"every step must be paged, but these were dense: {after['dense_steps']}")
        read, metadata, dense = (after[name] - before[name] for name in BYTES)
        as_bfloat16 = BYTES_PER_ELEMENT / filled.layers[0].store.storage[0].element_size()
        return Outcome(
            torch.stack(steps, 1)[rows.is_answer].float(),
            (read - metadata) * as_bfloat16 + metadata,
            dense * as_bfloat16,
            regions_read(rows, cache.layers[0].tables, entries, self.grid),
        )


def prefill(model: Any, processor: Any, batch: ImageBatch) -> Any:
    """The cache of a model that has read the images and no question."""
    pixels = processor.image_processor(images=list(batch.images), return_tensors="pt").pixel_values
    with torch.inference_mode():
        return model(input_ids=batch.prefix, pixel_values=pixels, use_cache=True, logits_to_keep=1).cache


def rows_of(cache: Any, packs: Tensor) -> Any:
    """A cache whose row i is row `packs[i]` of `cache`, which stays as it is."""
    own = copy.deepcopy(cache)
    own.batch_select_indices(packs)
    return own
