"""How the rows of attention matrices are spread over the keys: how evenly, over how many, and how far from the query.

A row is taken as the weights of a distribution over the keys: the magnitudes of its entries over their sum. So a matrix
with negative entries, as of a polynomial or with a convolution of the values, has weights, too, and `negative_share`
says how much of them is negative. A row of zeros counts as 0 everywhere.
"""

import torch
from torch import Tensor

from linvit.attention.base import Grid

TOP = 5
"""Keys whose share of the weights `top_share` is."""
ROW_STATISTICS = (
    "entropy",
    "top_share",
    "uniform_distance",
    "centroid_distance",
    "attention_distance",
    "negative_share",
)


def row_statistics(rows: Tensor, queries: Tensor, grid: Grid, top: int = TOP) -> dict[str, Tensor]:
    """Means over the rows of attention matrices; NaN where a matrix has an entry that is not finite.

    Args:
        rows: (..., R, M) rows of matrices.
        queries: Which rows of the matrices they are, (R,) of N.
        grid: Of the queries and keys.
        top: k of the top-k weights.

    Returns:
        (...,) each:
        - `entropy`: in nats; 0 for a row with one weight, log M for equal ones;
        - `top_share`: of the k largest weights, between k / M and 1;
        - `uniform_distance`: total variation distance to equal weights, between 0 and 1 - 1 / M;
        - `centroid_distance`: from a query's patch to the weights' centroid, in patches of the queries' grid;
        - `attention_distance`: mean distance from a query's patch to the keys, by their weights (Dosovitskiy et al.
          2021, Fig. 7), in the same unit;
        - `negative_share`: of the entries' magnitudes, how much belongs to negative ones.

        Both distances are among patches alone, and NaN where there is no row of a patch.
    """
    finite = rows.isfinite().all(-1).all(-1)
    rows = torch.where(finite[..., None, None], rows, torch.zeros_like(rows)).double()
    rows = rows / _divisor(rows.abs().amax(-1, keepdim=True))  # so that no sum overflows
    weights = rows.abs()
    total = weights.sum(-1, keepdim=True)
    weights = weights / _divisor(total)
    seen = total.squeeze(-1) > 0  # (..., R)
    uniform = 0.5 * (weights - 1 / rows.shape[-1]).abs().sum(-1)
    centroid, distance = _distances(weights, queries, grid)
    found = {
        "entropy": torch.special.entr(weights).sum(-1).mean(-1),
        "top_share": weights.topk(min(top, rows.shape[-1]), sorted=False).values.sum(-1).mean(-1),
        "uniform_distance": torch.where(seen, uniform, 0).mean(-1),
        "centroid_distance": centroid,
        "attention_distance": distance,
        "negative_share": (rows.clamp_max(0).abs().sum(-1, keepdim=True) / _divisor(total)).squeeze(-1).mean(-1),
    }
    return {name: torch.where(finite, value, torch.nan) for name, value in found.items()}


def _distances(weights: Tensor, queries: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Mean distance to the centroid, and mean of the weighted distances, over the rows of patches."""
    patches = queries >= grid.num_prefix
    among = weights[..., patches, grid.num_prefix :]
    total = among.sum(-1, keepdim=True)
    among = among / _divisor(total)
    own = positions(grid.size, grid.size, weights)[queries[patches] - grid.num_prefix]  # (R, 2)
    keys = positions(grid.keys_size, grid.size, weights)  # (M, 2)
    centroids = torch.linalg.vector_norm(among @ keys - own, dim=-1) * (total.squeeze(-1) > 0)
    distances = (among * torch.cdist(own, keys)).sum(-1)
    return centroids.mean(-1), distances.mean(-1)


def positions(size: tuple[int, int], unit: tuple[int, int], like: Tensor) -> Tensor:
    """Centres (H W, 2) of the patches of a grid, rows and columns, in patches of the grid `unit` of the same image."""
    axes = [
        (torch.arange(side, device=like.device, dtype=like.dtype) + 0.5) * whole / side
        for side, whole in zip(size, unit, strict=True)
    ]
    return torch.cartesian_prod(*axes)


def _divisor(x: Tensor) -> Tensor:
    return x.masked_fill(x == 0, 1)
