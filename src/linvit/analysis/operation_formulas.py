"""Operators whose operations depend on more than the number of their elements: powers, norms, pooling, inverses.

Inverses and singular values count the multiply-accumulates of the usual algorithms for an m x n matrix, m >= n (Golub &
Van Loan, "Matrix Computations", 4th edition: Chapter 3 and Section 8.6). Singular values are found by iteration, so
their count is an estimate; their vectors are counted whether or not they are asked for.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Count(NamedTuple):
    """Operations of one call.

    Attributes:
        products: Multiply-accumulates that torch's own counter leaves out.
        elementwise: Operations on single elements.
        transcendental: Evaluations of transcendental functions.
    """

    products: int = 0
    elementwise: int = 0
    transcendental: int = 0


Formula = Callable[[Sequence[Any], dict[str, Any], list[Tensor]], Count]  # arguments, keywords, outputs


def _sum(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """`a + alpha b`."""
    alpha = args[2] if len(args) > 2 else kwargs.get("alpha", 1)
    return Count(0, out[0].numel() * (1 if alpha == 1 else 2))


def _product(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """One operation, or four products and two sums of real numbers."""
    return Count(0, out[0].numel() * (6 if out[0].is_complex() else 1))


def _power(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """Squares and cubes are products."""
    size, exponent = out[0].numel(), args[1]
    if isinstance(exponent, int | float) and exponent in (1, 2, 3):
        return Count(0, size * int(exponent - 1))
    return Count(0, 0, size)


def _convolution(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """The bias; torch counts the products."""
    return Count(0, 0 if args[2] is None else out[0].numel())


def _norm(weight: int) -> Formula:
    """Sum, difference, square, sum and quotient, then weight and bias, the arguments `weight` and `weight + 1`."""

    def count(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
        affine = sum(parameter is not None for parameter in args[weight : weight + 2])
        return Count(0, (5 + affine) * out[0].numel(), out[2].numel())

    return count


def _pooling(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """One operation per element of each window."""
    sides = args[1] if len(args[1]) == 2 else (args[1][0], args[1][0])
    return Count(0, math.prod(sides) * out[0].numel())


def _fused_attention(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """The scaling of the queries, and the softmax: maximum, its difference, sum and quotient."""
    pairs = args[0].shape[:3].numel() * args[1].shape[2]
    return Count(0, args[0].numel() + 4 * pairs, pairs)


def _matrix_vector(matrix: int) -> Formula:
    """A multiply-accumulate for every element of the argument with that index."""
    return lambda args, kwargs, out: Count(args[matrix].numel(), out[0].numel() if matrix else 0)


def _distances(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """`||a||^2 - 2 a b^T + ||b||^2`, and its root."""
    a, b = args[0], args[1]
    pairs = out[0].numel()
    return Count(pairs * a.shape[-1], 2 * (a.numel() + b.numel()) + 3 * pairs, pairs)


def _distances_one_by_one(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
    """Differences, their squares, absolute values or powers, and sums or maxima; the root."""
    pairs, order = out[0].numel(), args[2]
    entries = pairs * args[0].shape[-1]
    if order in (0, 1, math.inf):
        return Count(0, 3 * entries)
    return Count(0, 3 * entries, pairs) if order == 2 else Count(0, 2 * entries, entries + pairs)


def _factorisation(macs: Callable[[int, int], float]) -> Formula:
    """MACs of an m x n matrix from `macs(m, n)`, m >= n."""

    def count(args: Sequence[Any], kwargs: dict[str, Any], out: list[Tensor]) -> Count:
        *batch, rows, columns = args[0].shape
        return Count(math.prod(batch) * round(macs(max(rows, columns), min(rows, columns))))

    return count


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(["add", "sub", "rsub"], _sum),
    "mul": _product,
    "pow": _power,
    "convolution": _convolution,
    "native_layer_norm": _norm(2),
    "native_group_norm": _norm(1),
    **dict.fromkeys(["avg_pool2d", "max_pool2d_with_indices"], _pooling),
    **dict.fromkeys(
        [f"scaled_dot_product_{kernel}_attention" for kernel in ("flash", "efficient", "cudnn")]
        + ["scaled_dot_product_flash_attention_for_cpu"],
        _fused_attention,
    ),
    "mv": _matrix_vector(0),
    "dot": _matrix_vector(0),
    "addmv": _matrix_vector(1),
    "euclidean_dist": _distances,
    "cdist_forward": _distances_one_by_one,
    "linalg_inv_ex": _factorisation(lambda m, n: n**3),
    "linalg_pinv": _factorisation(lambda m, n: 8 * m * n**2 + 4 * n**3),  # singular vectors and their product
    "linalg_svd": _factorisation(lambda m, n: 7 * m * n**2 + 4 * n**3),
}
"""By the name of the operator without underscores at its ends."""
