"""Trees against lists of paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oval_spec import Tree
from oval_spec.tree import ROOT, check_paths, likely_paths
from tests.spec.drafts import token_path, trees

Path = tuple[int, ...]
few_tokens = trees(most=12, tokens=3)
loose_paths = st.lists(st.lists(st.integers(-1, 1), max_size=3).map(tuple), max_size=5)


def paths_of(tree: Tree) -> list[list[int]]:
    return [token_path(tree, node) for node in range(len(tree))]


@st.composite
def shapes(draw: st.DrawFn) -> list[Path]:
    """Paths that `check_paths` accepts."""
    paths: list[Path] = []
    for _ in range(draw(st.integers(0, 10))):
        path = (*draw(st.sampled_from([(), *paths])), draw(st.integers(0, 3)))
        if path not in paths:
            paths.append(path)
    return paths


@given(few_tokens)
def test_depths_and_paths(tree: Tree) -> None:
    assert [*tree.depths] == [len(path) for path in paths_of(tree)]
    for node in range(len(tree)):
        assert [tree.tokens[step] for step in tree.path(node)] == token_path(tree, node)
        assert tree.path(node)[-1] == node
    assert tree.path(ROOT) == []


@given(few_tokens, st.integers(-2, 6))
def test_down_to(tree: Tree, depth: int) -> None:
    assert paths_of(tree.down_to(depth)) == [path for path in paths_of(tree) if len(path) <= depth]


@given(few_tokens, st.integers(0, 13))
def test_truncated(tree: Tree, most: int) -> None:
    assert paths_of(tree.truncated(most)) == paths_of(tree)[:most]


@given(few_tokens)
def test_child(tree: Tree) -> None:
    for node, token in product(range(ROOT, len(tree)), range(4)):
        expected = [at for at in range(len(tree)) if (tree.parents[at], tree.tokens[at]) == (node, token)]
        assert tree.child(node, token) == (expected[0] if expected else None)


@given(few_tokens)
def test_a_chain_has_one_node_a_depth(tree: Tree) -> None:
    assert tree.is_chain == (sorted(tree.depths) == [*range(1, len(tree) + 1)])
    chain = Tree.chain(tree.tokens)
    assert chain.is_chain
    assert paths_of(chain) == [[*tree.tokens[: end + 1]] for end in range(len(tree))]


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ((1, 2), (-1,), "one parent a token, got 2 and 1"),
        ((1,), (0,), "parent of node 0 must be -1 or an earlier node, got 0"),
        ((1, 2), (-1, 2), "parent of node 1 .*got 2"),
        ((1,), (-2,), "parent of node 0 .*got -2"),
    ],
)
def test_a_missing_parent(tokens: Path, parents: Path, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tree(tokens, parents)


@given(shapes(), st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4))
def test_grow(paths: list[Path], candidates: list[list[int]]) -> None:
    def is_there(path: Path) -> bool:
        return len(path) <= len(candidates) and all(
            rank < len(there) for rank, there in zip(path, candidates, strict=False)
        )

    expected = [
        [there[rank] for rank, there in zip(path, candidates, strict=False)] for path in paths if is_there(path)
    ]
    assert paths_of(Tree.grow(paths, candidates)) == expected


@given(shapes())
def test_check_paths_accepts_shapes(paths: list[Path]) -> None:
    assert check_paths([list(path) for path in paths]) == tuple(paths)


@given(loose_paths)
def test_check_paths(paths: list[Path]) -> None:
    good = all(
        path and min(path) >= 0 and path not in paths[:at] and (len(path) == 1 or path[:-1] in paths[:at])
        for at, path in enumerate(paths)
    )
    if good:
        assert check_paths(paths) == tuple(paths)
    else:
        with pytest.raises(ValueError, match=r"ranks >= 0|there twice|needs its parent"):
            check_paths(paths)


@given(
    st.lists(st.lists(st.sampled_from((0.0, 0.1, 0.25, 0.5, 0.9, 1.0)), max_size=2), max_size=2),
    st.integers(1, 7),
)
def test_likely_paths_are_the_best_there_are(accuracies: list[list[float]], nodes: int) -> None:
    every = [
        path
        for depth in range(1, len(accuracies) + 1)
        for path in product(*(range(len(s)) for s in accuracies[:depth]))
    ]

    def expected_tokens(paths: Sequence[Path]) -> float:
        return sum(prod(accuracies[at][rank] for at, rank in enumerate(path)) for path in paths)

    found = likely_paths(accuracies, nodes)
    shapes = [
        some
        for some in combinations(every, min(nodes, len(every)))
        if all(len(path) == 1 or path[:-1] in some for path in some)
    ]
    assert check_paths(found) == found
    assert len(found) == min(nodes, len(every))
    assert expected_tokens(found) == pytest.approx(max(map(expected_tokens, shapes)))


def test_likely_paths_come_in_order() -> None:
    assert likely_paths([[0.5, 0.4], [0.9, 0.05]], 5) == ((0,), (0, 0), (1,), (1, 0), (0, 1))


@pytest.mark.parametrize("nodes", [0, -1])
def test_a_tree_without_nodes(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"nodes must be >= 1, got {nodes}"):
        likely_paths([[0.5]], nodes)


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_accuracies_are_shares(share: float) -> None:
    with pytest.raises(ValueError, match=r"accuracies must be in \[0, 1\]"):
        likely_paths([[0.5], [share]], 3)
