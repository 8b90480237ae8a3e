"""`PageTable` against a model that walks token by token."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oval_core.page_table import TEXT, PageTable, Span

few = st.integers(0, 40)
Blocks = tuple[tuple[int, ...], ...]


@st.composite
def blocks_of(draw: st.DrawFn, tokens: int, page_size: int) -> Blocks:
    """Every offset once, in pages of any length."""
    order = draw(st.permutations(range(tokens)))
    blocks: list[tuple[int, ...]] = []
    while order:
        length = draw(st.integers(1, page_size))
        blocks.append(tuple(order[:length]))
        order = order[length:]
    return tuple(blocks)


class PageTableMachine(RuleBasedStateMachine):
    """Pages are lists of tokens here, `places` of the storage and `positions`: no arithmetic to get wrong."""

    @initialize(page_size=st.sampled_from((2, 8)))
    def begin(self, page_size: int) -> None:
        self.table = PageTable(page_size)
        self.first = self.length = 0
        self.pages: list[list[int]] = []
        self.positions: list[list[int]] = []
        self.spans: dict[range, tuple[int, Blocks]] = {}

    @property
    def sealed_end(self) -> int:
        return self.pages[-1][-1] + 1 if self.pages else min(self.first, self.length)

    def tag(self, token: int) -> int:
        return next((tag for span, (tag, _) in self.spans.items() if token in span), TEXT)

    def blocked(self, is_sealed: bool) -> list[range]:
        return [span for span, (_, blocks) in self.spans.items() if blocks and (span[0] < self.sealed_end) == is_sealed]

    def open_from(self, token: int) -> None:
        self.pages = [page for page in self.pages if page[-1] < token]
        del self.positions[len(self.pages) :]

    def add_page(self, places: list[int], positions: list[int]) -> None:
        self.pages.append(places)
        self.positions.append(positions)

    @rule(tokens=few)
    def extend(self, tokens: int) -> None:
        self.table.extend(tokens)
        self.length += tokens

    @rule(limit=st.one_of(st.none(), st.integers(0, 200)))
    def seal(self, limit: int | None) -> None:
        before, page = len(self.pages), []
        token, end = self.sealed_end, self.length if limit is None else min(limit, self.length)
        due = [span for span in self.blocked(is_sealed=False) if span.stop <= end]
        assert self.table.due(end) == [Span(span.start, span.stop, *self.spans[span]) for span in sorted(due, key=min)]
        while token < end:
            span, (_, blocks) = next(((s, v) for s, v in self.spans.items() if token == s[0]), (range(0), (TEXT, ())))
            if blocks and span.stop > end:
                break
            for block in blocks:
                self.add_page([*range(token, token + len(block))], [span.start + offset for offset in block])
                token += len(block)
            if blocks:
                continue
            page.append(token)
            token += 1
            is_border = any(token in (span.start, span.stop) for span in self.spans)
            if len(page) == self.table.page_size or is_border:
                self.add_page(page, page)
                page = []
        assert self.table.seal(limit) == range(before, len(self.pages))

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        self.length = data.draw(st.integers(0, self.length))
        self.first = min(self.first, self.length)
        cut = [span.start for span in self.blocked(is_sealed=True) if span.stop > self.length]
        self.open_from(min([self.length, *cut]))
        kept = {span: value for span, value in self.spans.items() if span.start < self.length}
        self.spans = {
            range(span.start, min(span.stop, self.length)): (tag, blocks if span.stop <= self.length else ())
            for span, (tag, blocks) in kept.items()
        }
        assert self.table.crop(self.length) == len(self.pages)

    @rule(token=st.integers(0, 100))
    def reopen(self, token: int) -> None:
        opened = sorted((span for span in self.blocked(is_sealed=True) if span.stop > token), key=min)
        self.open_from(min((span.start for span in opened), default=self.length))
        assert self.table.reopen(token) == [Span(span.start, span.stop, *self.spans[span]) for span in opened]

    @rule(token=st.integers(0, 100))
    def unblock(self, token: int) -> None:
        if any(token in span for span in self.blocked(is_sealed=True)):
            with pytest.raises(ValueError, match="are sealed; reopen them first"):
                self.table.unblock(token)
            return
        self.table.unblock(token)
        self.spans = {span: (tag, () if token in span else blocks) for span, (tag, blocks) in self.spans.items()}

    @precondition(lambda self: not self.pages)
    @rule(tokens=st.integers(0, 20))
    def skip(self, tokens: int) -> None:
        self.table.skip(tokens)
        self.first = tokens
        self.spans = {span: (tag, () if span[0] < tokens else blocks) for span, (tag, blocks) in self.spans.items()}

    @rule(gap=st.integers(0, 20), tokens=st.integers(1, 20), tag=st.integers(0, 3), cuts=st.booleans(), data=st.data())
    def mark(self, gap: int, tokens: int, tag: int, cuts: bool, data: st.DataObject) -> None:
        blocks: Blocks = data.draw(blocks_of(tokens, self.table.page_size)) if cuts else ()
        span = range(self.sealed_end + gap, self.sealed_end + gap + tokens)
        if any(set(span) & set(other) for other in self.spans):
            with pytest.raises(ValueError, match="overlaps"):
                self.table.mark(span.start, span.stop, tag, blocks)
            return
        self.table.mark(span.start, span.stop, tag, blocks)
        self.spans[span] = (tag, blocks if span.start >= self.first else ())

    @rule()
    def go_on_with_a_copy(self) -> None:
        old, self.table = self.table, self.table.copy()
        assert old == self.table
        old.extend(99)
        old.mark(old.sealed_end + 500, old.sealed_end + 501, 7)
        old.seal()

    @invariant()
    def same_pages(self) -> None:
        table = self.table
        assert (table.length, table.first, table.sealed_end) == (self.length, self.first, self.sealed_end)
        assert table.open_tokens == self.length - self.sealed_end
        assert [[*range(a, a + n)] for a, n in zip(table.starts, table.lengths, strict=True)] == self.pages
        assert [{self.tag(token) for token in page} for page in self.pages] == [{tag} for tag in table.tags]
        assert [table.positions(page) for page in range(table.num_pages)] == self.positions

    @invariant()
    def a_fresh_table_would_have_the_same_pages(self) -> None:
        table = self.table
        fresh = PageTable(table.page_size, table.first, table.length, spans=table.spans.copy())
        fresh.seal(table.sealed_end)
        assert fresh == table


PageTableMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestPageTable = PageTableMachine.TestCase


def test_a_span_has_pages_of_its_own() -> None:
    table = PageTable(8, length=40)
    table.mark(10, 29, tag=3)
    table.seal()
    assert (table.starts, table.lengths, table.tags) == (
        [0, 8, 10, 18, 26, 29],
        [8, 2, 8, 8, 3, 8],
        [TEXT, TEXT, 3, 3, 3, TEXT],
    )
    assert table.open_tokens == 3


def test_pages_of_a_span_with_blocks_are_sealed_at_once() -> None:
    table = PageTable(4, length=11)
    table.mark(3, 9, tag=5, blocks=[[0, 3, 4], [5], [1, 2]])
    assert table.seal(limit=8) == range(0, 1)
    assert table.seal(limit=9) == range(1, 4)
    assert (table.starts, table.lengths, table.tags) == ([0, 3, 6, 7], [3, 3, 1, 2], [TEXT, 5, 5, 5])
    assert [table.positions(page) for page in range(4)] == [[0, 1, 2], [3, 6, 7], [8], [4, 5]]
    assert table.copy().crop(9) == 4
    assert table.crop(8) == 1
    assert table.spans == [Span(3, 8, 5)]
    table.seal()
    assert (table.starts, table.lengths) == ([0, 3, 7], [3, 4, 1])


def test_padding_shifts_the_pages() -> None:
    table = PageTable(8, length=20)
    table.skip(5)
    table.seal()
    assert (table.starts, table.sealed_end) == ([5], 13)


def test_the_limit_holds_tokens_back() -> None:
    table = PageTable(8, length=24)
    assert table.seal(limit=15) == range(0, 1)
    assert table.seal(limit=16) == range(1, 2)
    assert table.seal() == range(2, 3)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        ("skip", (1,), r"padding must be known before pages are sealed; there are 2 pages"),
        ("extend", (-1,), r"tokens must be >= 0, got -1"),
        ("crop", (21,), r"length must be in \[0, 20\], got 21"),
        ("crop", (-1,), r"length must be in \[0, 20\], got -1"),
        ("mark", (15, 18, 0), r"after the sealed tokens \(16\), got \[15, 18\)"),
        ("mark", (18, 18, 0), r"a span must lie after .*, got \[18, 18\)"),
        ("mark", (29, 31, 0), r"span \[29, 31\) overlaps \[30, 33\)"),
        ("mark", (18, 20, 0, [[0], [0]]), r"each of the offsets 0 to 1 once, got \(\(0,\), \(0,\)\)"),
        ("mark", (18, 20, 0, [[0, 1, 2]]), r"each of the offsets 0 to 1 once, got"),
        ("mark", (18, 20, 0, [[]]), r"each of the offsets 0 to 1 once, got"),
        ("mark", (18, 20, 0, [[1, 0], []]), r"1 to page_size = 8 tokens, got blocks of \[0, 2\]"),
        ("mark", (18, 28, 0, [[9, *range(9)]]), r"1 to page_size = 8 tokens, got blocks of \[10\]"),
    ],
)
def test_errors_change_nothing(call: str, arguments: tuple[Any, ...], message: str) -> None:
    table = PageTable(8, length=20, spans=[Span(30, 33, 1)])
    table.seal()
    before = table.copy()
    with pytest.raises(ValueError, match=message):
        getattr(table, call)(*arguments)
    assert table == before


def test_negative_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens must be >= 0, got -1"):
        PageTable(8).skip(-1)
