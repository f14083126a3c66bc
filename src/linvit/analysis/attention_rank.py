"""The rank of any mechanism's equivalent matrix, computed in the cheapest way that the mechanism offers."""

from torch import Tensor

from linvit.analysis.attention_matrix import attention_factors
from linvit.analysis.matrix_parts import formed_matrix
from linvit.analysis.rank import rank, rank_of, rank_tolerance, singular_values_of_product
from linvit.attention.base import Attention, Grid


def attention_rank(
    mechanism: Attention,
    q: Tensor,
    k: Tensor,
    grid: Grid,
    *,
    v: Tensor | None = None,
    bias: Tensor | None = None,
    x: Tensor | None = None,
    rtol: float | None = None,
) -> Tensor:
    """Rank of the matrix that a mechanism applies to its values, from its thin factors where it has any.

    These take O((N + M) r^2), milliseconds at thousands of tokens. Without them the singular value decomposition of
    the matrix takes O(N M min(N, M)), seconds per head at 3,136 tokens.

    Args:
        mechanism: The mechanism.
        q: Queries (B, h, N, dk) as the mechanism receives them.
        k: Keys (B, h, M, dk).
        grid: Their grid.
        v: Values (B, h, M, d), as in `attention_matrix`.
        bias: Position bias (B or 1, h, N, M) for a mechanism that takes one.
        x: The layer's input (B, N, C) for a mechanism that takes it.
        rtol: Fraction of the largest singular value up to which another counts as 0; None means `rank_tolerance(N, M)`.

    Returns:
        (B, h) in float64, or (B, h, d) if the mechanism is `channelwise`; NaN for a non-finite matrix.
    """
    rtol = rank_tolerance(grid.num_queries, grid.num_keys) if rtol is None else rtol
    factors = attention_factors(mechanism, q, k, grid, bias=bias)
    if factors is None:
        return rank(formed_matrix(mechanism, q, k, grid, v=v, bias=bias, x=x), rtol)
    return rank_of(singular_values_of_product(*factors), rtol)
