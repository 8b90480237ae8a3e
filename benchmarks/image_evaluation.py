"""Let readers of `benchmarks.image_qa` answer the same questions, one reader after the other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from tqdm import tqdm

from benchmarks.image_questions import ImageBatch, make_batch
from benchmarks.image_readers import Reader
from benchmarks.image_scores import Row, Tally
from oval_mm.recipes.llava_batches import IMAGES, Asked, packs

IMAGES_TOGETHER = 32


def load(dataset: str, split: str, most_packs: int, processor: Any) -> list[ImageBatch]:
    """The first packs of a dataset, so many together that a batch has about IMAGES_TOGETHER images."""
    size_px = processor.image_processor.crop_size["height"]
    chosen = list(itertools.islice(packs(dataset, split, size_px), most_packs))
    together = max(1, IMAGES_TOGETHER // IMAGES[dataset])
    return [make_batch(chosen[start : start + together], processor) for start in range(0, len(chosen), together)]


def evaluate(dataset: str, batches: Sequence[ImageBatch], readers: Mapping[str, Reader]) -> Iterator[Row]:
    """The rows of one dataset, reader after reader; the first reader is what the others are compared with."""
    talks = sum(len(rows.talks) for batch in batches for rows in batch.rows)
    dense: list[Tensor] = []
    with tqdm(total=talks * sum(len(reader.shares) for reader in readers.values()), unit="talk") as progress:
        for name, reader in readers.items():
            progress.set_description(f"{dataset}: {name}")
            for share, tally in _tallies(reader, batches, dense, progress).items():
                yield tally.row(dataset, IMAGES[dataset], share, name)


def _tallies(reader: Reader, batches: Sequence[ImageBatch], dense: list[Tensor], progress: tqdm) -> dict[float, Tally]:
    """What a reader does with each of its shares. `dense` gets the logits of the first reader, chunk after chunk."""
    tallies = {share: Tally() for share in reader.shares}
    chunk = itertools.count()
    with reader:
        for batch in batches:
            filled = reader.fill(batch)
            for rows in batch.rows:
                number = next(chunk)
                for share, tally in tallies.items():
                    outcome = reader.read(filled, rows, share)
                    if number == len(dense):
                        dense.append(outcome.logits)
                    tally.add(rows, outcome, dense[number])
                    progress.update(len(rows.talks))
    return tallies


def asked(batches: Sequence[ImageBatch]) -> Iterator[Asked]:
    """All turns of all conversations."""
    return (turn for batch in batches for rows in batch.rows for talk in rows.talks for turn in talk.turns)
