"""SOFT equals its reference code and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.attention.soft import SoftAttention
from tests.attention.soft_formula import (
    GRIDS,
    check_kernel,
    check_layer,
    kernel_options,
    naive_inverse,
    naive_local,
    naive_parts,
)
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, relative_error

# The reference implementation


@both_precisions
@of_case("soft_attention")
def test_layer_equals_soft(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, {"name": "soft", **kernel_options(golden)}, dtype)


@both_precisions
@of_case("soft_kernel")
def test_mechanism_equals_soft(golden: Golden, dtype: torch.dtype) -> None:
    official = golden.constructor
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = SoftAttention(official["dim"], official["num_heads"], grid, **kernel_options(golden))
    check_kernel(golden, module.to(dtype))


# The formula


def naive_matrix(module: SoftAttention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """`P Y P^T + T(w_h)`, (B, h, N, M)."""
    left, kernel, right = naive_parts(module.kernels, q, k, grid)
    matrix = torch.einsum("bhnl,bhlj,bhmj->bhnm", left, naive_inverse(module.inverse, kernel), right)
    return matrix if module.conv is None else matrix + naive_local(module.conv.weight, grid)


def check(options: dict[str, object], grid: Grid, tolerance: float = 1e-9, **context: int) -> None:
    """Output and the gradients of inputs and parameters equal the formula's."""
    module = mechanism({"name": "soft", "ratio": 2, **options}, grid, **context)
    given = inputs(module, grid, grad=True)
    want = naive_matrix(module, given.q, given.k, grid) @ given.v
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], tolerance)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ratio": 1},
        {"ratio": 4},
        {"ratio": None},
        {"landmarks": "avgpool"},
        {"landmarks": "random"},
        {"landmark_norm": False},
        {"landmarks": "avgpool", "landmark_norm": False},
        {"newton_iters": 4},
        {"newton_iters": 4, "newton_alpha": 0.7},
        {"newton_iters": 4, "inverse_backward": "autograd"},
        {"newton_iters": 4, "max_backtrack": 10, "newton_beta": 0.7, "backtrack_tol": 1.2},
        {"newton_iters": 4, "alpha_scope": "batch"},
        {"ridge": 0.0},
        {"ridge": 0.05, "newton_iters": 4},
        {"conv_size": 0},
        {"conv_size": 5},
        {"inverse": "solve"},
        {"tie_qk": False},
        {"tie_qk": False, "conv_size": 0, "landmarks": "avgpool"},
    ],
    ids=str,
)
def test_equals_formula(options: dict[str, object]) -> None:
    check(options, Grid((4, 6), num_prefix=1))


@pytest.mark.parametrize("ratio", [2, 4])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_formula_on_any_grid(grid: Grid, ratio: int) -> None:
    check({"ratio": ratio}, grid)


@pytest.mark.parametrize("conv_size", [0, 3])
@pytest.mark.parametrize("grid", [Grid((4, 6), (2, 3), num_prefix=1), Grid((3, 4), (7, 7))], ids=str)
def test_equals_formula_under_spatial_reduction(grid: Grid, conv_size: int) -> None:
    check({"tie_qk": False, "conv_size": conv_size}, grid)


def test_equals_formula_with_narrow_keys() -> None:
    check({}, Grid((4, 3)), key_dim=5)


@pytest.mark.parametrize("options", [{}, {"inverse_backward": "autograd", "newton_iters": 3}, {"inverse": "solve"}])
def test_gradients_are_those_of_finite_differences(options: dict[str, object]) -> None:
    grid = Grid((2, 4), num_prefix=1)
    module = mechanism({"name": "soft", "ratio": 2, "newton_iters": 40, **options}, grid, dim=4, num_heads=2)
    q, _, v, _ = inputs(module, grid, batch=1, grad=True)
    assert torch.autograd.gradcheck(lambda q, v, *_: module(q, q, v, grid), (q, v, *module.parameters()))


# The equivalent matrix


# Symmetries


def test_prefix_tokens_are_queries_and_keys_without_a_place() -> None:
    grid = Grid((4, 6), num_prefix=3)
    module = mechanism({"name": "soft", "ratio": 2}, grid)
    q, _, v, _ = inputs(module, grid)
    out = module(q, q, v, grid)
    order = [2, 0, 1, *range(3, 27)]
    assert_near(module(q[:, :, order], q[:, :, order], v[:, :, order], grid), out[:, :, order], 1e-12)
    changed = torch.cat([v[:, :, :1] + 1, v[:, :, 1:]], dim=2)
    assert (module(q, q, changed, grid) - out)[:, :, 3:].abs().amin() > 0

    without = mechanism({"name": "soft", "ratio": 2, "conv_size": 0}, grid)
    without.load_state_dict({name: t for name, t in module.state_dict().items() if not name.startswith("conv.")})
    local = out - without(q, q, v, grid)
    assert local[:, :, :3].eq(0).all()
    assert local[:, :, 3:].abs().amin() > 0


def test_shared_alpha_couples_the_images_of_a_batch() -> None:
    grid = Grid((4, 6))
    coupled, own = (
        mechanism({"name": "soft", "ratio": 2, "newton_iters": 4, "alpha_scope": scope}, grid)
        for scope in ("batch", "head")
    )
    given = inputs(own, grid)
    alone = given.map(lambda x: x[1:])  # alpha is the other image's
    assert_near(alone(own, grid), given(own, grid)[1:], 1e-13)
    assert relative_error(alone(coupled, grid), given(coupled, grid)[1:]) > 1e-4


# Hosts, sizes, errors


def test_layer_projects_keys_only_if_they_are_not_the_queries() -> None:
    grid = Grid((8, 8))
    assert AttentionLayer(32, 4, grid, attention="soft").qkv.out_features == 64
    assert AttentionLayer(32, 4, grid, attention={"name": "soft", "tie_qk": False}).qkv.out_features == 96
    layer = AttentionLayer(32, 4, grid, attention={"name": "soft", "tie_qk": False}, sr_ratio=2)
    assert layer(torch.randn(2, 64, 32), grid).shape == (2, 64, 32)


@pytest.mark.parametrize(("side", "ratio", "size"), [(56, 8, 9), (28, 4, 5), (14, 2, 3), (7, 1, 3)])
def test_defaults_are_the_papers_at_every_stage(side: int, ratio: int, size: int) -> None:
    module = SoftAttention(32, 1, Grid((side, side)))
    assert module.kernels.ratio == ratio
    assert module.conv.kernel_size == (size, size)
    assert module.conv.bias is None
    assert module.kernels.conv.bias is None
    assert module.kernels.conv.weight.shape == (32, 32, ratio, ratio)


def test_tied_keys_on_a_grid_of_their_own_are_refused() -> None:
    grid = Grid((6, 8), (3, 4))
    with pytest.raises(UserError, match=r"got 6x8 for the queries and 3x4 for the keys; .* tie_qk=False"):
        SoftAttention(24, 3, grid)
    module = SoftAttention(24, 3, Grid((6, 8)))
    with pytest.raises(UserError, match="got 6x8 for the queries and 3x4 for the keys"):
        module(torch.randn(1, 3, 48, 8), torch.randn(1, 3, 12, 8), torch.randn(1, 3, 12, 8), grid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"conv_size": 4}, "conv_size must be odd"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linvit.create_attention({"name": "soft", **options}, dim=24, num_heads=3, grid=Grid((14, 14)))
