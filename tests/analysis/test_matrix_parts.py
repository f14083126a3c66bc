"""The parts of equivalent matrices, and their sum, which is the matrix that probing finds."""

from typing import Any

import pytest
import torch

from linvit import Grid
from linvit.analysis import attention_matrix, attention_statistics
from linvit.analysis.attention_matrix import formed_matrix, matrix_parts
from tests.helpers import assert_near, inputs, mechanism, token_mixers

GRID = Grid((6, 5), num_prefix=1)


@pytest.mark.parametrize(
    ("spec", "channel"),
    [
        *((name, None) for name in token_mixers()),
        ({"name": "focused", "dwc_kernel": 9}, None),
        *((name, channel) for name in ("focused", "inline", "pola", "separable") for channel in (2, "mean")),
    ],
    ids=str,
)
def test_the_sum_of_the_parts_is_the_probed_matrix(spec: Any, channel: Any) -> None:
    module = mechanism(spec, GRID)
    given = inputs(module, GRID)
    want = attention_matrix(module, given.q, given.k, GRID, v=given.v, channel=channel, **given.extra)
    got = formed_matrix(module, given.q, given.k, GRID, v=given.v, channel=channel, **given.extra)
    assert_near(got, want, 1e-10)


@pytest.mark.parametrize("interpolation", ["linear1d", "bilinear2d"])
def test_the_sum_under_spatial_reduction(interpolation: str) -> None:
    grid = Grid((6, 4), (3, 2), num_prefix=1)
    module = mechanism({"name": "focused", "sr_interp": interpolation}, grid)
    given = inputs(module, grid)
    got, want = (matrix(module, given.q, given.k, grid) for matrix in (formed_matrix, attention_matrix))
    assert_near(got, want, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_parts_of_focused_attention_keep_their_bounds_in_every_precision(dtype: torch.dtype) -> None:
    """Figure 5 of FLatten: the kernel stops at the head width, the convolution lifts it to the number of tokens."""
    grid = Grid((7, 7))
    module = mechanism("focused", grid, dtype=dtype)
    given = inputs(module, grid, batch=1, dtype=dtype)
    ranks = {
        name: attention_statistics(part, given.q, given.k, grid, channel=0)["rank"].max().item()
        for name, part in {"": module, **matrix_parts(module)}.items()
    }
    assert ranks["kernel"] <= 8
    assert ranks[""] > 40
    assert ranks.keys() == {"", "kernel", "convolution"}


def test_a_mechanism_without_a_convolution_is_one_piece() -> None:
    for spec in ("softmax", "linear", {"name": "focused", "dwc": False}, {"name": "soft", "conv_size": 0}):
        assert matrix_parts(mechanism(spec, GRID)) == {}
