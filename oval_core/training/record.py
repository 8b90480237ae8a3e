"""What a finished training leaves: weights, and beside them a record of how they came about and what they hit."""

from __future__ import annotations

import json
from pathlib import Path

from oval_core.routers.learned_file import save_learned
from oval_core.training.run import Run
from oval_core.training.state import Content, require_same, write_whole

BUDGET = "budget_pages"  # of the hit rates: it has no influence on the weights


class Record:
    """The record in the file `path`, and the weights that it is about.

    Args:
        path: JSON.
        weights: safetensors.
        about: what must be the same for weights to be used again; plain values.

    Raises:
        ValueError: the files are those of another training.
    """

    def __init__(self, path: Path, weights: Path, about: Content) -> None:
        self.path, self.weights, self.about = path, weights, about
        self._content: Content = {}
        if path.exists() and weights.exists():
            self._content = _read(path)
            made_with = {name: value for name, value in self._content["about"].items() if name != BUDGET}
            require_same(about, made_with, path.parent)

    @property
    def is_trained(self) -> bool:
        """Whether the weights are there."""
        return bool(self._content)

    def hit_rates(self, budget_pages: int) -> dict[str, float] | None:
        """What was measured with this budget; None: nothing."""
        if not self.is_trained or self._content["about"].get(BUDGET) != budget_pages:
            return None
        measured: dict[str, float] = self._content["hit_rates"]
        return measured

    def add_weights(self, run: Run) -> None:
        """Keep what `run` has trained, and no state of it."""
        save_learned(self.weights, run.trained)
        self._write({"about": self.about, "train_s": run.seconds, "validation": run.validation})
        run.state.remove()

    def add_hit_rates(self, budget_pages: int, measured: dict[str, float]) -> dict[str, float]:
        """Keep hit rates, instead of those with another budget; `measured`."""
        self._write({**self._content, "about": {**self.about, BUDGET: budget_pages}, "hit_rates": measured})
        return measured

    def _write(self, content: Content) -> None:
        write_whole(self.path, lambda path: path.write_text(json.dumps(content, indent=1) + "\n"))
        self._content = content


def _read(path: Path) -> Content:
    """A record; ValueError where a file is none."""
    try:
        content = json.loads(path.read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict) or not isinstance(content.get("about"), dict):
        raise ValueError(f"{path}: expected the record of a training, got something else: delete it to train anew")
    return content
