"""Linear-angular attention equals Castling-ViT's code, and, option by option, the formula written out naively."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.analysis import attention_matrix
from linvit.attention.linear_angular import LinearAngularAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism

GRIDS = [Grid((5, 7), num_prefix=2), Grid((2, 3)), Grid((1, 20), num_prefix=1)]  # the second of fewer tokens than taps
OPTIONS = [
    {},
    {"eps": 0.0},
    {"eps": 2.0},  # above some of the norms
    {"half": "mean"},
    {"out_norm": False},
    {"out_norm": False, "half": "mean", "dconv": "grid2d"},
    {"dconv": "grid2d"},
    {"dconv": "grid2d", "res_kernel_size": 3},
    {"res_kernel_size": 1},
    {"res_kernel_size": 5},
    {"sparse_reg": True},
    {"sparse_reg": True, "sparse_threshold": 0.1},
    {"sparse_reg": True, "sparse_threshold": 0.0, "half": "mean", "out_norm": False},
]


# The reference implementation


@both_precisions
@of_case("castling")
def test_equals_castling_vit(golden: Golden, dtype: torch.dtype) -> None:
    """The reference adds the sparse map whenever it is asked for; ours only while training."""
    (x,) = given = golden.inputs(dtype)
    official = golden.constructor
    spec = {
        "name": "linear_angular",
        "res_kernel_size": official["res_kernel_size"],
        "sparse_reg": official["sparse_reg"],
        "eps": 0.0,
    }
    grid = Grid((1, x.shape[1]))
    layer = AttentionLayer(
        official["in_channels"], official["num_heads"], grid, attention=spec, qkv_bias=official["qkv_bias"]
    ).to(dtype)
    names = {"dconv.weight": "mechanism.dconv.weight"}
    layer.load_state_dict({names.get(name, name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer.train(official["sparse_reg"])(x, grid), given)
    for name in golden.parameters():
        golden.check(f"grad_param.{name}", layer.get_parameter(names.get(name, name)).grad)


# The formula


def shift_matrix(module: LinearAngularAttention, grid: Grid) -> Tensor:
    """T of every head, (h, N, N): `T[i, j] = w[j - i + r // 2]` along the sequence, or the same in both directions."""
    taps = module.dconv.weight[:, 0]  # (h, r, 1) or (h, r, r)
    reach, prefix, (height, width) = taps.shape[1] // 2, grid.num_prefix, grid.size
    matrix = torch.zeros(module.num_heads, grid.num_queries, grid.num_queries, dtype=taps.dtype)
    if not module.on_grid:
        for i, j in itertools.product(range(grid.num_queries), repeat=2):
            if abs(j - i) <= reach:
                matrix[:, i, j] = taps[:, j - i + reach, 0]
        return matrix
    places = list(itertools.product(range(height), range(width)))
    for (i, (row, column)), (j, (other_row, other_column)) in itertools.product(enumerate(places), repeat=2):
        down, right = other_row - row, other_column - column
        if max(abs(down), abs(right)) <= reach:
            matrix[:, prefix + i, prefix + j] = taps[:, down + reach, right + reach]
    return matrix


def naive(module: LinearAngularAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Steps a to f of the reference, with the N x N matrix."""

    def length(x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True).sqrt().clamp_min(module.eps)

    tokens = q.shape[2]
    eye = torch.eye(tokens, dtype=q.dtype)
    cosines = torch.einsum("bhnd,bhmd->bhnm", q, k) / length(q) / length(k).mT
    bracket = cosines / math.pi + (eye if module.own_half else torch.full_like(eye, 1 / tokens)) / 2
    if module.sparse_reg and module.training:
        powers = torch.exp(torch.einsum("bhnd,bhmd->bhnm", q, k) / math.sqrt(q.shape[3]))
        softmax = powers / powers.sum(-1, keepdim=True)
        bracket = bracket + torch.where(softmax > module.sparse_threshold, softmax, 0.0)
    y = torch.einsum("bhnm,bhmd->bhnd", bracket, v)
    if module.unit_outputs:
        y = y / length(y)
    return y + torch.einsum("hnm,bhmd->bhnd", shift_matrix(module, grid), v)


def check(options: dict[str, object], grid: Grid, training: bool, **context: int) -> None:
    """Output and the gradients of inputs and parameters equal the formula's."""
    module = mechanism({"name": "linear_angular", **options}, grid, **context).train(training)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_formula(options: dict[str, object]) -> None:
    """While training: in evaluation `sparse_reg` does nothing."""
    check(options, Grid((4, 3), num_prefix=1), training=True)


@pytest.mark.parametrize("dconv", ["seq1d", "grid2d"])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_formula_on_any_grid(grid: Grid, dconv: str) -> None:
    check({"dconv": dconv, "res_kernel_size": 5}, grid, training=False)


def test_equals_formula_with_narrow_keys() -> None:
    check({"sparse_reg": True}, Grid((4, 3)), training=True, key_dim=5)


# The sparse branch


@pytest.mark.parametrize(("sparse_reg", "want"), [(False, "O(N)"), (True, "O(N^2)")])
def test_sparse_branch_is_declared_quadratic(sparse_reg: bool, want: str) -> None:
    assert mechanism({"name": "linear_angular", "sparse_reg": sparse_reg}, Grid((2, 3))).facts.complexity == want


def test_sparse_branch_is_active_only_while_training() -> None:
    grid = Grid((3, 4))
    sparse, plain = (mechanism({"name": "linear_angular", "sparse_reg": s}, grid) for s in (True, False))
    given = inputs(sparse, grid)
    assert torch.equal(given(sparse, grid), given(plain, grid))
    assert (given(sparse.train(), grid) - given(plain.train(), grid)).abs().max() > 1e-3


def test_weights_at_the_threshold_are_dropped() -> None:
    """Softmax over four equal keys gives exactly 1/4 each: strictly greater, so none stays."""
    grid = Grid((2, 2))
    modules = [
        mechanism({"name": "linear_angular", "sparse_reg": True, "sparse_threshold": t}, grid).train()
        for t in (0.25, 0.2499)
    ]
    plain = mechanism("linear_angular", grid)
    q, k, v, _ = inputs(plain, grid)
    same = torch.ones_like(k)
    at, below = (module(q, same, v, grid) for module in modules)
    assert torch.equal(at, plain(q, same, v, grid))
    assert (below - at).abs().max() > 1e-3


# The equivalent matrix


@pytest.mark.parametrize("options", [{}, {"out_norm": False, "dconv": "grid2d"}, {"sparse_reg": True}], ids=str)
def test_matrix_gives_the_output(options: dict[str, object]) -> None:
    grid = Grid((3, 4), num_prefix=1)
    module = mechanism({"name": "linear_angular", **options}, grid)
    assert module.facts.linear_in_values == (not module.unit_outputs)
    given = inputs(module, grid)
    matrix = attention_matrix(module, given.q, given.k, grid, v=given.v)
    assert_near(matrix @ given.v, given(module, grid), 1e-12)
    assert_near(matrix, module.attention_matrix(given.q, given.k, given.v, grid), 1e-12)
    module.train()
    trained = module.attention_matrix(given.q, given.k, given.v, grid)
    assert_near(trained @ given.v, given(module, grid), 1e-12)


# Prefix tokens, vectors of zeros, errors


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float16, 1e-6), (torch.float64, 0.0)], ids=str)
def test_vectors_of_zeros_give_finite_output_and_gradients(dtype: torch.dtype, eps: float) -> None:
    grid = Grid((3, 4))
    module = mechanism({"name": "linear_angular", "eps": eps}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    given.q[:, :, 0] = 0
    given.k[:, :, 1] = 0
    given.q[:, :, 2] = given.v[:, :, 2] = 0  # y is 0 as well
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, grid)
    out.float().sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])
