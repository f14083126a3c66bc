"""Linear attention equals the formula of Katharopoulos et al., feature map by feature map."""

import pytest
import torch
from torch import Tensor

from linvit import Grid
from linvit.analysis import attention_matrix
from linvit.attention.linear import LinearAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)


def naive(module: LinearAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`o_n = sum_m (phi(q_n).phi(k_m)) v_m / (sum_m phi(q_n).phi(k_m) + eps)`, one query at a time.

    Without `normalize` the quotient is by (N M)^(1/4).
    """

    def phi(x: Tensor) -> Tensor:
        if module.feature_map == "relu":
            return torch.clamp(x, min=0) + module.relu_eps
        return torch.where(x > 0, x + 1, torch.exp(x))

    n_q, n_k = q.shape[2], k.shape[2]
    rows = []
    for n in range(q.shape[2]):
        weights = (phi(q[:, :, n : n + 1]) * phi(k)).sum(-1)  # (B, h, M)
        total = (weights[..., None] * v).sum(2)
        rows.append(total / (weights.sum(-1, keepdim=True) + module.eps if module.normalize else (n_q * n_k) ** 0.25))
    return torch.stack(rows, dim=2)


OPTIONS = [
    {},
    {"eps": 0.5},
    {"feature_map": "relu"},
    {"feature_map": "relu", "relu_eps": 0.25},
    {"feature_map": "relu", "relu_eps": 1e-6, "eps": 0.0},
    {"normalize": False},
    {"normalize": False, "feature_map": "relu", "relu_eps": 0.25},
]
GRIDS = [GRID, Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "linear", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-10)


@both_precisions
@of_case("lra_linear")
def test_equals_nystromformers_linear_attention(golden: Golden, dtype: torch.dtype) -> None:
    """Without a denominator; the mask removes keys, and so do zeros in place of their values."""
    *given, mask = golden.inputs(dtype)
    q, k, v = given
    grid = Grid((1, q.shape[2]))
    module = LinearAttention(q.shape[1] * q.shape[3], q.shape[1], grid, normalize=False)
    out = module(q, k, v * mask.detach()[:, None, :, None], grid)
    golden.check("output", out)
    (out * golden.tensors["probe"].to(dtype)).sum().backward()
    for name, tensor in zip("qkv", given, strict=True):
        golden.check(f"grad_input.{name}", tensor.grad)


def test_matrix_without_a_denominator() -> None:
    """The factors and the probed matrix are `Q K^T / (N M)^(1/4)`."""
    module = mechanism({"name": "linear", "normalize": False}, GRID)
    given = inputs(module, GRID)
    matrix = module.features(given.q) @ module.features(given.k).mT / (GRID.num_queries * GRID.num_keys) ** 0.25
    assert_near(attention_matrix(module, given.q, given.k, GRID), matrix, 1e-12)
    left, right = module.factors(given.q, given.k, GRID)
    assert_near(left @ right.mT, matrix, 1e-12)


def test_equals_formula_with_narrow_keys() -> None:
    module = mechanism("linear", GRID, key_dim=3)
    given = inputs(module, GRID)
    assert_near(given(module, GRID), naive(module, given.q, given.k, given.v), 1e-12)


@pytest.mark.parametrize("feature_map", ["elu", "relu"])
def test_gradients_are_those_of_finite_differences(feature_map: str) -> None:
    grid = Grid((2, 3))
    module = mechanism({"name": "linear", "feature_map": feature_map}, grid, dim=4, num_heads=2)
    given = inputs(module, grid, batch=1)
    q, k, v, _ = given.map(lambda x: (x + 0.2 * x.sign()).requires_grad_())  # relu has no derivative at 0
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, grid), (q, k, v))


def test_query_without_a_positive_entry_gives_zero_or_the_mean() -> None:
    grid = Grid((3, 4))
    zero = mechanism({"name": "linear", "feature_map": "relu"}, grid)
    mean = mechanism({"name": "linear", "feature_map": "relu", "relu_eps": 1e-6, "eps": 0.0}, grid)
    q, k, v, _ = inputs(zero, grid)
    q[:, :, 0] = -1
    k = torch.ones_like(k)
    assert (zero(q, k, v, grid)[:, :, 0] == 0).all()
    assert_near(mean(q, k, v, grid)[:, :, 0], v.mean(2), 1e-12)


def test_queries_far_below_zero_keep_their_digits() -> None:
    """As a sum, `elu(x) + 1` is 0 there in float32."""
    of = mechanism("linear", GRID, dtype=torch.float32)
    q, k, v = inputs(of, GRID)[:3]
    q = q - 18
    assert_near(of(q.float(), k.float(), v.float(), GRID), naive(of, q, k, v), 1e-5)
