"""Time the attention of attached models as they decode: selection, reading and what stands around them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oval_core.attach import NAME


@contextmanager
def attention_clock() -> Iterator[list[float]]:
    """Collect the seconds of every attention call of every attached model inside the `with` block, on a CPU."""
    seconds: list[float] = []
    attention = ALL_ATTENTION_FUNCTIONS[NAME]

    def timed(*arguments: Any, **keywords: Any) -> Any:
        begin = time.perf_counter()
        result = attention(*arguments, **keywords)
        seconds.append(time.perf_counter() - begin)
        return result

    AttentionInterface.register(NAME, timed)
    try:
        yield seconds
    finally:
        AttentionInterface.register(NAME, attention)
