"""What a model's config says of its attention."""

from __future__ import annotations

from typing import Any


def head_dim_of(config: Any) -> int:
    """Head dimension of a decoder with this config."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
