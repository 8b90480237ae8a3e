"""What every training here shares: where it computes, how fast it learns when, and how it survives an interruption."""

from __future__ import annotations

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

Content = dict[str, Any]
WARM_UP = 0.05  # share of the steps


def make_accelerator() -> Accelerator:
    """A GPU if there is one.

    What is computed under its `autocast` is in bfloat16 (with float32 weights) where the device has instructions for
    it; all else is in the dtype of the tensors.
    """
    if torch.cuda.is_available():
        quick = torch.cuda.is_bf16_supported()
    else:
        quick = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return Accelerator(mixed_precision="bf16" if quick else "no")


def share_of_rate(step: int, steps: int) -> float:
    """Of the highest learning rate: up in a line, down in half a wave of a cosine."""
    warm = max(1, round(WARM_UP * steps))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file under another name; only when it is complete does it become `path`."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    write(unfinished)
    unfinished.replace(path)


class StateFile:
    """The file from which an interrupted training goes on.

    `about` is what must be the same for that (steps, seed, sizes, ...): numbers, strings, lists and dicts of them.
    It is a file of `torch.save`, read with `weights_only`: the state of an optimizer is nested, and safetensors hold
    flat tensors. What a training leaves in the end is in safetensors.
    """

    def __init__(self, path: Path, about: Content, every_s: float = 180.0) -> None:
        self.path, self.about, self.every_s = path, about, every_s
        self._written_at = time.monotonic()

    def load(self) -> Content | None:
        """What was saved last, tensors on the CPU; None where nothing was.

        Raises:
            ValueError: it is the state of another training, or no state.
        """
        self._written_at = time.monotonic()
        if not self.path.exists():
            return None
        try:
            saved = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # whatever `torch.load` makes of a file that it did not write
            saved = None
        if not isinstance(saved, dict) or not isinstance(saved.get("about"), dict):
            raise ValueError(f"{self.path}: expected the state of a training, got something else: delete it")
        require_same(self.about, saved["about"], self.path)
        content: Content = saved["content"]
        return content

    def save(self, content: Content) -> None:
        """Replace what was saved before, in one move."""
        saved = {"about": self.about, "content": content}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, lambda unfinished: torch.save(saved, unfinished))
        self._written_at = time.monotonic()

    def is_due(self) -> bool:
        """Whether `every_s` seconds have passed since the last save."""
        return time.monotonic() - self._written_at >= self.every_s

    def after_step(self, content: Callable[[], Content], interrupted: bool) -> None:
        """Save what `content()` gives if that is due. Raises KeyboardInterrupt, having saved, if `interrupted`."""
        if interrupted or self.is_due():
            self.save(content())
        if interrupted:
            raise KeyboardInterrupt

    def remove(self) -> None:
        """The training is finished."""
        self.path.unlink(missing_ok=True)


def settings_from(kind: Any, options: Any) -> Any:
    """The settings dataclass `kind`, each of its fields taken from the attribute of that name."""
    return kind(**{field.name: getattr(options, field.name) for field in dataclasses.fields(kind)})


def require_same(expected: Content, found: Content, where: Path) -> None:
    """Raise ValueError, naming the first difference, where a folder belongs to a training with other settings."""
    for name in sorted({*expected, *found}):
        ours, theirs = expected.get(name), found.get(name)
        if ours != theirs:
            raise ValueError(
                f"{where} was made with {name}={theirs}, expected {name}={ours}: "
                "give the same settings, use another folder, or delete it"
            )


@contextmanager
def interrupts_wait() -> Iterator[Callable[[], bool]]:
    """Ctrl-C no longer stops a step half-way: the value of this context says whether it was pressed.

    The loop asks after every step, saves and raises KeyboardInterrupt itself. A second Ctrl-C interrupts at once.
    Outside the main thread, where there are no signals, nothing changes.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed.is_set
        return
    before = signal.getsignal(signal.SIGINT) or signal.SIG_DFL

    def remember(*_: object) -> None:
        pressed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, remember)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def ignore_interrupts(_worker: int) -> None:
    """For a DataLoader's `worker_init_fn`: Ctrl-C reaches workers too, but only the main process may decide to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
