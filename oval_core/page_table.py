"""Token <-> page arithmetic of one row: plain integers, no tensors.

    tokens   0 ........ first ........ sealed_end ........ length
             padding    sealed pages                open tokens, always read exactly

Every layer of every row has its own table; the layer mirrors it in device tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

TEXT = -1  # tag of a page that belongs to no marked span


@dataclass(frozen=True)
class Span:
    """Tokens [start, stop) that share no page with their surroundings, and the tag their pages carry."""

    start: int
    stop: int
    tag: int


@dataclass
class PageTable:
    """Pages of one row.

    Args:
        page_size: most tokens a page holds.
        first: leading tokens that belong to no page (left padding).
    """

    page_size: int
    first: int = 0
    length: int = 0
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

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

    def extend(self, tokens: int) -> None:
        """Append `tokens` tokens to the open part."""
        if tokens < 0:
            raise ValueError(f"tokens must be >= 0, got {tokens}")
        self.length += tokens

    def mark(self, start: int, stop: int, tag: int) -> None:
        """Give tokens [start, stop) pages of their own that carry `tag`. Raises ValueError if already sealed."""
        if not self.sealed_end <= start < stop:
            raise ValueError(f"a span must lie after the sealed tokens ({self.sealed_end}), got [{start}, {stop})")
        overlap = [span for span in self.spans if span.start < stop and start < span.stop]
        if overlap:
            raise ValueError(f"span [{start}, {stop}) overlaps [{overlap[0].start}, {overlap[0].stop})")
        self.spans.append(Span(start, stop, tag))
        self.spans.sort(key=lambda span: span.start)

    def seal(self, limit: int | None = None) -> range:
        """Close every page that is full or ends at a border, up to token `limit` (default: all).

        Returns: the indices of the new pages.
        """
        limit = self.length if limit is None else min(limit, self.length)
        before = self.num_pages
        while (page := self._next_page()) is not None and page[0] + page[1] <= limit:
            start, length, tag = page
            self.starts.append(start)
            self.lengths.append(length)
            self.tags.append(tag)
        return range(before, self.num_pages)

    def _next_page(self) -> tuple[int, int, int] | None:
        """Start, length and tag of the page that comes next, or None while its last token is not there yet."""
        start = self.sealed_end
        tag, end = TEXT, start + self.page_size
        for span in self.spans:
            if span.start <= start < span.stop:
                tag, end = span.tag, min(end, span.stop)
            elif start < span.start:
                end = min(end, span.start)
        return (start, end - start, tag) if end <= self.length else None

    def crop(self, length: int) -> int:
        """Forget the tokens from `length` on; a page that loses a token is open again, a span ends with what is left.

        Returns: the number of sealed pages that are left.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        while self.starts and self.starts[-1] + self.lengths[-1] > length:
            del self.starts[-1], self.lengths[-1], self.tags[-1]
        self.length = length
        self.first = min(self.first, length)
        self.spans = [replace(span, stop=min(span.stop, length)) for span in self.spans if span.start < length]
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
        )
