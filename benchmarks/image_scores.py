"""From what was read about images to a line of the table."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from benchmarks.image_questions import Rows
from benchmarks.image_readers import NOTHING, Outcome
from benchmarks.image_regions import RegionsRead


@dataclass(frozen=True)
class Row:
    """One reader on one set of questions.

    Attributes:
        dataset, images: the questions, and how many images they are about.
        read_share: of the image pages (or tokens), what was to be read exactly.
        router: or another reader.
        accuracy: share of the answers that are right to the last word, each word chosen after the right ones before.
        kl: of dense to this reader in nats, mean over the tokens of the answers, their ends included.
        top1: share of those tokens at which both would choose the same.
        page_recall: share of the selections, one a layer, KV head and word of an answer that is in one place, with a
            page that shows a part of the asked-about object; None where no pages were selected.
        region_read: the share of the object's patches that such a selection holds, mean.
        bytes_ratio: bytes read over those of a dense read, mean of all steps, question included.
        answers: how many.
        kind_accuracy: by kind of question; "second turn" is one of them.
    """

    dataset: str
    images: int
    read_share: float
    router: str
    accuracy: float
    kl: float
    page_recall: float | None
    region_read: float | None
    top1: float
    bytes_ratio: float
    answers: int
    kind_accuracy: dict[str, float]


@dataclass
class Tally:
    """Adds up outcomes of one reader."""

    right: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    kl: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    regions: RegionsRead = NOTHING
    bytes_read: float = 0.0
    bytes_dense: float = 0.0

    def add(self, rows: Rows, outcome: Outcome, dense: Tensor) -> None:
        """What came of `rows`, and the dense model's logits `[n, words]` for the same tokens."""
        for kind, is_right in right_turns(rows, outcome.logits.argmax(-1)):
            self.right[kind].append(is_right)
        expected, got = dense.log_softmax(-1), outcome.logits.log_softmax(-1)
        self.kl.append((expected.exp() * (expected - got)).sum(-1))
        self.agrees.append(dense.argmax(-1) == outcome.logits.argmax(-1))
        self.regions += outcome.regions
        self.bytes_read += outcome.bytes_read
        self.bytes_dense += outcome.bytes_dense

    def row(self, dataset: str, images: int, read_share: float, router: str) -> Row:
        """The line of the table. Raises ValueError if nothing was added."""
        if not self.right:
            raise ValueError(f"there must be answers to report, got none of {dataset}")
        regions, everything = self.regions, [flag for flags in self.right.values() for flag in flags]
        return Row(
            dataset=dataset,
            images=images,
            read_share=read_share,
            router=router,
            accuracy=_share(everything),
            kl=torch.cat(self.kl).mean().item(),
            page_recall=regions.hits / regions.selections if regions.selections else None,
            region_read=regions.shares / regions.selections if regions.selections else None,
            top1=torch.cat(self.agrees).float().mean().item(),
            bytes_ratio=self.bytes_read / self.bytes_dense,
            answers=len(everything),
            kind_accuracy={kind: _share(flags) for kind, flags in sorted(self.right.items())},
        )


def right_turns(rows: Rows, chosen: Tensor) -> list[tuple[str, bool]]:
    """Kind of every turn, and whether all `chosen [n]` tokens of its answer are the wanted ones."""
    is_right = torch.ones_like(rows.is_answer)
    is_right[rows.is_answer] = chosen == rows.wanted[rows.is_answer]
    return [
        (turn.kind, bool(flags[of_turn == number].all()))
        for talk, flags, of_turn in zip(rows.talks, is_right, rows.turn, strict=True)
        for number, turn in enumerate(talk.turns)
    ]


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)
