"""Spatial reduction equals PVT's and PVTv2's, on any grid, and keeps prefix tokens out of the convolution."""

import pytest
import torch
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.layers.spatial_reduction import PooledReduction, StridedReduction, reducible_spec
from linvit.registry import Spec
from tests.golden_files import Golden, attention_layer, both_precisions, check_layer_gradients, of_case
from tests.helpers import assert_near, perturb, randn


@both_precisions
@of_case("pvt_sra", "pvt_v2_linear_sra")
def test_equals_pvt(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = inputs = golden.inputs(dtype)
    size = (golden.kwargs["H"], golden.kwargs["W"])
    layer = attention_layer(golden, "softmax", size, dtype)
    golden.check_call(layer(x, Grid(size)), inputs)
    check_layer_gradients(golden, layer)


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 9)])
@pytest.mark.parametrize("num_prefix", [0, 1, 2])
def test_strided_merges_patches_and_keeps_prefix(size: tuple[int, int], num_prefix: int) -> None:
    grid = Grid(size, num_prefix=num_prefix)
    reduction = perturb(StridedReduction(6, 2).double())
    x = randn(3, grid.num_queries, 6)
    got = reduction(x, grid)

    height, width = reduction.reduced(size)
    patches = x[:, num_prefix:].reshape(3, *size, 6)
    merged = [
        torch.einsum("bijc,ocij->bo", patches[:, 2 * r : 2 * r + 2, 2 * c : 2 * c + 2], reduction.conv.weight)
        + reduction.conv.bias
        for r in range(height)
        for c in range(width)
    ]
    want = torch.cat([x[:, :num_prefix], torch.stack(merged, 1)], 1)
    want = F.layer_norm(want, (6,), reduction.norm.weight, reduction.norm.bias, eps=1e-5)
    assert got.shape[1] == num_prefix + height * width
    assert_near(got, want, 1e-12)


@pytest.mark.parametrize("size", [(6, 9), (2, 2), (7, 5)])
def test_pooled_gives_the_same_count_for_any_grid(size: tuple[int, int]) -> None:
    grid = Grid(size, num_prefix=1)
    reduction = perturb(PooledReduction(6, 3).double())
    x = randn(2, grid.num_queries, 6)
    got = reduction(x, grid)

    plane = x[:, 1:].reshape(2, *size, 6)
    cells = []
    for row in range(3):
        for column in range(3):
            rows = slice(row * size[0] // 3, -(-(row + 1) * size[0] // 3))
            columns = slice(column * size[1] // 3, -(-(column + 1) * size[1] // 3))
            cells.append(plane[:, rows, columns].mean((1, 2)))
    patches = torch.stack(cells, 1) @ reduction.conv.weight[:, :, 0, 0].T + reduction.conv.bias
    want = F.layer_norm(torch.cat([x[:, :1], patches], 1), (6,), reduction.norm.weight, reduction.norm.bias)
    assert reduction.reduced(size) == (3, 3)
    assert_near(got, F.gelu(want), 1e-12)


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        ("softmax", True),
        ("nystrom", True),
        ({"name": "nystrom", "conv_kernel": 3}, False),
        ("linear_angular", False),
        ("soft", False),
        ({"name": "soft", "tie_qk": False}, True),
        ({"name": "poly_nl", "project_q": True}, True),
    ],
    ids=str,
)
def test_options_decide_whether_keys_can_be_reduced(spec: Spec, want: bool) -> None:
    torch.manual_seed(0)
    assert reducible_spec(spec, 24, 3, Grid((8, 8))) == want
    drawn = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), drawn)  # looking draws no number
    layer = AttentionLayer(24, 3, Grid((8, 8)), attention=spec, sr_ratio=2, sr_required=False)
    assert (layer.sr is not None) == want
    assert layer(randn(2, 64, 24, dtype=torch.float32), Grid((8, 8))).isfinite().all()
    if not want:
        with pytest.raises(UserError, match=r"cannot be reduced; use sr_ratio=1|use no spatial reduction"):
            AttentionLayer(24, 3, Grid((8, 8)), attention=spec, sr_pool=2)
