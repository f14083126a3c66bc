"""Rank, effective rank and entropy on matrices whose answer is known."""

import math

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.analysis import attention_matrix, rank
from linvit.analysis.attention_matrix import attention_factors
from linvit.analysis.rank import effective_rank_of, rank_of, rank_tolerance, singular_values, singular_values_of_product
from linvit.registry import attentions
from tests.helpers import effective_rank, entropy, inputs, low_rank, mechanism, options_then_grids, own_names, randn

PRECISIONS = [torch.float32, torch.float64]
both = pytest.mark.parametrize("dtype", PRECISIONS, ids=["float32", "float64"])


def product(rows: int, columns: int, inner: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A product of random factors, formed in the given dtype: of rank `inner`."""
    return randn(rows, inner, seed=seed, dtype=dtype) @ randn(inner, columns, seed=seed + 1, dtype=dtype)


@both
@pytest.mark.parametrize(("rows", "columns", "inner"), [(196, 196, 64), (49, 196, 8), (196, 49, 1), (20, 10, 10)])
def test_rank_of_a_product_is_its_inner_width(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    assert rank(product(rows, columns, inner, dtype)) == inner


@both
@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1e6, 1e30])
def test_scale_changes_nothing(scale: float, dtype: torch.dtype) -> None:
    matrix = product(30, 20, 5, dtype).abs()
    scaled = matrix * scale
    assert rank(scaled) == rank(matrix)
    torch.testing.assert_close(effective_rank(scaled), effective_rank(matrix), rtol=1e-5, atol=0)
    torch.testing.assert_close(entropy(scaled), entropy(matrix), rtol=1e-5, atol=0)


@both
def test_zero_matrix_has_rank_zero(dtype: torch.dtype) -> None:
    zero = torch.zeros(6, 4, dtype=dtype)
    assert rank(zero) == effective_rank(zero) == entropy(zero) == 0


@both
def test_identity_has_full_rank_by_every_measure(dtype: torch.dtype) -> None:
    eye = torch.eye(17, dtype=dtype)
    assert rank(eye) == 17
    assert effective_rank(eye).item() == pytest.approx(17)


def test_effective_rank_is_the_exponential_of_the_entropy_of_singular_values() -> None:
    values = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    left, _ = torch.linalg.qr(randn(6, 4))
    right, _ = torch.linalg.qr(randn(5, 4, seed=1))
    want = 2 ** (0.5 * 1 + 0.25 * 2 + 2 * 0.125 * 3)
    assert effective_rank(left @ values.diag() @ right.mT).item() == pytest.approx(want)


@pytest.mark.parametrize("measure", [rank, effective_rank, entropy])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_non_finite_matrix_gives_nan_and_leaves_the_others_alone(measure: object, bad: float) -> None:
    stack = product(8, 8, 3, torch.float64).abs().repeat(3, 1, 1)
    good = measure(stack[0])
    stack[1, 2, 3] = bad
    result = measure(stack)
    assert result[1].isnan()
    assert result[0] == result[2] == good
    assert measure(stack[1]).isnan()


@pytest.mark.parametrize("measure", [rank, effective_rank])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_refused(measure: object, dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="form the matrix in float32 or float64"):
        measure(torch.ones(3, 3, dtype=dtype))


@both
def test_entropy_runs_from_one_key_to_all_alike(dtype: torch.dtype) -> None:
    assert entropy(torch.eye(9, dtype=dtype)) == 0
    assert entropy(torch.full((5, 9), 0.2, dtype=dtype)).item() == pytest.approx(math.log(9))
    half = torch.cat([torch.eye(4, dtype=dtype), torch.full((4, 4), 0.25, dtype=dtype)])
    assert entropy(half).item() == pytest.approx(math.log(4) / 2)


def test_entropy_of_negative_weights_counts_their_size() -> None:
    matrix = randn(6, 8)
    torch.testing.assert_close(entropy(matrix), entropy(matrix.abs()))
    torch.testing.assert_close(entropy(3 * matrix), entropy(matrix))


# Thin factors

NEGLIGIBLE = 1e-10
"""As the conformance kit has it: an inverse by iteration leaves singular values of 1e-12, where rounding decides."""


@pytest.mark.parametrize(
    ("name", "grid"), options_then_grids(own_names(attentions), [Grid((6, 7), num_prefix=1), Grid((2, 3))]), ids=str
)
def test_factors_give_the_singular_values_of_the_matrix(name: str, grid: Grid) -> None:
    """More tokens than factors have columns, and fewer."""
    module = mechanism(low_rank(name), grid, dtype=torch.float32)
    given = inputs(module, grid, dtype=torch.float32)
    factors = attention_factors(module, given.q, given.k, grid)
    if factors is None:
        assert module.factors(given.q, given.k, grid) is None
        return
    got = singular_values_of_product(*factors)
    want = singular_values(attention_matrix(module, given.q, given.k, grid, v=given.v, **given.extra))
    assert got.shape[-1] <= min(grid.num_queries, grid.num_keys, factors[0].shape[-1])
    rounding = rank_tolerance(grid.num_queries, grid.num_keys) * want.amax(-1, keepdim=True)
    assert ((got - want[..., : got.shape[-1]]).abs() <= rounding).all()
    assert (want[..., got.shape[-1] :] <= rounding).all()
    assert torch.equal(rank_of(got, NEGLIGIBLE), rank_of(want, NEGLIGIBLE))
    torch.testing.assert_close(effective_rank_of(got), effective_rank_of(want), rtol=1e-9, atol=0)


def test_factors_of_uneven_columns_lose_nothing() -> None:
    """Columns of 1e150 and 1e-150 whose products count alike: the factors' own norms are no measure."""
    left, right = randn(30, 5), randn(20, 5, seed=1)
    scales = torch.tensor([1e-150, 1e-8, 1.0, 1e8, 1e150], dtype=torch.float64)
    want = singular_values(left @ right.mT)[:5]
    torch.testing.assert_close(singular_values_of_product(left * scales, right / scales), want, rtol=1e-12, atol=0)


def test_small_singular_values_are_seen_down_to_the_tolerance() -> None:
    """What eigenvalues of Gram matrices would lose from 1e-8 on."""
    (u, _), (w, _) = torch.linalg.qr(randn(60, 6)), torch.linalg.qr(randn(40, 6, seed=1))
    values = torch.logspace(0, -14, 6, dtype=torch.float64)
    got = singular_values_of_product(u * values, w)
    assert rank_of(got, rank_tolerance(60, 40)) == 5
    assert rank_of(got, 1e-15) == 6
    torch.testing.assert_close(got, values, rtol=1e-2, atol=0)


def test_columns_of_zeros_and_non_finite_factors() -> None:
    left, right = randn(3, 8, 4), randn(3, 7, 4, seed=1)
    left[0, :, 1:] = 0
    right[1, 2, 3] = torch.inf
    values = singular_values_of_product(left, right)
    assert rank_of(values, 1e-12)[[0, 2]].tolist() == [1, 4]
    assert values[1].isnan().all()
    assert not values[[0, 2]].isnan().any()
