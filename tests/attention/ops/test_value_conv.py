"""The depthwise convolution of the values equals its Toeplitz matrices, on any grid."""

import pytest
import torch

from linvit import Grid, UserError
from linvit.attention.ops.value_conv import convolve_values, value_conv
from tests.attention.soft_formula import naive_local
from tests.helpers import assert_near, assert_same_gradients, perturb, randn

GRIDS = [Grid((4, 3)), Grid((1, 5), num_prefix=2), Grid((4, 6), (2, 3)), Grid((5, 3), (2, 3), num_prefix=1)]


@pytest.mark.parametrize("side", [1, 5])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_one_toeplitz_matrix_per_channel(grid: Grid, side: int) -> None:
    conv = perturb(value_conv("lepe_kernel", 12, side).double())
    v = randn(2, 3, grid.num_keys, 4, grad=True)
    matrices = naive_local(conv.weight, grid).unflatten(0, (3, 4))  # (h, d, N, M)
    bias = conv.bias.view(3, 1, 4) * (torch.arange(grid.num_queries) >= grid.num_prefix)[:, None]
    want = torch.einsum("hdnm,bhmd->bhnd", matrices, v) + bias
    assert_same_gradients(convolve_values(conv, v, grid), want, [v, conv.weight, conv.bias], 1e-12)


def test_output_is_of_the_values_dtype_under_autocast() -> None:
    conv = value_conv("lepe_kernel", 12, 3)
    v = randn(2, 3, 12, 4, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = convolve_values(conv, v, Grid((3, 4)))
    assert out.dtype == torch.float32
    assert_near(out, convolve_values(conv, v, Grid((3, 4))), 2e-2)


def test_side_zero_is_none_and_even_sides_are_refused() -> None:
    assert value_conv("lepe_kernel", 12, 0) is None
    with pytest.raises(UserError, match=r"lepe_kernel must be odd and positive, such as 3 or 5, or 0 .*; got 2"):
        value_conv("lepe_kernel", 12, 2)
