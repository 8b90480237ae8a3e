"""Draft tokens as a tree below the newest token of a row: plain integers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

ROOT = -1  # the newest token, which every draft goes on from


@dataclass(frozen=True)
class Tree:
    """Candidates for what follows the root; siblings compete, a path from the root is one continuation.

    Args:
        tokens: token ids of the nodes.
        parents: index of the node that each node follows, `ROOT` or an earlier node.

    Raises:
        ValueError: not as many tokens as parents, or a parent that is not an earlier node.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree needs one parent a token, got {len(self.tokens)} and {len(self.parents)}")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"the parent of node {node} must be {ROOT} or an earlier node, got {parent}")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> Tree:
        """One continuation."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))

    @classmethod
    def grow(cls, paths: Sequence[Sequence[int]], candidates: Sequence[Sequence[int]]) -> Tree:
        """The tree of a shape: a path names the rank of each of its nodes among the candidates of its depth.

        Args:
            paths: see `check_paths`; those deeper than there are candidates are left out.
            candidates: token ids by depth, best first.
        """
        node_of: dict[tuple[int, ...], int] = {(): ROOT}
        tokens: list[int] = []
        parents: list[int] = []
        for path in map(tuple, paths):
            if path[:-1] in node_of and len(path) <= len(candidates) and path[-1] < len(candidates[len(path) - 1]):
                node_of[path] = len(tokens)
                tokens.append(candidates[len(path) - 1][path[-1]])
                parents.append(node_of[path[:-1]])
        return cls(tuple(tokens), tuple(parents))

    def __len__(self) -> int:
        """Nodes, the root not counted."""
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; a child of the root has depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return self.parents == tuple(range(ROOT, len(self) - 1))

    def truncated(self, most: int) -> Tree:
        """The first `most` nodes."""
        return self if len(self) <= most else Tree(self.tokens[:most], self.parents[:most])

    def down_to(self, depth: int) -> Tree:
        """The nodes whose depth is at most `depth`."""
        kept = [node for node, its_depth in enumerate(self.depths) if its_depth <= depth]
        if len(kept) == len(self):
            return self
        index = {ROOT: ROOT, **{node: at for at, node in enumerate(kept)}}
        return Tree(tuple(self.tokens[node] for node in kept), tuple(index[self.parents[node]] for node in kept))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` (or of `ROOT`) that is `token`."""
        return self._children.get((node, token))

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        children: dict[tuple[int, int], int] = {}
        for node, key in enumerate(zip(self.parents, self.tokens, strict=True)):
            children.setdefault(key, node)
        return children

    def path(self, node: int) -> list[int]:
        """The nodes from the child of the root down to `node`."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]


def check_paths(paths: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The shape of a tree, checked: every path is there once, after the path of its parent.

    Raises:
        ValueError: an empty path, a negative rank, a path twice, or one whose parent is missing or comes later.
    """
    known: set[tuple[int, ...]] = {()}
    for path in map(tuple, paths):
        if not path or min(path) < 0:
            raise ValueError(f"a path is one or more ranks >= 0, got {path}")
        if path in known:
            raise ValueError(f"path {path} is there twice")
        if path[:-1] not in known:
            raise ValueError(f"path {path} needs its parent {path[:-1]} before it")
        known.add(path)
    return tuple(map(tuple, paths))


def likely_paths(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[tuple[int, ...], ...]:
    """The shape with the most accepted tokens to expect, most likely nodes first.

    Args:
        accuracies: by depth and rank, how often that candidate is the right one given that its parent is.
        nodes: how many, fewer if there are not as many candidates.

    Raises:
        ValueError: no nodes are asked for, or an accuracy is outside [0, 1].
    """
    if nodes < 1:
        raise ValueError(f"nodes must be >= 1, got {nodes}")
    if any(not 0 <= share <= 1 for shares in accuracies for share in shares):
        raise ValueError(f"accuracies must be in [0, 1], got {accuracies}")
    best = [sorted(range(len(shares)), key=lambda rank, s=shares: -s[rank]) for shares in accuracies]  # type: ignore[misc]
    frontier: list[tuple[float, tuple[int, ...]]]
    frontier = [(accuracies[0][rank], (rank,)) for rank in best[0]] if accuracies else []
    chosen: list[tuple[int, ...]] = []
    while frontier and len(chosen) < nodes:
        share, path = max(frontier, key=lambda item: (item[0], [-rank for rank in item[1]]))
        frontier.remove((share, path))
        chosen.append(path)
        if len(path) < len(accuracies):
            frontier += [(share * accuracies[len(path)][rank], (*path, rank)) for rank in best[len(path)]]
    return tuple(chosen)
