"""Look over the shoulder of an attached model: its newest tokens, selections and hit rates, in bounded memory.

Everything is collected on the thread that runs the model, after a forward pass; other threads read finished snapshots.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oval_core.attach import Handle, binding_of
from oval_core.stats import Recorder, TraceEntry

LAST_TOKENS = 1000
Callback = Callable[[Tensor], object]


@dataclass(frozen=True)
class Snapshot:
    """What was known after a forward pass.

    Attributes:
        report: of `handle.stats()`.
        selections: by layer index, what the newest traced steps read, oldest first.
        device_type: where the model runs, "cpu" or "cuda", say.
    """

    report: Mapping[str, Any] = field(default_factory=dict)
    selections: Mapping[int, tuple[TraceEntry, ...]] = field(default_factory=dict)
    device_type: str = "cpu"


@dataclass
class _Alarm:
    threshold: float
    patience: int
    callback: Callback
    low: int = 0

    def hear(self, rate: float, tokens: Tensor) -> None:
        self.low = self.low + 1 if rate < self.threshold else 0
        if self.low == self.patience:
            self.low = 0
            self.callback(tokens)


class _Pass(NamedTuple):
    """A forward pass: its trace, what that collects, and how many hit rates there were before."""

    stack: ExitStack
    entries: list[TraceEntry]
    rates_before: int


class Watch:
    """Watches one handle until `close`; also a context manager.

    Args:
        handle: of a model that is attached.
        trace_every: keep the selections of every n-th decoding step; they cost a copy to the CPU.
        keep_selections: of each layer.
        refresh_s: seconds between two snapshots at least; each asks `handle.stats()`. 0: one after every forward pass.

    Raises:
        ValueError: the handle is detached, or a number is out of range.

    Attributes:
        handle: as given, or as given to `follow`.
        snapshot: the newest one; safe to read from any thread.
    """

    handle: Handle

    def __init__(self, handle: Handle, trace_every: int = 4, keep_selections: int = 64, refresh_s: float = 1.0) -> None:
        if trace_every < 1 or keep_selections < 1 or refresh_s < 0:
            raise ValueError(
                "trace_every and keep_selections must be >= 1, refresh_s >= 0, "
                f"got {trace_every}, {keep_selections}, {refresh_s}"
            )
        self.snapshot = Snapshot()
        self._trace_every, self._refresh_s, self._refreshed_s = trace_every, refresh_s, -float("inf")
        self._selections: dict[int, deque[TraceEntry]] = defaultdict(lambda: deque(maxlen=keep_selections))
        self._tokens: list[Tensor] = []
        self._alarms: list[_Alarm] = []
        self._pass: _Pass | None = None  # the one that runs
        self._hooks: list[Any] = []
        self.follow(handle)

    def follow(self, handle: Handle) -> None:
        """Watch this handle from now on, also after `close`; what `on_low_hit_rate` was told stays.

        Raises:
            ValueError: the handle is detached.
        """
        binding = binding_of(handle.model)
        if binding is None:
            raise ValueError("the handle must belong to an attached model, got one that is detached")
        self.close()
        self.handle, self._recorder = handle, binding.recorder
        self._hooks = [
            handle.model.register_forward_pre_hook(self._before, with_kwargs=True),
            handle.model.register_forward_hook(self._after, always_call=True),
        ]

    def on_low_hit_rate(self, threshold: float, patience: int, callback: Callback) -> None:
        """Call `callback(tokens)` once the hit rate was low often enough in a row, then count anew.

        Args:
            threshold: a hit rate below it is low, in (0, 1].
            patience: low samples in a row, `OvalConfig(stats_every)` steps apart, mean over the layers each.
            callback: gets the last `LAST_TOKENS` tokens or fewer, int64 `[B, n]` on the CPU, as they were fed to the
                model (drafts that were refused and padding included; none where a model is fed embeddings). It runs
                between two forward passes, in the grad and inference mode of the caller of the model, which is
                attached: `oval_core.metrics.retrain.Retrainer` trains later.

        Raises:
            ValueError: out of range, or the hit rate is never measured.
        """
        if not 0 < threshold <= 1 or patience < 1:
            raise ValueError(f"threshold must be in (0, 1] and patience >= 1, got {threshold} and {patience}")
        if self._recorder.config.stats_every == 0:
            raise ValueError("the hit rate is never measured: OvalConfig(stats_every) must be >= 1, got 0")
        self._alarms.append(_Alarm(threshold, patience, callback))

    def close(self) -> None:
        """Stop watching. A second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end_pass()

    def _end_pass(self) -> _Pass | None:
        """The pass that runs, or that an interrupt ended without `_after`; it is traced no longer."""
        ended, self._pass = self._pass, None
        if ended is not None:
            ended.stack.close()
        return ended

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def last_tokens(self) -> Tensor:
        """Int64 `[B, n]`, the newest `LAST_TOKENS` tokens or fewer since the cache was last empty."""
        return torch.cat(self._tokens, 1)[:, -LAST_TOKENS:] if self._tokens else torch.zeros(0, 0, dtype=torch.long)

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Runs after OVAL's own hook: the recorder counts this step already."""
        self._end_pass()
        stack, entries = ExitStack(), list[TraceEntry]()
        if _is_new(self._recorder):
            self._selections.clear()
            self._tokens = []
        if self._recorder.step % self._trace_every == 0:
            entries = stack.enter_context(self.handle.trace())
        self._pass = _Pass(stack, entries, len(self._recorder.hit_rates))
        self._remember(kwargs.get("decoder_input_ids", kwargs.get("input_ids", next(iter(args), None))))

    def _remember(self, tokens: Tensor | None) -> None:
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            return
        if self._tokens and len(self._tokens[0]) != len(tokens):
            self._tokens = []
        self._tokens.append(tokens.detach().cpu())
        while sum(part.shape[1] for part in self._tokens[1:]) >= LAST_TOKENS:
            del self._tokens[0]

    def _after(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        ended = self._end_pass()
        if ended is None:
            return  # the call was refused before it began
        for entry in ended.entries:
            self._selections[entry.layer_idx].append(entry)
        if time.monotonic() - self._refreshed_s >= self._refresh_s:
            kept = {layer: tuple(selections) for layer, selections in self._selections.items()}
            self.snapshot = Snapshot(self.handle.stats(), kept, self.handle.model.device.type)
            self._refreshed_s = time.monotonic()
        rates = self._recorder.hit_rates[ended.rates_before :]
        if rates and self._alarms:
            rate = float(torch.stack(rates).mean())
            for alarm in self._alarms:
                alarm.hear(rate, self.last_tokens())


def _is_new(recorder: Recorder) -> bool:
    """Whether the first forward pass since the cache was empty is about to run."""
    return recorder.step <= 1
