"""All that can be said of a mechanism's equivalent matrix in numbers, computed in the cheapest way that it offers."""

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import Channel, attention_factors
from linvit.analysis.matrix_parts import formed_matrix
from linvit.analysis.rank import (
    effective_rank_of,
    rank_of,
    rank_tolerance,
    singular_values,
    singular_values_of_product,
    stable_rank_of,
)
from linvit.analysis.rows import TOP, row_statistics
from linvit.attention.base import Attention, Grid

SPECTRAL = ("rank", "effective_rank", "stable_rank", "spectral_norm")
ROWS = 256


@torch.no_grad()
def attention_statistics(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    x: Tensor | None = None,
    channel: Channel | None = None,
    rtol: float | None = None,
    top: int = TOP,
    max_rows: int = ROWS,
    max_tokens: int | None = None,
) -> dict[str, Tensor]:
    """Ranks of the matrix that a mechanism applies to its values, and how its rows are spread over the keys.

    The singular values are those of its thin factors where it has any, in O((N + M) r^2); of the matrix, in
    O(N M min(N, M)), where not (`formed_matrix`). The rows are formed from the factors, or are those of the matrix.

    Args:
        mechanism: The mechanism.
        q: Queries (B, h, N, dk) as the mechanism receives them.
        k: Keys (B, h, M, dk).
        grid: Their grid.
        v: Values (B, h, M, d), as in `attention_matrix`.
        bias: Position bias (B or 1, h, N, M) for a mechanism that takes one.
        x: The layer's input (B, N, C) for a mechanism that takes it.
        channel: Of a `channelwise` mechanism the index of one channel, or "mean" for the mean matrix; None is each.
        rtol: Fraction of the largest singular value up to which another counts as 0; None means `rank_tolerance(N, M)`.
        top: k of the share of the k largest weights.
        max_rows: Rows, evenly spread over all, that stand for the others where there are more.
        max_tokens: With more queries or keys than this no matrix is formed: where there are no factors either, nothing
            is returned.

    Returns:
        (B, h) each, in float64, or (B, h, d) if the mechanism is `channelwise` and no channel is chosen; NaN for a
        matrix that is not finite. By name:
        - `rank`: singular values above `rtol` times the largest;
        - `effective_rank`: `exp(entropy(s / sum s))` of the singular values s (Roy & Vetterli 2007);
        - `stable_rank`: `||A||_F^2 / ||A||_2^2` (Rudelson & Vershynin 2007);
        - `spectral_norm`: the largest singular value;
        - those of `row_statistics`: `entropy`, `top_share`, `uniform_distance`, `centroid_distance`,
          `attention_distance` and `negative_share`.
    """
    rtol = rank_tolerance(grid.num_queries, grid.num_keys) if rtol is None else rtol
    queries = torch.arange(grid.num_queries, device=q.device)
    if len(queries) > max_rows:
        queries = torch.linspace(0, grid.num_queries - 1, max_rows, device=q.device).round().long()
    factors = attention_factors(mechanism, q, k, grid, bias=bias, channel=channel)
    if factors is not None:
        left, right = factors
        spectrum, rows = singular_values_of_product(left, right), left[..., queries, :] @ right.mT
    elif max_tokens is not None and max(grid.num_queries, grid.num_keys) > max_tokens:
        return {}
    else:
        matrix = formed_matrix(mechanism, q, k, grid, v=v, bias=bias, x=x, channel=channel)
        spectrum, rows = singular_values(matrix), matrix[..., queries, :]
    return spectral_statistics(spectrum, rtol) | row_statistics(rows, queries, grid, top)


def spectral_statistics(spectrum: Tensor, rtol: float) -> dict[str, Tensor]:
    """`SPECTRAL` by name, from singular values (..., r) in descending order."""
    numbers = (rank_of(spectrum, rtol), effective_rank_of(spectrum), stable_rank_of(spectrum), spectrum[..., 0])
    return dict(zip(SPECTRAL, numbers, strict=True))
