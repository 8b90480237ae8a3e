"""Who decides where the pages of a prefilled text end: `OvalConfig(page_policy=...)`; without one all are full."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from oval_core.page_table import PageTable


@runtime_checkable
class PagePolicy(Protocol):
    """Cuts a stretch of prefilled tokens into pages. One object serves all layers; layers and rows are cut apart.

    It may have a method `check(page_size)`, too, that raises ValueError if it cannot do with pages of that size.
    """

    def lengths(self, keys: Tensor, page_size: int) -> Sequence[int]:
        """Tokens of each page, one page after the other.

        Args:
            keys: `[H, n, D]`, the keys of all KV heads, which share the page table; n >= 1, any float dtype.
            page_size: most tokens of a page.

        Returns: integers from 1 to `page_size` that add up to n.
        """
        ...


def check_page_policy(policy: Any, page_size: int) -> None:
    """Raise TypeError unless `policy` is a `PagePolicy` or None, and what its `check` raises, if it has one."""
    if policy is not None and (isinstance(policy, type) or not isinstance(policy, PagePolicy)):
        raise TypeError(
            f"page_policy must be None or have a method lengths(keys, page_size), got {policy!r} "
            f"({type(policy).__name__})"
        )
    check = getattr(policy, "check", None)
    if check is not None:
        check(page_size)


def page_ends(policy: PagePolicy, table: PageTable, keys: Tensor, limit: int) -> list[int]:
    """Where the pages of a row should end within its first `limit` tokens, marked spans left out.

    The last page before `limit` is not named: the tokens to come may belong to it.

    Args:
        keys: `[H, T, D]`, all keys of the row.

    Raises:
        ValueError: the policy's lengths are no partition into pages of 1 to `table.page_size` tokens.
    """
    ends = []
    for run in table.unmarked(limit):
        end = run.start
        for length in _checked(policy.lengths(keys[:, run.start : run.stop], table.page_size), run, table.page_size):
            end += length
            ends.append(end)
    return [end for end in ends if end < limit]


def _checked(lengths: Sequence[int], run: range, page_size: int) -> Sequence[int]:
    if sum(lengths) != len(run) or not all(1 <= length <= page_size for length in lengths):
        raise ValueError(
            f"page_policy must cut {len(run)} tokens into pages of 1 to {page_size}, got lengths {list(lengths)}"
        )
    return lengths
