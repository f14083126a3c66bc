"""Statistics of a mechanism's equivalent matrix, computed in the cheapest way available, and those of a layer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import (
    CHANNELS,
    Channel,
    attention_factors,
    channel_matrix,
    formed_matrix,
    matrix_parts,
)
from linvit.analysis.rank import (
    ROW_STATISTICS,
    TOP,
    effective_rank_of,
    rank_of,
    rank_tolerance,
    row_statistics,
    singular_values,
    singular_values_of_product,
    stable_rank_of,
)
from linvit.analysis.recorder import Call
from linvit.attention.base import Attention, Grid

SPECTRAL = ("rank", "effective_rank", "stable_rank", "spectral_norm")
STATISTICS = (*SPECTRAL, *ROW_STATISTICS)
"""Names of the results of `layer_statistics`, in the order of tables."""
ROWS = 256


def attention_rank(mechanism: Attention, q: Tensor, k: Tensor, grid: Grid, **given: Any) -> Tensor:
    """Returns `rank` of `attention_statistics` (same arguments): singular values above `rtol` times the largest.

    Thin factors take O((N + M) r^2), milliseconds at thousands of tokens; the matrix of a mechanism without any takes
    O(N M min(N, M)), seconds per head at 3,136 tokens.
    """
    return attention_statistics(mechanism, q, k, grid, **given)["rank"]


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

    The singular values are computed from the thin factors if there are any, in O((N + M) r^2), or else from the matrix,
    in O(N M min(N, M)) (`formed_matrix`). The rows are formed from the factors or taken from the matrix.

    Args:
        mechanism: The mechanism; it and all up to `channel` are as in `attention_matrix`.
        q: Queries.
        k: Keys.
        grid: Their grid.
        v: Values.
        bias: Position bias.
        x: The layer's input.
        channel: Channel of a `channelwise` mechanism.
        rtol: Fraction of the largest singular value below which another counts as 0; None is `rank_tolerance(N, M)`.
        top: Number k of the largest weights whose share is returned.
        max_rows: Maximum number of rows to evaluate, evenly spaced.
        max_tokens: With more queries or keys than this no matrix is formed, and without factors nothing is
            returned.

    Returns:
        (B, h) each, in float64, or (B, h, d) if the mechanism is `channelwise` and no channel is chosen; NaN for a
        matrix that is not finite. By name:

        - `rank`: singular values above `rtol` times the largest;
        - `effective_rank`: `exp(entropy(s / sum s))` of the singular values s (Roy & Vetterli 2007);
        - `stable_rank`: `||A||_F^2 / ||A||_2^2` (Rudelson & Vershynin 2007);
        - `spectral_norm`: the largest singular value;
        - those of `row_statistics`: `entropy`, `top_share`, `attention_distance` and `negative_share`.
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


def channel_statistics(matrix: Tensor, rtol: float | None = None) -> dict[str, Tensor]:
    """Returns values of `attention_statistics`, (B, h) each, for channel matrices (B, h, d, d), without distances."""
    channels = matrix.shape[-1]
    rtol = rank_tolerance(channels, channels) if rtol is None else rtol
    rows = row_statistics(matrix, torch.arange(channels, device=matrix.device), Grid((1, channels)))
    nowhere = torch.full(matrix.shape[:-2], torch.nan, dtype=matrix.dtype, device=matrix.device)
    found = spectral_statistics(singular_values(matrix), rtol) | rows
    return found | {"attention_distance": nowhere}


def layer_statistics(
    calls: Sequence[Call], *, channel: Channel | None, rtol: float | None = None, max_tokens: int | None = None
) -> dict[str, dict[str, Tensor]]:
    """Statistics of the whole matrix under the name "", and of each part; see `attention_statistics`.

    For a mechanism that mixes channels and not tokens, they are those of its channel matrix, under the name `CHANNELS`.
    The first window of each call is measured. Returns (images, h[, d]) by part and name, on the CPU.
    """
    found: dict[str, dict[str, list[Tensor]]] = {}
    for call in (call.first() for call in calls):
        mixing = channel_matrix(call.mechanism, call.q, call.k, call.grid)
        if mixing is not None:
            for name, value in channel_statistics(mixing, rtol).items():
                found.setdefault(CHANNELS, {}).setdefault(name, []).append(value.cpu())
            continue
        for part, mechanism in {"": call.mechanism, **matrix_parts(call.mechanism)}.items():
            given: dict[str, Any] = {"v": call.v, "bias": call.bias, "x": call.x}
            choice: dict[str, Any] = {"channel": channel, "rtol": rtol, "max_tokens": max_tokens}
            numbers = attention_statistics(mechanism, call.q, call.k, call.grid, **given, **choice)
            for name, value in numbers.items():
                found.setdefault(part, {}).setdefault(name, []).append(value.cpu())
    return {part: {name: torch.cat(each) for name, each in numbers.items()} for part, numbers in found.items()}


def per_head(numbers: dict[str, Tensor]) -> list[list[float]]:
    """Returns the numbers of each head in the order of `STATISTICS`, means over images and channels."""
    heads = [numbers[name].movedim(1, 0).flatten(1).nanmean(1).tolist() for name in STATISTICS]
    return [list(values) for values in zip(*heads, strict=True)]
