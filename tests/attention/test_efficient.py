"""Efficient attention equals the code of Shen et al. and the formula written out with its N x M matrix."""

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.efficient import EfficientAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids, randn

GRIDS = [
    Grid((3, 5), kv_size=(2, 3), num_prefix=1),
    Grid((7, 9), num_prefix=2),
    Grid((1, 50)),
    Grid((50, 1)),
    Grid((13, 31)),
]


def naive_matrix(module: EfficientAttention, q: Tensor, k: Tensor) -> Tensor:
    """`M_ij = sum_c Q_ic K_jc`, channel by channel, (B, h, N, M)."""
    if module.normalization == "softmax":
        queries = q.exp() / sum(q[..., c : c + 1].exp() for c in range(q.shape[3]))
        keys = k.exp() / sum(k[:, :, j : j + 1].exp() for j in range(k.shape[2]))
    else:
        queries, keys = q / math.sqrt(k.shape[2]), k / math.sqrt(k.shape[2])
    return sum(queries[..., c, None] * keys[..., None, :, c] for c in range(q.shape[3]))


def naive(module: EfficientAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`o_i = sum_j M_ij v_j`."""
    return torch.einsum("bhij,bhjd->bhid", naive_matrix(module, q, k), v)


@both_precisions
@of_case("efficient_attention")
def test_equals_the_official_code(golden: Golden, dtype: torch.dtype) -> None:
    """1x1 convolutions around the mechanism, and the module's own residual."""
    official = golden.constructor
    given = golden.inputs(dtype)
    weights = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    (x,) = given
    grid, heads = Grid(tuple(x.shape[2:])), official["head_count"]

    def project(tensor: Tensor, name: str) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W)."""
        return F.conv2d(tensor, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def split(name: str) -> Tensor:
        """(B, C, H, W) -> (B, h, N, d)."""
        return project(x, name).flatten(2).unflatten(1, (heads, -1)).mT

    module = EfficientAttention(official["value_channels"], heads, grid, key_dim=official["key_channels"] // heads)
    out = module(split("queries"), split("keys"), split("values"), grid)
    plane = out.mT.flatten(1, 2).unflatten(2, grid.size)  # (B, C', H, W)
    golden.check_call(project(plane, "reprojection") + x, given)
    assert set(golden.named("grad_param.")) == {f"grad_param.{name}" for name in weights}
    for name, weight in weights.items():
        golden.check(f"grad_param.{name}", weight.grad)


@pytest.mark.parametrize(
    ("options", "grid"), options_then_grids([*itertools.product(["softmax", "scaling"], [None, 3, 12])], GRIDS), ids=str
)
def test_equals_formula(options: tuple[str, int | None], grid: Grid) -> None:
    normalization, key_dim = options
    module = mechanism({"name": "efficient", "normalization": normalization}, grid, key_dim=key_dim)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-11)


@pytest.mark.parametrize("normalization", ["softmax", "scaling"])
def test_gradients_are_those_of_finite_differences(normalization: str) -> None:
    grid = Grid((2, 3), kv_size=(1, 4))
    module = mechanism({"name": "efficient", "normalization": normalization}, grid, dim=4, num_heads=2)
    q, k, v, _ = inputs(module, grid, batch=1, grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, grid), (q, k, v))


# Claims of the paper


# Zero tokens and large entries


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_large_entries_choose_one_channel_and_one_key_each(dtype: torch.dtype) -> None:
    """With thousands between the entries the softmaxes are choices; the exponentials themselves would overflow."""
    grid = Grid((3, 4))
    module = mechanism("efficient", grid, dtype=dtype)
    q, k, v, _ = inputs(module, grid, dtype=dtype)
    levels_q, levels_k = q.argsort(-1).argsort(-1), k.argsort(-2).argsort(-2)  # 0, 1, 2 ... without ties
    given = [x.to(dtype).requires_grad_() for x in (2048 * levels_q, 2048 * levels_k, v)]
    out = module(*given, grid)
    channel, key = levels_q.argmax(-1), levels_k.argmax(-2)  # (B, h, N), (B, h, dk)
    chosen = key.gather(2, channel)[..., None].expand_as(out)  # the key that the query's channel points at
    assert torch.equal(out, v.gather(2, chosen))
    out.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in given)


# The width of the keys


@pytest.mark.parametrize(("key_ratio", "want"), [(1.0, 8), (0.5, 4), (0.3, 2), (2, 16), (0.07, 1)])
def test_ratio_sets_the_width_of_the_keys(key_ratio: float, want: int) -> None:
    grid = Grid((9, 11))
    module = mechanism({"name": "efficient", "key_ratio": key_ratio}, grid)
    q, k, v, _ = inputs(module, grid)
    assert q.shape[-1] == k.shape[-1] == module.rank_bound(grid) == want
    assert torch.equal(module(q, k, v, grid), mechanism("efficient", grid, key_dim=want)(q, k, v, grid))


def test_hosts_project_as_many_keys_as_the_ratio_says() -> None:
    layer = AttentionLayer(24, 3, Grid((3, 4)), attention={"name": "efficient", "key_ratio": 0.5})
    assert layer.qkv.weight.shape == (12 + 12 + 24, 24)
    assert layer(randn(2, 12, 24, dtype=torch.float32), Grid((3, 4))).shape == (2, 12, 24)


# Errors


def test_ratio_that_leaves_no_keys_is_refused() -> None:
    with pytest.raises(UserError, match=r"key_ratio=0.05 leaves no channel of the keys, which have 8 per head"):
        EfficientAttention(24, 3, Grid((4, 4)), key_ratio=0.05)


def test_two_widths_of_the_keys_are_refused() -> None:
    with pytest.raises(UserError, match=r"key_dim=4 and key_ratio=0.5 both set the width of the keys; leave one"):
        EfficientAttention(24, 3, Grid((4, 4)), key_dim=4, key_ratio=0.5)
