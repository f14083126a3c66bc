"""The matrix of a mechanism that mixes the channels of each token and no tokens, as XCiT's, and its statistics."""

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import copy_without_hooks
from linvit.analysis.attention_statistics import spectral_statistics
from linvit.analysis.rank import rank_tolerance, singular_values
from linvit.analysis.rows import row_statistics
from linvit.attention.base import Attention, Grid

CHANNELS = "channels"
"""What tables and curves call such a matrix, beside the parts of matrices over tokens."""


@torch.no_grad()
def channel_matrix(mechanism: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor | None:
    """The matrix A of `o = v A^T` in float64, (B, h, d, d); None for a mechanism that mixes tokens.

    Args:
        mechanism: The mechanism.
        q: Queries (B, h, N, dk) as the mechanism receives them.
        k: Keys (B, h, N, dk).
        grid: Their grid.
    """
    if type(mechanism).channel_matrix is Attention.channel_matrix:
        return None  # without a copy
    return copy_without_hooks(mechanism).double().eval().channel_matrix(q.double(), k.double(), grid)


def channel_statistics(matrix: Tensor, rtol: float | None = None) -> dict[str, Tensor]:
    """Those of `attention_statistics`, (B, h) each, of channel matrices (B, h, d, d); distances in the image are NaN.

    Args:
        matrix: The matrices.
        rtol: Fraction of the largest singular value up to which another counts as 0; None means `rank_tolerance(d, d)`.
    """
    channels = matrix.shape[-1]
    rtol = rank_tolerance(channels, channels) if rtol is None else rtol
    rows = row_statistics(matrix, torch.arange(channels, device=matrix.device), Grid((1, channels)))
    nowhere = torch.full(matrix.shape[:-2], torch.nan, dtype=matrix.dtype, device=matrix.device)
    found = spectral_statistics(singular_values(matrix), rtol) | rows
    return found | {"centroid_distance": nowhere, "attention_distance": nowhere}
