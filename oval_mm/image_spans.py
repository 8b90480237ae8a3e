"""Where the tokens of each picture lie in a prompt, and how they become pages.

    prompt    text  I I I I I I I I  text ...      I: image token, one a feature of the vision tower
    pictures        [  0  ][  1  ]                 side by side: only the counts tell them apart

A picture has one part or more: LLaVA-1.5's patches are one, LLaVA-NeXT has an overview and then tiles, Idefics3 has
marker tokens between its tiles. Every part is a span of its own, and spans share no page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product, repeat

import torch
from torch import Tensor

SETTINGS = ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy")


@dataclass(frozen=True)
class Part:
    """Image tokens of one picture with no text between them.

    Args:
        tokens: how many; None: all that stand together.
        rows, columns: the patch grid that the tokens fill, row after row; None: not known.
    """

    tokens: int | None = None
    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"a part of a picture has at least 1 token, got {self.tokens}")
        if (self.rows or self.columns) and self.tokens != (self.rows or 0) * (self.columns or 0):
            raise ValueError(f"a grid of {self.rows} x {self.columns} patches does not have {self.tokens} tokens")


@dataclass(frozen=True)
class Picture:
    """What a prompt holds of one picture: `Picture((Part(),) * n)` is n runs of image tokens, however long."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class ImageSpan:
    """Tokens [start, stop) of a row, left padding counted, that show (a part of) picture `image` of that row."""

    image: int
    start: int
    stop: int
    rows: int | None = None
    columns: int | None = None


def find_spans(
    input_ids: Tensor,
    image_token_id: int,
    pictures: int | Picture | Sequence[int | Picture] | None = None,
    attention_mask: Tensor | None = None,
    settings: Sequence[str] = SETTINGS,
    goes_on: bool = False,
) -> list[list[ImageSpan]]:
    """The spans of each row, first to last.

    Args:
        input_ids: integers `[B, T]`.
        image_token_id: the token that stands for one image feature.
        pictures: image tokens of every picture, or what each picture of the batch has, in the order of the prompts.
            None: pictures are what text separates.
        attention_mask: `[B, T]`, 0 for padding.
        settings: of the processor, to name in errors.
        goes_on: only the beginning of the prompts is there yet: what misses at their end is no error, and the span of
            a part that is cut ends where the part will end.

    Raises:
        ValueError: the image tokens are not those of whole pictures, or not of all of them.
    """
    shapes = [tuple(tensor.shape) for tensor in (input_ids, attention_mask) if tensor is not None]
    if len(shapes[0]) != 2 or shapes[-1] != shapes[0]:
        raise ValueError(f"input_ids and attention_mask must be [B, T], got shapes {shapes}")
    is_image = input_ids == image_token_id
    if attention_mask is not None:
        is_image = is_image & attention_mask.bool()
    queue: Iterator[tuple[Part, ...]]
    if pictures is None or isinstance(pictures, int | Picture):
        queue, total = repeat(_parts(pictures)), None
    else:
        queue, total = iter([_parts(picture) for picture in pictures]), len(pictures)
    end = is_image.shape[1] if goes_on else None
    try:
        spans = [_fill(row, _runs(flags), queue, end) for row, flags in enumerate(is_image)]
        left = 0 if total is None or goes_on else len(list(queue))
        if total is not None and left:
            raise _misfit(f"image tokens for {total} pictures", f"some for {total - left}")
    except ValueError as error:
        raise ValueError(f"{error}. {_advice(settings)}") from None
    return spans


def _parts(picture: int | Picture | None) -> tuple[Part, ...]:
    return picture.parts if isinstance(picture, Picture) else (Part(None if picture is None else int(picture)),)


def _runs(flags: Tensor) -> list[range]:
    """Where `flags [T]` is True without a gap."""
    edges = torch.nn.functional.pad(flags.int(), (1, 1)).diff()
    starts, stops = (edges == 1).nonzero().flatten().tolist(), (edges == -1).nonzero().flatten().tolist()
    return [range(start, stop) for start, stop in zip(starts, stops, strict=True)]


def _fill(row: int, runs: list[range], queue: Iterator[tuple[Part, ...]], open_end: int | None) -> list[ImageSpan]:
    """Lay the next pictures of the queue into the runs of a row, whole ones only, except at `open_end`."""
    spans: list[ImageSpan] = []
    image, parts = -1, list[Part]()
    for start, end in ((run.start, run.stop) for run in runs):
        while start < end:
            have = f"{end - start} image tokens at token {start}"
            if not parts:
                image, parts = image + 1, list(next(queue, ()))
            if not parts:
                raise _misfit(f"no more than {image} pictures in row {row}", have)
            part = parts.pop(0)
            stop = end if part.tokens is None else start + part.tokens
            if stop > end and end != open_end:
                raise _misfit(f"{part.tokens} image tokens for picture {image} of row {row}", have)
            spans.append(ImageSpan(image, start, stop, part.rows, part.columns))
            start = stop
    if parts and open_end is None:
        raise _misfit(f"{len(parts)} more runs of image tokens for picture {image} of row {row}", "none")
    return spans


def _misfit(expected: str, got: str) -> ValueError:
    return ValueError(f"expected {expected}, got {got}")


def _advice(settings: Sequence[str]) -> str:
    names = [f"`{name}`" for name in settings]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    return (
        "The processor decides how many image tokens a picture gets: "
        f"its {listed} must fit the model, and every picture of the prompts must be given, once"
    )


@cache
def blocks_of(rows: int, columns: int, block: int) -> tuple[tuple[int, ...], ...]:
    """The patches of a grid, block by block: the numbers from 0 to `rows * columns - 1`, each once.

    Args:
        rows, columns: of the grid; its tokens stand row after row.
        block: side of the square blocks; those at the lower and right border are cut to what is there.
    """
    if min(rows, columns, block) < 1:
        raise ValueError(f"rows, columns and block must be >= 1, got {rows}, {columns}, {block}")
    return tuple(
        tuple(row * columns + column for row, column in product(down, across))
        for down, across in product(_slices(rows, block), _slices(columns, block))
    )


def _slices(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


Mark = tuple[int, int, int, int, tuple[tuple[int, ...], ...]]


def marks(spans: Sequence[Sequence[ImageSpan]], block: int | None = None) -> Iterator[Mark]:
    """Row, start, stop, tag and blocks of what to mark: `for mark in marks(spans): layer.mark(*mark)`.

    Args:
        spans: of each row, see `find_spans`; the tag is the number of the picture in its row.
        block: side of the square blocks that are the pages of spans with a grid; None: all pages are runs.
    """
    for row, row_spans in enumerate(spans):
        for span in row_spans:
            grid = (span.rows, span.columns)
            blocks = () if block is None or None in grid else blocks_of(*grid, block)
            yield row, span.start, span.stop, span.image, blocks
