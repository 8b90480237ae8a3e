"""Medusa heads for SmolLM2-135M-Instruct, trained by this project (see the card beside them)."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from oval_spec import MedusaHeads

HEADS = Path(__file__).parent / "data" / "smollm2-medusa"


def load_heads(model: PreTrainedModel, path: Path | None = None) -> MedusaHeads | None:
    """The heads for `model`: those in `path`, or the shipped ones if they fit it, else None.

    Raises:
        FileNotFoundError, ValueError: there are none in `path`, or they are for another model.
    """
    heads = MedusaHeads.load(path or HEADS)
    try:
        heads.check(model)
    except ValueError:
        if path is not None:
            raise
        return None
    return heads
