"""Ranks of matrices, and statistics of their rows: evenness, concentration, distance from the query.

A row is treated as a distribution over the keys: the magnitudes of its entries divided by their sum. So a matrix
with negative entries, as of a polynomial or with a convolution of the values, also has weights, and `negative_share`
is the share of them that is negative. A row of zeros counts as 0 everywhere.
"""

import torch
from torch import Tensor

from linvit.attention.base import Grid

TOP = 5
"""Number of keys whose share of the weights is `top_share`."""
ROW_STATISTICS = ("entropy", "top_share", "attention_distance", "negative_share")


def singular_values(matrix: Tensor) -> Tensor:
    """Returns singular values (..., min(N, M)) in descending order; NaN for a matrix with a non-finite entry.

    Raises a `TypeError` in half precision: the rank of a rounded product is not the rank of the product.
    """
    if matrix.dtype in (torch.float16, torch.bfloat16):
        raise TypeError(
            f"a rank read from a {matrix.dtype} matrix is the rank of its rounding errors; "
            f"form the matrix in float32 or float64 (linvit.analysis.attention_matrix does)"
        )
    finite = matrix.isfinite().all(-1).all(-1)
    clean = torch.where(finite[..., None, None], matrix, torch.zeros_like(matrix)).double()
    size = _nonzero(clean.abs().amax((-2, -1), keepdim=True))  # divided by it, no square overflows
    values = torch.linalg.svdvals(clean / size) * size.squeeze(-1)
    return torch.where(finite[..., None], values, torch.full_like(values, torch.nan))


def singular_values_of_product(left: Tensor, right: Tensor) -> Tensor:
    """Returns singular values (..., min(N, M, r)) of `left @ right.mT`, descending, in float64; the others are 0.

    The factors are (..., N, r) and (..., M, r); the values are those of the product of the triangles of both QR
    decompositions, in O((N + M) r^2) and without the product. Each pair of columns is first scaled to equal length, so
    that rounding is relative to their product, not to the longer column. NaN where an entry is not finite.
    """
    factors = [left.double(), right.double()]
    peaks = [x.abs().amax(-2, keepdim=True) for x in factors]  # (..., 1, r); NaN or infinity where a column has some
    finite = (peaks[0].isfinite() & peaks[1].isfinite()).all(-1).squeeze(-1)
    if not finite.all():
        factors, peaks = ([x.where(finite[..., None, None], 0) for x in each] for each in (factors, peaks))
    peaks = [_nonzero(peak) for peak in peaks]  # divided by it, no square overflows
    triangles = [torch.linalg.qr(x / peak, mode="r").R for x, peak in zip(factors, peaks, strict=True)]
    lengths = [_nonzero(torch.linalg.vector_norm(x, dim=-2, keepdim=True)) for x in triangles]  # those of x / peak
    roots = [peak.sqrt() * length.sqrt() for peak, length in zip(peaks, lengths, strict=True)]
    common = roots[0] * roots[1]
    size = _nonzero(common.amax(-1, keepdim=True))
    triangles = [x / length * (common / size) for x, length in zip(triangles, lengths, strict=True)]
    values = torch.linalg.svdvals(triangles[0] @ triangles[1].mT) * size.squeeze(-1) * size.squeeze(-1)
    return torch.where(finite[..., None], values, torch.full_like(values, torch.nan))


def _nonzero(x: Tensor) -> Tensor:
    """Replaces 0 by 1, for divisors."""
    return x.masked_fill(x == 0, 1)


def rank_tolerance(rows: int, columns: int, dtype: torch.dtype = torch.float64) -> float:
    """Returns the relative tolerance below which a singular value is rounding: max(N, M) times epsilon of the dtype."""
    return max(rows, columns) * torch.finfo(dtype).eps


def rank(matrix: Tensor, rtol: float | None = None) -> Tensor:
    """Returns the number of singular values above `rtol` times the largest, (...,) float64; NaN if not finite.

    Pass the matrix (..., N, M) in the precision in which it was *formed*: a float32 product cast to float64 has
    full rank by its rounding errors. The default `rtol` is `rank_tolerance(N, M, dtype)`.
    """
    if rtol is None:
        rtol = rank_tolerance(matrix.shape[-2], matrix.shape[-1], matrix.dtype)
    return rank_of(singular_values(matrix), rtol)


def rank_of(values: Tensor, rtol: float) -> Tensor:
    """Returns the rank from singular values (..., r)."""
    count = (values > rtol * values.amax(-1, keepdim=True)).sum(-1).double()
    return torch.where(values.isnan().any(-1), torch.nan, count)


def effective_rank_of(values: Tensor) -> Tensor:
    """Returns the effective rank from singular values (..., r); 0 for the zero matrix."""
    total = values.sum(-1, keepdim=True)
    fractions = values / total.clamp_min(torch.finfo(values.dtype).tiny)
    return torch.where(total.squeeze(-1) == 0, 0.0, torch.special.entr(fractions).sum(-1).exp())


def stable_rank_of(values: Tensor) -> Tensor:
    """Returns the stable rank `||A||_F^2 / ||A||_2^2` from singular values (..., r); 0 for the zero matrix.

    It is at most the rank, and small changes of the matrix change it little (Rudelson & Vershynin 2007).
    """
    largest = values.amax(-1, keepdim=True)
    return (values / _nonzero(largest)).square().sum(-1)


def row_statistics(rows: Tensor, queries: Tensor, grid: Grid, top: int = TOP) -> dict[str, Tensor]:
    """Returns means (...,) over rows (..., R, M) of matrices, of `queries` (R,) of a grid; NaN where not finite.

    - `entropy`: in nats; 0 for a row with one weight, log M for equal ones;
    - `top_share`: of the `top` largest weights, between top / M and 1;
    - `attention_distance`: mean distance from a query's patch to the keys, by their weights (Dosovitskiy et al. 2021,
      Fig. 7), in patches of the queries' grid, among patches only; NaN without a row of a patch;
    - `negative_share`: share of the entries' magnitudes that belongs to negative entries.
    """
    finite = rows.isfinite().all(-1).all(-1)
    rows = torch.where(finite[..., None, None], rows, torch.zeros_like(rows)).double()
    rows = rows / _nonzero(rows.abs().amax(-1, keepdim=True))  # so that no sum overflows
    weights = rows.abs()
    total = weights.sum(-1, keepdim=True)
    weights = weights / _nonzero(total)
    found = {
        "entropy": torch.special.entr(weights).sum(-1).mean(-1),
        "top_share": weights.topk(min(top, rows.shape[-1]), sorted=False).values.sum(-1).mean(-1),
        "attention_distance": _distance(weights, queries, grid),
        "negative_share": (rows.clamp_max(0).abs().sum(-1, keepdim=True) / _nonzero(total)).squeeze(-1).mean(-1),
    }
    return {name: torch.where(finite, value, torch.nan) for name, value in found.items()}


def _distance(weights: Tensor, queries: Tensor, grid: Grid) -> Tensor:
    patches = queries >= grid.num_prefix
    among = weights[..., patches, grid.num_prefix :]
    among = among / _nonzero(among.sum(-1, keepdim=True))
    own = positions(grid.size, grid.size, weights)[queries[patches] - grid.num_prefix]  # (R, 2)
    keys = positions(grid.keys_size, grid.size, weights)  # (M, 2)
    return (among * torch.cdist(own, keys)).sum(-1).mean(-1)


def positions(size: tuple[int, int], unit: tuple[int, int], like: Tensor) -> Tensor:
    """Returns the centres (H W, 2) of a grid's patches, rows and columns, in patches of the image's grid `unit`."""
    axes = [
        (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) * whole / side
        for side, whole in zip(size, unit, strict=True)
    ]
    return torch.cartesian_prod(*axes)
