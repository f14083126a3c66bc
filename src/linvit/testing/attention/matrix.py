"""Checks of the equivalent matrix of a mechanism and of its factors."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from linvit.analysis.attention_matrix import attention_matrix
from linvit.analysis.rank import rank
from linvit.attention.base import Attention, Grid
from linvit.layers.spatial_reduction import reducible
from linvit.testing.attention.inputs import AttentionSubject, Inputs, inputs
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import CRASHES, at, failed, judged, not_declared, not_supported, require
from linvit.testing.subject import sized

SMALL = (Grid((6, 8)), Grid((5, 7), num_prefix=1), Grid((6, 8), (3, 4), num_prefix=1))
NEGLIGIBLE = 1e-10
"""Singular values below this fraction of the largest are rounding: 1e-15 after products, 1e-12 after an inverse by
iteration. Those of a mechanism above its bound are at least 1e-3 at these sizes."""


def at_small_grids(
    difference: str,
) -> Callable[[Callable[[Attention, Inputs, Grid], float]], Callable[[AttentionSubject], str]]:
    """Makes a check of an error, described by a text, at each of the small grids at which the mechanism runs."""

    def decorate(error_of: Callable[[Attention, Inputs, Grid], float]) -> Callable[[AttentionSubject], str]:
        @torch.no_grad()
        def check(subject: AttentionSubject) -> str:
            errors = {}
            for grid, mechanism, given in _small(subject):
                with at(sized(grid)):
                    error = error_of(mechanism, given, grid)
                errors[sized(grid)] = error
                judged(error, f"{difference} by {error:.0e} at {sized(grid)}")
            if not errors:
                tried = ", ".join(map(sized, SMALL))
                raise not_supported(f"it does not run at {tried}; see 'grids' and 'prefix tokens'")
            return f"{difference} by {', '.join(f'{error:.0e} at {size}' for size, error in errors.items())}"

        return check

    return decorate


@at_small_grids("M v + bias differs from the output")
def equivalent_matrix(mechanism: Attention, given: Inputs, grid: Grid) -> float:
    """Compares the output with M from probing or from `attention_matrix`, as declared."""
    if not mechanism.facts.linear_in_values:
        return _own(mechanism, given, grid)
    bias = _with_values(mechanism, given, torch.zeros_like(given["v"]))
    matrix = _matrix(mechanism, given)
    _check_rank(mechanism, matrix, grid)
    error = relative_error(_mixed(mechanism, matrix, given["v"]) + bias, given(mechanism))
    if not error <= EXACT:
        differs = f"M v + bias differs from the output by {error:.0e} (at most {EXACT:.0e}) at {sized(grid)}"
        raise failed(f"{differs}: {_why(mechanism, given)}")
    several = mechanism.facts.channelwise and mechanism.head_dim > 1
    if several and relative_error(matrix[:, :, :1].expand_as(matrix), matrix) <= EXACT:
        raise failed("declared channelwise, but all channels have one matrix: leave channelwise out")
    return error


@at_small_grids("left @ right.mT differs from the equivalent matrix")
def factors(mechanism: Attention, given: Inputs, grid: Grid) -> float:
    """Compares the factors with the matrix."""
    found = mechanism.factors(given["q"], given["k"], grid)
    if found is None:
        raise not_declared("factors(q, k, grid) gives None")
    product, matrix = found[0] @ found[1].mT, _matrix(mechanism, given)
    shapes = tuple(product.shape), tuple(matrix.shape)
    require(product.shape == matrix.shape, f"left @ right.mT is {shapes[0]}, the equivalent matrix {shapes[1]}")
    return relative_error(product, matrix)


def _small(subject: AttentionSubject) -> Iterator[tuple[Grid, Attention, Inputs]]:
    """Yields the small grids at which the mechanism runs, with an instance and inputs."""
    for grid in SMALL if reducible(subject.build()) else SMALL[:-1]:
        with contextlib.suppress(*CRASHES):
            mechanism = subject.build(grid)
            given = inputs(mechanism, grid)
            given(mechanism)
            yield grid, mechanism, given


def _own(mechanism: Attention, given: Inputs, grid: Grid) -> float:
    """Compares the matrix of a mechanism that cannot be probed with its output.

    A mechanism that widens its output has several matrices per head, each on values that it computes: for those, and
    if the matrix is not the whole operation (`matrix_is_exact`), only the tokens are compared.
    """
    if not hasattr(mechanism, "attention_matrix"):
        why = mechanism.facts.no_matrix or "linear_in_values is False, and there is no attention_matrix(q, k, v, grid)"
        raise not_declared(why)
    matrix = _matrix(mechanism, given)
    fits = len(matrix) == len(given["v"]) and matrix.shape[-2:] == (grid.num_queries, grid.num_keys)
    require(fits, f"attention_matrix gives {tuple(matrix.shape)}, which does not end in (N, M) or begin with B")
    lost = int((~matrix.isfinite()).sum())
    require(not lost, f"attention_matrix has {lost} entries that are not finite")
    _check_rank(mechanism, matrix, grid)
    if mechanism.out_dim != mechanism.dim or not mechanism.facts.matrix_is_exact:
        return 0.0
    error = relative_error(_mixed(mechanism, matrix, given["v"]), given(mechanism))
    require(
        error <= EXACT,
        f"attention_matrix times v differs from the output by {error:.0e} (at most {EXACT:.0e}); "
        f"if more is done to the values, declare matrix_is_exact=False",
    )
    return error


@torch.no_grad()
def _check_rank(mechanism: Attention, matrix: Tensor, grid: Grid) -> None:
    found, bound = int(rank(matrix, NEGLIGIBLE).max()), mechanism.rank_bound(grid)
    require(found <= bound, f"the matrix has rank {found} at {sized(grid)}, declared at most {bound}: raise max_rank")


def _matrix(mechanism: Attention, given: Inputs) -> Tensor:
    (q, k, v, grid), extra = given.arguments
    return attention_matrix(mechanism, q, k, grid, v=v, channel=None, **extra)


def _mixed(mechanism: Attention, matrix: Tensor, v: Tensor) -> Tensor:
    """Returns `M v`, (B, h, N, d)."""
    if not mechanism.facts.channelwise:
        return matrix @ v
    return (matrix @ v.mT.unsqueeze(-1)).squeeze(-1).mT  # (B, h, d, N, M) by (B, h, d, M, 1)


@torch.no_grad()
def _with_values(mechanism: Attention, given: Inputs, v: Tensor) -> Tensor:
    return given.replace(v=v)(mechanism)


def _why(mechanism: Attention, given: Inputs) -> str:
    """Returns the declaration that the author should add."""
    bias, once, twice = (_with_values(mechanism, given, factor * given["v"]) for factor in (0, 1, 2))
    if not relative_error(twice - bias, 2 * (once - bias)) <= EXACT:
        return "not linear in v, so declare linear_in_values=False"
    if not mechanism.facts.channelwise:
        mechanism.declare(channelwise=True)
        if relative_error(_mixed(mechanism, _matrix(mechanism, given), given["v"]) + bias, once) <= EXACT:
            return "the matrix differs per channel, so declare channelwise=True"
    return "channels of v are mixed, so declare linear_in_values=False"
