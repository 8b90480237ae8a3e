"""What learned routers have in common: a head that scores pages by embeddings of them, and which pages it wants first.

    score of page p for a query head   u . [key[l, h] z(mu_p), phi(distance)] / sqrt(dim)  + log(tokens of p)
                                       or, with `coarse`,  + gate[l, h] . training-free coarse score

`u` is what the head makes of the hidden state that enters the attention module, `z(mu_p)` the page's centroid,
standardised, and `phi` a few features of how far back the page is: nothing is tied to a number of pages.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from oval_core.basis import PageBasis
from oval_core.memory import lasting
from oval_core.routers.base import Pages, Router, Selection
from oval_core.routers.learned_file import LearnedModule, ModelSizes, load_learned

KEY_DTYPE = torch.float16  # of what is kept of a page
REACHES_TOKENS = (16.0, 64.0, 256.0, 1024.0)  # of the features that fade with distance
DISTANCE_FEATURES = len(REACHES_TOKENS) + 1


class Places(NamedTuple):
    """Where things are, in tokens from the start of their row, padding not counted.

    Args:
        positions: of the queries, int64 `[B, Q]`.
        starts, lengths: of the pages, int64 `[B, P]`.
    """

    positions: Tensor
    starts: Tensor
    lengths: Tensor

    @staticmethod
    def of(pages: Pages) -> Places:
        """Of what a router sees: a row's first page begins where its padding ends."""
        return Places(pages.positions, pages.starts - pages.starts[:, :1], pages.lengths)

    @property
    def centres(self) -> Tensor:
        """Of the pages, float32 `[B, P]`."""
        return self.starts + (self.lengths - 1) / 2

    def features(self) -> Tensor:
        """phi, float32 `[B, Q, P, F]`: the distance's logarithm, and how it fades."""
        distance = (self.positions[..., None] - self.centres[:, None]).clamp_min(0)
        fading = [torch.exp(-distance / reach) for reach in REACHES_TOKENS]
        return torch.stack([distance.log1p() / math.log(REACHES_TOKENS[-1]), *fading], -1)


class LearnedHead(LearnedModule):
    """Scores pages; overridden in `ask` and, where training differs from inference, in `guesses`.

    Args:
        sizes: of the model.
        dim: of the comparison.
        coarse: whether the training-free coarse score, times a gate that starts at 1, is added.
        seed: of the first weights.
    """

    key_mean: Tensor
    key_scale: Tensor
    hidden_scale: Tensor

    def __init__(self, sizes: ModelSizes, dim: int = 32, coarse: bool = False, seed: int = 0, **options: Any) -> None:
        super().__init__(sizes, dim=dim, coarse=coarse, **options)
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        self.dim = dim
        self.generator = torch.Generator().manual_seed(seed)
        at = (sizes.layers, sizes.heads)
        self.key = self.weights(*at, dim, sizes.head_dim)
        self.gate = nn.Parameter(torch.ones(at)) if coarse else None
        self.register_buffer("key_mean", torch.zeros(*at, sizes.head_dim))
        self.register_buffer("key_scale", torch.ones(*at, sizes.head_dim))
        self.register_buffer("hidden_scale", torch.ones(sizes.layers, sizes.hidden_size))

    def weights(self, *shape: int) -> nn.Parameter:
        """Random first weights of linear maps `[..., out, in]`."""
        return nn.Parameter(torch.randn(*shape, generator=self.generator) / math.sqrt(shape[-1]))

    def ask(self, layer: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """What queries look for.

        Args:
            hidden: standardised, float32 `[B, Q, hidden]`.
            positions: int64 `[B, Q]`.

        Returns: `[B, H, G, Q, dim + F]`, or more where a head of its own reads the rest.
        """
        raise NotImplementedError

    def page_keys(self, layer: int, centroids: Tensor) -> Tensor:
        """Page embeddings: centroids `[B, H, P, D]` -> `[B, H, P, dim]`."""
        standard = (centroids.float() - self.key_mean[layer][:, None]) * self.key_scale[layer][:, None]
        return standard @ self.key[layer].mT

    def standardised(self, layer: int, hidden: Tensor) -> Tensor:
        """Hidden states as `ask` takes them."""
        return hidden.float() * self.hidden_scale[layer]

    def scores(self, layer: int, asked: Tensor, page_keys: Tensor, places: Places, coarse: Tensor | None) -> Tensor:
        """Scores of all pages, float32 `[B, H, G, Q, P]`.

        Args:
            asked: as `ask` returns it.
            page_keys: `[B, H, P, dim]`.
            coarse: training-free scores of the shape that is returned, for a head made with `coarse`; else None.
        """
        content = asked[..., : self.dim] @ page_keys.float().mT[:, :, None]
        place = torch.einsum(
            "bhgqf,bqpf->bhgqp", asked[..., self.dim : self.dim + DISTANCE_FEATURES], places.features()
        )
        found = (content + place) / math.sqrt(self.dim)
        if self.gate is None:
            return found + places.lengths.clamp_min(1).float().log()[:, None, None, None]
        assert coarse is not None
        return found + self.gate[layer][:, None, None, None] * coarse

    def guesses(
        self, layer: int, asked: Tensor, scores: Tensor, places: Places, among: Tensor, noise: torch.Generator
    ) -> list[Tensor]:
        """What training compares with the true shares: log-shares over the pages, each `[B, H, G, Q, P]`.

        Args:
            asked, scores: as `ask` and `scores` return them.
            among: bool `[B, 1, 1, Q, P]`, pages that are guessed about.
            noise: for heads that learn under noise.
        """
        return [log_shares(scores, among)]


class LearnedRouter(Router):
    """Reads first what its head wants most, then the other pages by their weight. Made by `load`.

    Args:
        head: trained; moved to where the queries are.
    """

    needs_hidden_states = True
    head_class: ClassVar[type[LearnedHead]]

    def __init__(self, head: LearnedHead) -> None:
        self.head: Any = head.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Self:
        """From a file of `python -m oval_core.training`.

        Args:
            model: check at once that the file is for this model; None: at the first step.

        Raises:
            FileNotFoundError, ValueError: no such file, not what it must be, or made for another model.
        """
        head = load_learned(Path(path), cls.head_class)
        if model is not None:
            head.require_model(model)
        return cls(head)

    def __deepcopy__(self, _: object) -> Self:
        return self  # nothing in it changes: copies of a cache share it

    def score(self, query: Tensor, pages: Pages) -> Tensor:
        """See `Router.score`."""
        return self.scored(query, pages)[0]

    def scored(self, query: Tensor, pages: Pages) -> tuple[Tensor, Tensor]:
        """Scores, and what the head asked. Pages that are read anyway have the least: no head learns about them."""
        layer, hidden = pages.layer_idx, self._checked(query, pages)
        if self.head.device != query.device:
            self.head.to(query.device)
        hidden = self.head.standardised(layer, hidden)
        coarse = None
        if self.head.gate is not None:
            coarse = pages.kernels.coarse_scores(query, pages.basis, pages.scaling, pages.softcap)
        asked = self.head.ask(layer, hidden, pages.positions)
        scores = self.head.scores(layer, asked, self._page_keys(pages), Places.of(pages), coarse)
        return scores.masked_fill(pages.forced()[:, :, None, None], torch.finfo(scores.dtype).min), asked

    def select(self, query: Tensor, pages: Pages) -> Selection:
        """See `Router.select`."""
        scores, asked = self.scored(query, pages)
        wanted = (self.wanted(scores, asked, pages) & free(pages)).any(3).any(2)  # [B, H, P]
        return self.choose(query, pages, scores, wanted)

    def wanted(self, scores: Tensor, asked: Tensor, pages: Pages) -> Tensor:
        """Pages that some query head puts first, whatever their mean weight: bool, the shape of `scores`."""
        raise NotImplementedError

    def metadata_bytes(self, pages: int, shortlist: int, basis: PageBasis, features: Tensor | None) -> int:
        """See `Router.metadata_bytes`."""
        own = self.head.dim * KEY_DTYPE.itemsize
        return pages * (own if self.head.gate is None else own + basis.coarse_bytes)

    def _checked(self, query: Tensor, pages: Pages) -> Tensor:
        """The hidden states, of the model that the head is for."""
        if pages.hidden_states is None:
            raise ValueError(f"the {self.name} router needs the hidden states of an attached model, got none")
        sizes, hidden = self.head.sizes, pages.hidden_states
        expected = (sizes.heads, sizes.group, sizes.head_dim, sizes.hidden_size)
        got = (*query.shape[1:3], query.shape[-1], hidden.shape[-1])
        if got != expected or pages.layer_idx >= sizes.layers:
            raise ValueError(
                f"the {self.head.kind} is for another model: expected KV heads, group, head dimension and hidden size "
                f"{expected} in {sizes.layers} layers, got {got} in layer {pages.layer_idx}"
            )
        return hidden

    def _page_keys(self, pages: Pages) -> Tensor:
        if self not in pages.derived:
            pages.derived[self] = self._make_page_keys(pages)
        keys: Tensor = pages.derived[self]
        return keys

    @lasting
    def _make_page_keys(self, pages: Pages) -> Tensor:
        return self.head.page_keys(pages.layer_idx, pages.basis.coarse()[0]).to(KEY_DTYPE)


def log_shares(scores: Tensor, among: Tensor) -> Tensor:
    """Log of the softmax over the pages `among`, a bool mask that broadcasts to `scores`; the others get the least."""
    return scores.masked_fill(~among, torch.finfo(scores.dtype).min).log_softmax(-1)


def free(pages: Pages) -> Tensor:
    """Pages that a query may read and that are not read anyway, bool `[B, 1, 1, 1 or Q, P]`."""
    there = (pages.present() & ~pages.forced())[:, :, None, None]
    return there if pages.seen is None else there & (pages.seen > 0)[:, None, None]


def heaviest(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """The `count` pages with the best scores `[..., P]` of each query head: bool, the shape of `scores`."""
    best = scores.masked_fill(~among, -torch.inf).topk(min(count, scores.shape[-1])).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
