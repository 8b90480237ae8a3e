"""`PageTable` against a model that walks token by token."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oval_core.page_table import TEXT, PageTable, Span

few = st.integers(0, 40)


class PageTableMachine(RuleBasedStateMachine):
    """Pages are lists of tokens here: no arithmetic to get wrong."""

    @initialize(page_size=st.sampled_from((2, 8)))
    def begin(self, page_size: int) -> None:
        self.table = PageTable(page_size)
        self.first = self.length = 0
        self.pages: list[list[int]] = []
        self.spans: dict[range, int] = {}

    @property
    def sealed_end(self) -> int:
        return self.pages[-1][-1] + 1 if self.pages else min(self.first, self.length)

    def tag(self, token: int) -> int:
        return next((tag for span, tag in self.spans.items() if token in span), TEXT)

    @rule(tokens=few)
    def extend(self, tokens: int) -> None:
        self.table.extend(tokens)
        self.length += tokens

    @rule(limit=st.one_of(st.none(), st.integers(0, 200)))
    def seal(self, limit: int | None) -> None:
        before, page = len(self.pages), []
        for token in range(self.sealed_end, self.length if limit is None else min(limit, self.length)):
            page.append(token)
            is_border = any(token + 1 in (span.start, span.stop) for span in self.spans)
            if len(page) == self.table.page_size or is_border:
                self.pages.append(page)
                page = []
        assert self.table.seal(limit) == range(before, len(self.pages))

    @rule(data=st.data())
    def crop(self, data: st.DataObject) -> None:
        self.length = data.draw(st.integers(0, self.length))
        self.first = min(self.first, self.length)
        self.pages = [page for page in self.pages if page[-1] < self.length]
        kept = {span: tag for span, tag in self.spans.items() if span.start < self.length}
        self.spans = {range(span.start, min(span.stop, self.length)): tag for span, tag in kept.items()}
        assert self.table.crop(self.length) == len(self.pages)

    @precondition(lambda self: not self.pages)
    @rule(tokens=st.integers(0, 20))
    def skip(self, tokens: int) -> None:
        self.table.skip(tokens)
        self.first = tokens

    @rule(gap=st.integers(0, 20), tokens=st.integers(1, 20), tag=st.integers(0, 3))
    def mark(self, gap: int, tokens: int, tag: int) -> None:
        span = range(self.sealed_end + gap, self.sealed_end + gap + tokens)
        if any(set(span) & set(other) for other in self.spans):
            with pytest.raises(ValueError, match="overlaps"):
                self.table.mark(span.start, span.stop, tag)
            return
        self.table.mark(span.start, span.stop, tag)
        self.spans[span] = tag

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
