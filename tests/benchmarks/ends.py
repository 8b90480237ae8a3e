"""Work that ends in different ways; a process that does it starts quickly, for this imports next to nothing."""

import os
import signal
from collections.abc import Iterator


def work(how: str) -> Iterator[str]:
    """Two items, then it ends `how`."""
    yield "first"
    yield "second"
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":
        raise OSError("no such thing")
