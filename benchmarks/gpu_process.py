"""Work in a process of its own: what it has yielded is not lost with it, and the next process starts afresh."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LEAVE_S = 10  # for a process that has sent everything to end


def apart(until: float, work: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """What `work(*arguments)` yields in another process, which is ended at `until` (of `time.monotonic`).

    Raises:
        TimeoutError: it was not done by then.
        RuntimeError: what it raised, by name; or that it died.
    """
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, work, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        yield from _received(receiver, until)
        process.join(LEAVE_S)
        if process.exitcode:
            raise RuntimeError(f"its process ended with exit status {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _received(receiver: Any, until: float) -> Iterator[Any]:
    while receiver.poll(max(0.0, until - time.monotonic())):
        try:
            item = receiver.recv()
        except EOFError:
            return
        if isinstance(item, Exception):
            raise item
        yield item
    raise TimeoutError("ended for taking too long")


def _send(sender: Any, work: Callable[..., Iterator[Any]], arguments: tuple[Any, ...]) -> None:
    try:
        for item in work(*arguments):
            sender.send(item)
    except Exception as error:  # an exception of a driver may not be one that can be sent
        sender.send(RuntimeError(f"{type(error).__name__}: {error}".splitlines()[0]))


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM inside the `with` block raises SystemExit, so that `finally` is heard."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
