"""What a learned router learns from: where the dense model looks, position by position, and what a head will be shown.

One safetensors file a passage: dense attention is kept as its mass per page, not as maps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from oval_core.routers import Pages
from oval_core.routers.oracle import exact_log_mass
from oval_core.tensor_file import read_tensors
from oval_core.training.passages import PassageSettings, Watcher, watch_passage
from oval_core.training.state import Content, require_same, write_whole

KEPT = torch.float16


@dataclass(frozen=True)
class Lesson:
    """N positions of one passage over its P pages, in L paged layers; float16 where nothing is said.

    Args:
        layers: their indices, int64 `[L]`.
        positions: int64 `[N]`.
        counts: pages that each position can look back at, int64 `[N]`.
        starts, lengths: of the pages, int64 `[P]`.
        centroids: `[L, H, P, D]`.
        hidden: what enters the attention modules, `[L, N, hidden]`.
        coarse: training-free scores, `[L, H, G, N, P]`, the most bytes; None for a head that does without.
        share: pages' shares of the attention mass, softmax for each query head, mean over the group, `[L, H, N, P]`.
    """

    layers: Tensor
    positions: Tensor
    counts: Tensor
    starts: Tensor
    lengths: Tensor
    centroids: Tensor
    hidden: Tensor
    coarse: Tensor | None
    share: Tensor

    def at(self, chosen: Tensor) -> Lesson:
        """Of some positions only, int64 `[n]`."""
        parts: dict[str, Any] = {
            "positions": self.positions[chosen],
            "counts": self.counts[chosen],
            "hidden": self.hidden[:, chosen],
            "coarse": None if self.coarse is None else self.coarse[:, :, :, chosen],
            "share": self.share[:, :, chosen],
        }
        return Lesson(**{**vars(self), **parts})

    def to(self, device: torch.device) -> Lesson:
        """On a device."""
        moved: dict[str, Any] = {name: part if part is None else part.to(device) for name, part in vars(self).items()}
        return Lesson(**moved)


class Teacher(Watcher):
    """Notes what every layer shows at every stop of one passage."""

    def __init__(self) -> None:
        self.stops: dict[int, list[dict[str, Tensor]]] = {}

    def watch(self, query: Tensor, pages: Pages) -> None:
        """See `Watcher.watch`."""
        if pages.hidden_states is None:
            raise ValueError("expected the hidden states of an attached model, got none")
        log_mass = exact_log_mass(query, pages)
        noted = {
            "positions": pages.positions[0],
            "counts": pages.counts.expand(query.shape[3]),
            "starts": pages.starts[0],
            "lengths": pages.lengths[0],
            "centroids": pages.basis.coarse()[0][0].to(KEPT),
            "hidden": pages.hidden_states[0].to(KEPT),
            "coarse": pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)[0].to(KEPT),
            "share": log_mass.softmax(-1).mean(2)[0].to(KEPT),
        }
        self.stops.setdefault(pages.layer_idx, []).append({name: tensor.cpu() for name, tensor in noted.items()})

    def lesson(self) -> Lesson:
        """All stops together. Raises ValueError if no layer was paged."""
        if not self.stops:
            raise ValueError("the model has no layer whose keys can be paged: there is nothing to learn")
        layers = sorted(self.stops)
        last = self.stops[layers[0]][-1]
        rows, most = self.stops[layers[0]], len(last["starts"])
        joined = {name: torch.cat([stop[name] for stop in rows]) for name in ("positions", "counts")}
        joined |= {name: last[name] for name in ("starts", "lengths")}
        joined["centroids"] = torch.stack([self.stops[layer][-1]["centroids"] for layer in layers])
        for name, dim in (("hidden", 0), ("coarse", 2), ("share", 1)):
            wide = 0 if name == "hidden" else most
            joined[name] = torch.stack(
                [torch.cat([_widened(stop[name], wide) for stop in self.stops[layer]], dim) for layer in layers]
            )
        return Lesson(torch.tensor(layers), **joined)


def _widened(tensor: Tensor, wide: int) -> Tensor:
    """With zeros for pages that came later."""
    return torch.nn.functional.pad(tensor, (0, max(0, wide - tensor.shape[-1])))


def make_lessons(
    folder: Path,
    model: Any,
    passages: Sequence[Tensor],
    settings: PassageSettings,
    about: Content,
    coarse: bool = False,
) -> list[Lesson]:
    """One lesson a passage, kept in `folder`: what is there is not made again.

    Args:
        model: not attached, in eval mode.
        about: what must be the same for lessons to be used again; plain values.
        coarse: whether training-free scores are wanted; they are in the files anyway, which several routers may share.

    Raises:
        ValueError: `folder` holds lessons made with other settings, or the model has no layer to page.
    """
    lessons = []
    for number, tokens in enumerate(tqdm(passages, desc="lessons", unit="passage")):
        file = folder / f"{number:04d}.safetensors"
        if not file.exists():
            teacher = Teacher()
            watch_passage(model, tokens, teacher, settings)
            _save(file, teacher.lesson(), about)
        lessons.append(_load(file, about, coarse))
    return lessons


def _save(file: Path, lesson: Lesson, about: Content) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in vars(lesson).items() if tensor is not None}
    write_whole(file, lambda unfinished: save_file(tensors, unfinished, {"about": json.dumps(about)}))


def _load(file: Path, about: Content, coarse: bool) -> Lesson:
    metadata, tensors = read_tensors(file, "a lesson", without=() if coarse else ("coarse",))
    require_same(about, json.loads(metadata.get("about", "{}")), file)
    return Lesson(coarse=tensors.pop("coarse", None), **tensors)
