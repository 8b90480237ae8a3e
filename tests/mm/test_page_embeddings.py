import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oval_core.page_table import PageTable
from oval_mm.image_spans import ImageSpan
from oval_mm.page_embeddings import (
    ConceptEmbedding,
    MeanKeyEmbedding,
    PageEmbedding,
    PictureTag,
    PlaceEmbedding,
    Shown,
    shown_pictures,
)
from tests.mm.tiny_concepts import random_space

GRID = torch.arange(12.0)[:, None].expand(-1, 2)  # a picture whose token i is (i, i)
BLOCKS = ((0, 1, 4, 5), (2, 3, 6, 7), (8, 9), (10, 11))  # of 3 x 4 patches


class Kept(PageEmbedding):
    """What was kept of the tokens, as it is."""

    size = 2


def filled(*marks: tuple[int, int, PictureTag, Any], length: int = 40, page_size: int = 4) -> PageTable:
    table = PageTable(page_size)
    table.extend(length)
    for mark in marks:
        table.mark(*mark)
    table.seal()
    return table


def embedded(*tables: PageTable, by: PageEmbedding | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings `[B, P, E]` and which pages have one."""
    pages: Any = SimpleNamespace(tables=tables, starts=torch.zeros(len(tables), max(one.num_pages for one in tables)))
    embeddings, known = (by or Kept()).of_pages(pages)
    return embeddings[:, 0], known


def test_where_pictures_are_shown() -> None:
    """Rows of two, no and one pictures; the first picture has two parts with text between them."""
    spans = [[ImageSpan(0, 2, 5), ImageSpan(0, 7, 9), ImageSpan(1, 9, 12)], [], [ImageSpan(0, 4, 6)]]
    pictures = [torch.rand(5, 2), torch.rand(3, 2)]
    shown = shown_pictures(spans, pictures, start=10)
    assert {place: (one.first, one.start) for place, one in shown.items()} == {
        **{(0, 2): (0, 12), (0, 7): (3, 17), (0, 9): (0, 19)},
        (2, 4): (0, 14),
    }
    assert [one.embedding for one in shown.values()] == [pictures[0], pictures[0], pictures[1], None]


def test_pages_are_means_of_their_tokens() -> None:
    tag = PictureTag(0, Shown(GRID, first=2, start=6))
    embeddings, known = embedded(filled((6, 16, tag, ())))
    assert known.tolist() == [[False, False, True, True, True, *[False] * 6]]
    assert embeddings[0, :, 0].tolist() == [0, 0, 3.5, 7.5, 10.5, *[0.0] * 6]


def test_pages_in_blocks_are_means_of_their_tokens() -> None:
    tag = PictureTag(0, Shown(GRID, first=0, start=4))
    embeddings, known = embedded(filled((4, 16, tag, BLOCKS)))
    assert embeddings[0, :, 0].tolist()[1:5] == [2.5, 4.5, 8.5, 10.5]
    assert int(known.sum()) == 4


def test_a_picture_that_is_not_there_yet_or_not_known_has_none() -> None:
    tag = PictureTag(0, Shown(GRID, first=0, start=4))
    embeddings, known = embedded(filled((4, 16, tag, ()), length=13))
    assert embeddings[0, :, 0].tolist() == [0, 1.5, 5.5]
    unknown = PictureTag(1, Shown(None, first=0, start=4))
    assert not embedded(filled((4, 16, unknown, ())))[1].any()
    plain: Any = 0
    assert not embedded(filled((4, 16, plain, ())))[1].any()
    assert known.tolist() == [[False, True, True]]


def test_rows_have_their_own_pictures() -> None:
    first = filled((4, 16, PictureTag(0, Shown(GRID, 0, 4)), ()))
    second = filled((20, 32, PictureTag(0, Shown(-GRID, 0, 20)), ()), length=34)
    embeddings, known = embedded(first, second)
    assert embeddings[:, :, 0].tolist() == [[0, 1.5, 5.5, 9.5, *[0] * 6], [*[0] * 5, -1.5, -5.5, -9.5, 0, 0]]
    assert known.sum(-1).tolist() == [3, 3]


def test_tags_stay_with_their_pages() -> None:
    tag = PictureTag(3, Shown(GRID, first=0, start=4))
    table = filled((4, 16, tag, BLOCKS))
    before = embedded(table)[0][0, 1:5]
    for kept in (table.copy(), copy.deepcopy(table), copy.copy(table)):
        assert kept.tags[1] == 3
        assert kept.spans[0].tag.shown is tag.shown  # type: ignore[attr-defined]
        assert torch.equal(embedded(kept)[0][0, 1:5], before)
    table.unblock(99)  # no span there
    table.crop(12)  # the picture loses its last row, and its blocks
    table.extend(10)
    table.seal()
    assert embedded(table)[0][0, :5, 0].tolist() == [0, 1.5, 5.5, 0, 0]
    loaded = pickle.loads(pickle.dumps(tag))
    assert (loaded, type(loaded)) == (3, PictureTag)
    assert torch.equal(loaded.shown.embedding, GRID)


def test_means_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Shown(GRID, first=0, start=4)
    tables = [filled((4, 16, PictureTag(0, shown), ())) for _ in range(3)]
    asked, positions = list[int](), PageTable.positions

    def noted(table: PageTable, page: int) -> list[int]:
        asked.append(page)
        return positions(table, page)

    monkeypatch.setattr(PageTable, "positions", noted)
    for table in tables:
        embedded(table)
    assert asked == [1, 2, 3]


@pytest.mark.parametrize(("leading", "has_one"), [(0, True), (1, True), (2, False), (-1, False)])
def test_patches_are_tokens_one_for_one(leading: int, has_one: bool) -> None:
    """One more state than tokens: the class token, which is dropped."""
    embedding = ConceptEmbedding(random_space())
    states = torch.randn(2, 9 + leading, 32)
    made = embedding.of_pictures([torch.zeros(9, 5), torch.zeros(9, 5)], states)
    assert [one is not None for one in made] == [has_one] * 2
    if has_one:
        assert made[1] is not None
        torch.testing.assert_close(made[1], embedding.space.describe(states[1, leading:]))


def test_towers_that_are_not_understood_give_nothing() -> None:
    embedding, features = ConceptEmbedding(random_space()), [torch.zeros(9, 5)] * 2
    for states in (None, torch.zeros(3, 9, 32), torch.zeros(18, 32), torch.zeros(2, 9, 31), (torch.zeros(2, 9, 32),)):
        assert embedding.of_pictures(features, states) == [None, None]


def test_places_tell_nothing_of_what_is_shown() -> None:
    embedding = PlaceEmbedding()
    made = embedding.of_pictures([torch.randn(12, 5), torch.randn(12, 5), torch.randn(7, 5)], None)
    assert made[0] is not None
    assert torch.equal(made[0], torch.as_tensor(made[1]))
    assert torch.as_tensor(made[2]).shape == (7, 16)
    first, second = (PictureTag(number, Shown(made[number], 0, 12 * number)) for number in (0, 1))
    (pages,), known = embedded(filled((0, 12, first, ()), (12, 24, second, ()), length=24), by=embedding)
    assert known.all()
    assert pages.shape == (6, embedding.size)
    assert torch.pdist(pages).min() > 0.1  # no two pages have the same place


def test_mean_keys() -> None:
    centroid = torch.randint(-9, 9, (2, 3, 4, 5), dtype=torch.int8)
    basis = SimpleNamespace(centroid=centroid, centroid_scale=torch.rand(2, 3, 4))
    tags, counts = torch.tensor([[-1, 0, 1, 1], [0, 0, 0, -1]]), torch.tensor([4, 2])
    pages: Any = SimpleNamespace(basis=basis, tags=tags, counts=counts, index=torch.arange(4))
    embeddings, known = MeanKeyEmbedding(5).of_pages(pages)
    assert known.tolist() == [[False, True, True, True], [True, True, False, False]]
    torch.testing.assert_close(embeddings[1, 2, 3], centroid[1, 2, 3] * basis.centroid_scale[1, 2, 3])
