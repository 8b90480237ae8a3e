"""What a drafting model's own router read, as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oval_core.attach import binding_of
from oval_core.layer import OvalLayer
from oval_core.stats import TraceEntry


def traced(model: PreTrainedModel, wanted: bool = True) -> AbstractContextManager[list[TraceEntry]]:
    """The selections that an attached model makes inside the `with` block; none unless `wanted`."""
    binding = binding_of(model) if wanted else None
    return nullcontext([]) if binding is None else binding.recorder.tracing()


def tokens_read(entries: Sequence[TraceEntry], layer: OvalLayer) -> Tensor | None:
    """Tokens in the pages that a layer read at any of the steps, bool `[B, H, T]`; None if it selected nothing.

    Pages that the layer has no longer do not count; the open tokens do.
    """
    own = [entry.read for entry in entries if entry.layer_idx == layer.layer_idx]
    if not own:
        return None
    pages = min(layer.pages.num_pages, min(read.shape[-1] for read in own))
    read = torch.stack([each[..., :pages] for each in own]).any(0)  # [B, H, P]
    tokens = torch.zeros(*read.shape[:2], layer.store.num_tokens, dtype=torch.bool)
    for row, table in enumerate(layer.tables):
        tokens[row, :, table.sealed_end :] = True
        for page in range(min(pages, table.num_pages)):
            start = table.starts[page]
            tokens[row, :, start : start + table.lengths[page]] = read[row, :, page, None]
    return tokens.to(layer.pages.starts.device)
