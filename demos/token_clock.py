"""When new tokens arrive, with a progress bar."""

from __future__ import annotations

import time

from torch import Tensor
from tqdm import tqdm
from transformers.generation.streamers import BaseStreamer


class TokenClock(BaseStreamer):
    """A streamer for one text.

    Args:
        total: new tokens to expect; None: no progress bar.
        title: of the bar.

    Attributes:
        times: `time.perf_counter()` at every new token.
    """

    def __init__(self, total: int | None = None, title: str = "") -> None:
        self.times: list[float] = []
        self._has_prompt = False
        self._bar = tqdm(total=total, desc=title, unit="token", disable=total is None)

    def put(self, value: Tensor) -> None:
        """The prompt first, then new tokens, one or several."""
        if self._has_prompt:
            self.times += [time.perf_counter()] * value.numel()
            self._bar.update(value.numel())
        self._has_prompt = True

    def end(self) -> None:
        """The text is complete."""
        self._bar.close()

    @property
    def token_s(self) -> float:
        """Seconds a token, from the first new one to the last."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)

    @property
    def tokens_per_s(self) -> float:
        """Its inverse."""
        return 1 / self.token_s if self.token_s else float("nan")
