"""The local basis of a page: what is kept so that a page can be judged, and approximated, without reading it.

For a sealed page with keys K [S, D] and values V [S, D_v], in this order, each step from the dequantised ones before:

    mu = mean(K)                    radius = mean|K - mu|             B = leading directions of K - mu  [r, D]
    C  = (K - mu) B^T  [S, r]       W = ridge regression of V - mean(V) on C - mean(C)  [r, D_v]
    v0 = mean(V) - mean(C) W        so that   keys ~ mu + C B   and   values ~ v0 + C W
    rho_k, rho_v = mean error norms of those two approximations

mu and v0 are kept in 8 bits, everything else in 4: each step makes up for the rounding of those before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from oval_core.memory import take
from oval_core.quantise import int4, int8, packed_size, uint4, unpack_int4, unpack_uint4

SUBSPACE_ITERATIONS = 6
RIDGE = 1e-3
NEARLY_DEPENDENT = 1e-6  # added to the squared lengths, so that dependent directions do no harm
NEGLIGIBLE = 1e-4  # a direction that keeps less than this share of its length when orthogonalised is rounding noise


@dataclass
class PageBasis:
    """Bases of the pages of one layer. `...` is `[B, H, P]`, P a capacity; vectors carry one float32 scale each.

    uint8 fields hold two numbers of 4 bits a byte, see `oval_core.quantise`; half(n) is `packed_size(n)`.

    `tokens` counts the tokens that may be read; the coefficients of a page are ordered so that those come first.
    """

    centroid: Tensor  # int8 [..., D]
    centroid_scale: Tensor  # [...]
    radius: Tensor  # uint8 [..., half(D)]
    radius_scale: Tensor  # [...]
    directions: Tensor  # uint8 [..., r, half(D)]
    directions_scale: Tensor  # [..., r]
    coefficients: Tensor  # uint8 [..., r, half(S)], the transpose of C: tokens lie side by side
    coefficients_scale: Tensor  # [..., r]
    regression: Tensor  # uint8 [..., r, half(D_v)]
    regression_scale: Tensor  # [..., r]
    value_offset: Tensor  # int8 [..., D_v]
    value_offset_scale: Tensor  # [...]
    key_error: Tensor  # rho_k [...]
    value_error: Tensor  # rho_v [...]
    value_norm: Tensor  # sum of the tokens' value norms [...]
    tokens: Tensor  # int32 [...]

    @staticmethod
    def empty(
        batch: int, heads: int, page_size: int, rank: int, dims: tuple[int, int], device: torch.device
    ) -> PageBasis:
        """No pages at all. `dims` are the key and value head dimensions; rank 0 keeps nothing of the values."""
        at = (batch, heads, 0)

        def whole(*shape: int) -> Tensor:
            return torch.empty(*at, *shape, dtype=torch.int8, device=device)

        def packed(*shape: int) -> Tensor:
            return torch.empty(*at, *shape[:-1], packed_size(shape[-1]), dtype=torch.uint8, device=device)

        def float32(*shape: int) -> Tensor:
            return torch.empty(*at, *shape, dtype=torch.float32, device=device)

        key_dim, value_dim = dims[0], dims[1] if rank else 0
        return PageBasis(
            centroid=whole(key_dim), centroid_scale=float32(),
            radius=packed(key_dim), radius_scale=float32(),
            directions=packed(rank, key_dim), directions_scale=float32(rank),
            coefficients=packed(rank, page_size), coefficients_scale=float32(rank),
            regression=packed(rank, value_dim), regression_scale=float32(rank),
            value_offset=whole(value_dim), value_offset_scale=float32(),
            key_error=float32(), value_error=float32(), value_norm=float32(),
            tokens=torch.empty(at, dtype=torch.int32, device=device),
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The fields by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def capacity_pages(self) -> int:
        """Pages that fit."""
        return self.tokens.shape[2]

    @property
    def page_size(self) -> int:
        """Tokens a page has room for."""
        return 2 * self.coefficients.shape[-1]

    @property
    def rank(self) -> int:
        """Directions a page."""
        return self.directions.shape[3]

    @property
    def resident_bytes(self) -> int:
        """Bytes held, spare capacity included."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @property
    def coarse_bytes(self) -> int:
        """Bytes of one page that the coarse tier reads."""
        return sum(self._page_bytes(name) for name in COARSE_FIELDS)

    @property
    def basis_bytes(self) -> int:
        """Bytes of one page that the basis tier reads on top of the coarse tier."""
        return sum(self._page_bytes(name) for name in self.tensors() if name not in COARSE_FIELDS)

    def _page_bytes(self, name: str) -> int:
        tensor: Tensor = getattr(self, name)
        return math.prod(tensor.shape[3:]) * tensor.element_size()

    def coarse(self) -> tuple[Tensor, Tensor]:
        """What tier 1 reads, in float32: mu and radius, `[..., D]`."""
        mu = self.centroid * self.centroid_scale[..., None]
        return mu, unpack_uint4(self.radius, mu.shape[-1]) * self.radius_scale[..., None]

    def approximation(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tier 2 adds, float32: B `[..., r, D]`, C transposed `[..., r, S]`, W `[..., r, D_v]`, v0 `[..., D_v]`."""
        v0 = self.value_offset * self.value_offset_scale[..., None]
        sizes = {"directions": self.centroid.shape[-1], "coefficients": self.page_size, "regression": v0.shape[-1]}
        b, c, w = (
            unpack_int4(getattr(self, name), n) * getattr(self, f"{name}_scale")[..., None] for name, n in sizes.items()
        )
        return b, c, w, v0

    def narrow(self, num_pages: int) -> PageBasis:
        """The first `num_pages` pages, without a copy."""
        return PageBasis(**{name: tensor[:, :, :num_pages] for name, tensor in self.tensors().items()})

    def gather(self, pages: Tensor) -> PageBasis:
        """Copy the bases of pages, int64 `[B, H, n]`."""
        return PageBasis(**{name: take(tensor, pages) for name, tensor in self.tensors().items()})

    def grown(self, capacity: int) -> PageBasis:
        """The same pages with room for `capacity`; the new room holds zeros."""
        return PageBasis(**{name: _grown(tensor, capacity) for name, tensor in self.tensors().items()})

    def select_rows(self, rows: Tensor) -> PageBasis:
        """A basis whose row i is row `rows[i]`."""
        return PageBasis(**{name: tensor.index_select(0, rows) for name, tensor in self.tensors().items()})

    def write(self, row: int | slice, first: int, built: PageBasis) -> None:
        """Store the pages of `built` in `row`, from page `first` on."""
        for name, tensor in self.tensors().items():
            source = getattr(built, name)
            tensor[row, :, first : first + source.shape[2]] = source


COARSE_FIELDS = ("centroid", "centroid_scale", "radius", "radius_scale", "tokens")


def build_basis(keys: Tensor, values: Tensor, mask: Tensor | None, rank: int) -> PageBasis:
    """Summarise pages.

    Args:
        keys, values: `[B, H, P, S, D]` and `[B, H, P, S, D_v]`, any float dtype.
        mask: bool, broadcasts to `[B, H, P, S]`, True for tokens that may be read, others have no influence; None: all.
        rank: directions a page; 0: the coarse part alone.

    Returns: bases of P pages; with rank 0 the other fields hold no page.
    """
    keys, values = keys.float(), values.float()
    if mask is None:
        real = keys.new_ones(keys.shape[3], 1)
    else:
        keys, values, real = _real_tokens_first(keys, values, mask)
    tokens = real.sum(-2).squeeze(-1).int()  # [B, H, P], or a scalar
    weight = real / tokens.clamp_min(1)[..., None, None]  # [..., S, 1]
    centroid, centroid_scale, mu = int8((keys * weight).sum(-2))
    deviation = (keys - mu[..., None, :]) * real
    radius, radius_scale, _ = uint4((deviation.abs() * weight).sum(-2))

    built = {
        "centroid": centroid, "centroid_scale": centroid_scale, "radius": radius, "radius_scale": radius_scale,
        "value_norm": (values.norm(dim=-1) * real.squeeze(-1)).sum(-1), "tokens": tokens.expand(keys.shape[:3]),
    }  # fmt: skip
    if rank:
        built |= _approximation(deviation, values, real, weight, rank)
    batch, heads, _, size, dim = keys.shape
    nothing = PageBasis.empty(batch, heads, size, rank, (dim, values.shape[-1]), keys.device)
    return replace(nothing, **built)


def _approximation(deviation: Tensor, values: Tensor, real: Tensor, weight: Tensor, rank: int) -> dict[str, Tensor]:
    """What tiers 2 and 3 read. `deviation [B, H, P, S, D]` from the centroid; `real`, `weight` `[..., S, 1]`."""
    directions, directions_scale, b = int4(leading_directions(deviation, rank))
    coefficients, coefficients_scale, c_t = int4(b @ deviation.mT)
    c = c_t.mT  # [B, H, P, S, r]

    mean_c, mean_v = (c * weight).sum(-2, keepdim=True), (values * weight).sum(-2, keepdim=True)
    fitted = _ridge((c - mean_c) * real, (values - mean_v) * real)
    regression, regression_scale, w = int4(fitted)
    value_offset, value_offset_scale, v0 = int8((mean_v - mean_c @ w).squeeze(-2))

    per_token = weight.squeeze(-1)
    return {
        "directions": directions, "directions_scale": directions_scale,
        "coefficients": coefficients, "coefficients_scale": coefficients_scale,
        "regression": regression, "regression_scale": regression_scale,
        "value_offset": value_offset, "value_offset_scale": value_offset_scale,
        "key_error": ((deviation - c @ b).norm(dim=-1) * per_token).sum(-1),
        "value_error": ((values - v0[..., None, :] - c @ w).norm(dim=-1) * per_token).sum(-1),
    }  # fmt: skip


def leading_directions(deviation: Tensor, rank: int) -> Tensor:
    """Orthonormal rows that span about the `rank` leading right singular directions of each page.

    Args:
        deviation: `[..., S, D]`; rows of tokens that do not count are zero.
        rank: rows wanted. A page with fewer independent directions gets zero rows for the rest.

    Returns: `[..., rank, D]`.
    """
    size = deviation.shape[-2]
    token = torch.arange(size, device=deviation.device, dtype=deviation.dtype) + 0.5
    wave = torch.arange(1, rank + 1, device=deviation.device, dtype=deviation.dtype)[:, None]
    mixtures = torch.cos(math.pi / size * wave * token)  # start from smooth mixtures: one row could be an unlucky pick
    basis = _spread_rows(mixtures @ deviation)
    for _ in range(SUBSPACE_ITERATIONS - 1):
        basis = _spread_rows((basis @ deviation.mT) @ deviation)
    return _orthonormal_rows((basis @ deviation.mT) @ deviation)


def _spread_rows(rows: Tensor) -> Tensor:
    """Nearly orthonormal rows with the span of `rows [..., r, D]`, in few operations: one Cholesky factor.

    The factor is one of float64: in float32, rounding reaches `NEARLY_DEPENDENT` where rows are many and alike.
    """
    rows = rows / rows.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    exact = rows.double()
    gram = exact @ exact.mT + NEARLY_DEPENDENT * torch.eye(rows.shape[-2], device=rows.device, dtype=exact.dtype)
    return torch.linalg.solve_triangular(torch.linalg.cholesky_ex(gram).L.to(rows.dtype), rows, upper=False)


def _orthonormal_rows(rows: Tensor) -> Tensor:
    """Gram-Schmidt, twice for stability; what is left of a dependent row is noise and becomes zero."""
    done: list[Tensor] = []
    for row in rows.unbind(-2):
        length = row.norm(dim=-1, keepdim=True)
        for _ in range(2):
            for other in done:
                row = row - (row * other).sum(-1, keepdim=True) * other
        left = row.norm(dim=-1, keepdim=True)
        done.append(torch.where(left > NEGLIGIBLE * length, row / left.clamp_min(torch.finfo(row.dtype).tiny), 0.0))
    return torch.stack(done, dim=-2)


def _ridge(inputs: Tensor, targets: Tensor) -> Tensor:
    """Ridge regression `[..., r, D_v]` of centred targets `[..., S, D_v]` on centred inputs `[..., S, r]`."""
    gram = inputs.mT @ inputs
    rank = gram.shape[-1]
    strength = (RIDGE / rank * gram.diagonal(dim1=-2, dim2=-1).sum(-1)).clamp_min(1e-12)
    eye = torch.eye(rank, device=gram.device, dtype=gram.dtype)
    return torch.linalg.solve_ex(gram + strength[..., None, None] * eye, inputs.mT @ targets).result  # never singular


def _real_tokens_first(keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Order the tokens of each page so that the masked ones come last, zeroed; the mask becomes `[B, H, P, S, 1]`."""
    order = mask.expand(keys.shape[:-1]).int().sort(dim=-1, descending=True, stable=True)
    real, index = order.values[..., None].float(), order.indices[..., None]
    keys = keys.gather(-2, index.expand(keys.shape)).masked_fill(real == 0, 0)
    values = values.gather(-2, index.expand(values.shape)).masked_fill(real == 0, 0)
    return keys, values, real


def _grown(tensor: Tensor, capacity: int) -> Tensor:
    grown = tensor.new_zeros(*tensor.shape[:2], capacity, *tensor.shape[3:])
    grown[:, :, : tensor.shape[2]] = tensor
    return grown
