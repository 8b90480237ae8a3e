"""Token <-> page arithmetic of one row: plain integers, no tensors.

    tokens   0 ........ first ........ sealed_end ........ length
             padding    sealed pages                open tokens, always read exactly

Every layer of every row has its own table; the layer mirrors it in device tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain

from oval_core.row_memory import RowMemory

TEXT = -1  # tag of a page that belongs to no marked span


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) that share no page with their surroundings, and the tag their pages carry.

    Args:
        blocks: the tokens of each page as offsets from `start`, for pages whose tokens do not follow one another. All
            pages of such a span are sealed at once, and the storage holds the tokens in this order then. (): runs.
    """

    start: int
    stop: int
    tag: int
    blocks: tuple[tuple[int, ...], ...] = ()

    @property
    def order(self) -> tuple[int, ...]:
        """Offsets of the tokens in the order in which `blocks` are stored."""
        return tuple(chain.from_iterable(self.blocks))


@dataclass
class PageTable:
    """Pages of one row.

    Args:
        page_size: most tokens a page holds.
        first: leading tokens that belong to no page (left padding).
        memory: what routers remember of the row; forgets what came after a token that is cropped.
    """

    page_size: int
    first: int = 0
    length: int = 0
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    memory: RowMemory = field(default_factory=RowMemory, repr=False, compare=False)

    @property
    def num_pages(self) -> int:
        """Sealed pages."""
        return len(self.starts)

    @property
    def sealed_end(self) -> int:
        """First token that is in no sealed page."""
        return self.starts[-1] + self.lengths[-1] if self.starts else min(self.first, self.length)

    @property
    def open_tokens(self) -> int:
        """Tokens after the sealed pages."""
        return self.length - self.sealed_end

    def skip(self, tokens: int) -> None:
        """Leave the first `tokens` tokens (left padding) out of every page. Raises ValueError once pages exist."""
        if self.starts:
            raise ValueError(f"padding must be known before pages are sealed; there are {self.num_pages} pages")
        if tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {tokens}")
        self.first = tokens
        self.spans = [replace(span, blocks=()) if span.start < tokens else span for span in self.spans]

    def extend(self, tokens: int) -> None:
        """Append `tokens` tokens to the open part."""
        if tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {tokens}")
        self.length += tokens

    def mark(self, start: int, stop: int, tag: int, blocks: Sequence[Sequence[int]] = ()) -> None:
        """Give tokens [start, stop) pages of their own that carry `tag`.

        Args:
            blocks: see `Span`; of no effect on padding.

        Raises:
            ValueError: already sealed, marked before, or `blocks` are not pages that hold every token once.
        """
        if not self.sealed_end <= start < stop:
            raise ValueError(f"a span must lie after the sealed tokens ({self.sealed_end}), got [{start}, {stop})")
        overlap = [span for span in self.spans if span.start < stop and start < span.stop]
        if overlap:
            raise ValueError(f"span [{start}, {stop}) overlaps [{overlap[0].start}, {overlap[0].stop})")
        span = Span(start, stop, tag, tuple(map(tuple, blocks)))
        if blocks and sorted(span.order) != [*range(stop - start)]:
            raise ValueError(f"blocks must hold each of the offsets 0 to {stop - start - 1} once, got {span.blocks}")
        if blocks and not all(1 <= len(block) <= self.page_size for block in blocks):
            sizes = sorted({len(block) for block in blocks})
            raise ValueError(f"a block must have 1 to page_size = {self.page_size} tokens, got blocks of {sizes}")
        self.spans.append(span if start >= self.first else replace(span, blocks=()))
        self.spans.sort(key=lambda span: span.start)

    def unmarked(self, limit: int) -> list[range]:
        """The runs of tokens that are neither sealed nor marked, up to token `limit`."""
        limit, start, runs = min(limit, self.length), self.sealed_end, []
        for span in self.spans:
            runs.append(range(start, min(span.start, limit)))
            start = max(start, span.stop)
        return [run for run in (*runs, range(start, limit)) if run]

    def seal(self, limit: int | None = None, ends: Sequence[int] = ()) -> range:
        """Close every page that is full or ends at a border, up to token `limit` (default: all).

        Args:
            ends: ascending tokens at which pages end too; of no effect inside marked spans.

        Returns: the indices of the new pages.
        """
        limit = self.length if limit is None else min(limit, self.length)
        before = self.num_pages
        while (page := self._next_page(limit, ends)) is not None:
            start, length, tag = page
            self.starts.append(start)
            self.lengths.append(length)
            self.tags.append(tag)
        return range(before, self.num_pages)

    def _next_page(self, limit: int, ends: Sequence[int]) -> tuple[int, int, int] | None:
        """Start, length and tag of the page that comes next, or None if it does not end within `limit` tokens."""
        start = self.sealed_end
        tag, full = TEXT, start + self.page_size
        after = bisect_right(ends, start)
        end = min(full, ends[after]) if after < len(ends) else full
        for span in self.spans:
            if span.start <= start < span.stop and span.blocks:
                starts = accumulate(map(len, span.blocks), initial=span.start)
                length = len(span.blocks[[*starts].index(start)])
                return (start, length, span.tag) if span.stop <= limit else None
            if span.start <= start < span.stop:
                tag, end = span.tag, min(full, span.stop)
            elif start < span.start:
                end = min(end, span.start)
        return (start, end - start, tag) if end <= limit else None

    def due(self, limit: int) -> list[Span]:
        """Spans with blocks that `seal(limit)` will seal."""
        limit = min(limit, self.length)
        return [span for span in self.spans if span.blocks and self.sealed_end <= span.start and span.stop <= limit]

    def reopen(self, token: int) -> list[Span]:
        """Open all pages from the first span on that is sealed in blocks and ends after `token`.

        Returns: the spans with blocks that are no longer sealed; their tokens must be stored in order again.
        """
        sealed = [span for span in self.spans if span.blocks and token < span.stop <= self.sealed_end]
        if sealed:
            self._open(sealed[0].start)
        return sealed

    def unblock(self, token: int) -> None:
        """Let the span that holds `token` have runs as pages. Raises ValueError if it is sealed, see `reopen`."""
        for at, span in enumerate(self.spans):
            if span.start <= token < span.stop and span.blocks:
                if span.start < self.sealed_end:
                    raise ValueError(f"the blocks of span [{span.start}, {span.stop}) are sealed; reopen them first")
                self.spans[at] = replace(span, blocks=())

    def positions(self, page: int) -> list[int]:
        """Positions of the tokens of a sealed page; they follow one another but in spans with blocks."""
        start, tokens = self.starts[page], range(self.starts[page], self.starts[page] + self.lengths[page])
        span = next((span for span in self.spans if span.blocks and span.start <= start < span.stop), None)
        return [*tokens] if span is None else [span.start + span.order[token - span.start] for token in tokens]

    def _open(self, token: int) -> None:
        """Open the pages that hold a token from `token` on; who read them came later."""
        self.memory.crop(token)
        while self.starts and self.starts[-1] + self.lengths[-1] > token:
            del self.starts[-1], self.lengths[-1], self.tags[-1]

    def crop(self, length: int) -> int:
        """Forget the tokens from `length` on; a page that loses a token is open again, a span ends with what is left.

        A span that is sealed in blocks and loses a token is open again and has no blocks; `reopen` tells beforehand.

        Returns: the number of sealed pages that are left.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        self.reopen(length)
        self._open(length)
        self.length = length
        self.first = min(self.first, length)
        left = [span for span in self.spans if span.start < length]
        self.spans = [replace(span, stop=length, blocks=()) if span.stop > length else span for span in left]
        return self.num_pages

    def copy(self) -> PageTable:
        """An independent table with the same pages."""
        return PageTable(
            self.page_size,
            self.first,
            self.length,
            self.starts.copy(),
            self.lengths.copy(),
            self.tags.copy(),
            self.spans.copy(),
            self.memory.copy(),
        )
