"""The convolution of the values by head equals its Toeplitz matrices, on any grid."""

import pytest
import torch

from linvit import Grid, UserError
from linvit.attention.ops.value_conv import convolve_heads, head_conv
from tests.attention.soft_formula import GRIDS, naive_local
from tests.helpers import assert_near, assert_same_gradients, perturb, randn


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("grid", [*GRIDS, Grid((4, 6), (2, 3)), Grid((5, 3), (2, 3), num_prefix=1)], ids=str)
def test_equals_one_toeplitz_matrix_per_head(grid: Grid, size: int) -> None:
    conv = perturb(head_conv(3, size).double())
    v = randn(2, 3, grid.num_keys, 4, grad=True)
    want = torch.einsum("hnm,bhmd->bhnd", naive_local(conv.weight, grid), v)
    assert_same_gradients(convolve_heads(conv, v, grid), want, [v, conv.weight], 1e-12)


def test_values_in_half_precision_meet_weights_in_float32() -> None:
    conv = head_conv(3, 3)
    v = randn(2, 3, 12, 4, dtype=torch.bfloat16)
    out = convolve_heads(conv, v, Grid((3, 4)))
    assert out.dtype == torch.bfloat16
    assert_near(out, convolve_heads(conv, v.float(), Grid((3, 4))), 1e-2)


def test_size_zero_is_none_and_even_sizes_are_refused() -> None:
    assert head_conv(3, 0) is None
    with pytest.raises(UserError, match=r"conv_size must be odd and positive, such as 3, 5 or 9, or 0 .*; got 2"):
        head_conv(3, 2)
    with pytest.raises(UserError, match=r"conv_size must be a whole number at least 0 \(0: no convolution\); got -1"):
        head_conv(3, -1)
