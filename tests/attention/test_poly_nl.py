"""Poly-NL equals its formula, option by option, alone and as a layer on its own input."""

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.poly_nl import PolyNLAttention
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids, perturb, randn

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)
OPTIONS = [
    {},
    {"reduce": "sum"},
    {"alpha_beta": True},
    {"alpha_beta": True, "reduce": "sum"},
    {"project_q": True},
    {"project_q": True, "alpha_beta": True, "reduce": "sum"},
]
options_ = pytest.mark.parametrize("options", OPTIONS, ids=str)


# The formula


def naive(module: PolyNLAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`q_n * mean_t k_t v_t`, or the sum; with alpha and beta `alpha q_n + beta` times that. On (..., N, channels)."""
    total = torch.zeros_like(v[..., 0, :])
    for t in range(k.shape[-2]):
        total = total + k[..., t, :] * v[..., t, :]
    if module.reduce == "mean":
        total = total / k.shape[-2]
    rows = [q[..., n, :] * total for n in range(q.shape[-2])]
    if module.alpha is not None:
        rows = [module.alpha * q[..., n, :] + module.beta * row for n, row in enumerate(rows)]
    return torch.stack(rows, dim=-2)


@pytest.mark.parametrize(
    ("options", "grid"),
    options_then_grids(OPTIONS, [GRID, Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]),
    ids=str,
)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "poly_nl", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@options_
def test_gradients_are_those_of_finite_differences(options: dict[str, object]) -> None:
    grid = Grid((2, 2), kv_size=(1, 3))
    module = mechanism({"name": "poly_nl", **options}, grid, dim=4, num_heads=2)
    q, k, v, _ = inputs(module, grid, batch=1, grad=True)
    assert torch.autograd.gradcheck(lambda q, k, v, *_: module(q, k, v, grid), (q, k, v, *module.parameters()))


def test_defaults_are_those_of_the_paper() -> None:
    module = PolyNLAttention(24, 3, GRID)
    assert (module.host.project, module.reduce) == ("kv", "mean")
    assert not list(module.parameters())
    learned = dict(PolyNLAttention(24, 3, GRID, alpha_beta=True).named_parameters())
    assert {name: p.tolist() for name, p in learned.items()} == {"alpha": [1.0], "beta": [1.0]}


# As a layer


def poly_layer(grid: Grid, options: dict[str, object], bias: bool) -> AttentionLayer:
    spec = {"name": "poly_nl", **options}
    return perturb(AttentionLayer(24, 3, grid, attention=spec, qkv_bias=bias, proj_bias=bias).double())


@pytest.mark.parametrize(("options", "num_prefix"), [({}, 0), *((options, 2) for options in OPTIONS)], ids=str)
def test_layer_equals_formula_end_to_end(options: dict[str, object], num_prefix: int) -> None:
    """`(x * mean_t (x W1)_t (x W2)_t) W3`: the query is x itself, unless it is projected too."""
    grid = Grid((3, 4), num_prefix=num_prefix)
    layer = poly_layer(grid, options, bias=True)
    x = randn(2, grid.num_queries, 24, grad=True)
    projected = (x @ layer.qkv.weight.T + layer.qkv.bias).split(24, dim=2)
    q, k, v = projected if options.get("project_q") else (x, *projected)
    want = naive(layer.mechanism, q, k, v) @ layer.proj.weight.T + layer.proj.bias
    assert_same_gradients(layer(x, grid), want, [x, *layer.parameters()], 1e-10)


def test_keys_of_other_tokens_need_projected_queries() -> None:
    grid = Grid((4, 6))
    with pytest.raises(UserError, match="PolyNLAttention projects 'kv', so its keys or queries cannot be reduced"):
        AttentionLayer(24, 3, grid, attention="poly_nl", sr_ratio=2)
    layer = AttentionLayer(24, 3, grid, attention={"name": "poly_nl", "project_q": True}, sr_ratio=2).double()
    x = randn(2, 24, 24)
    k, v = layer.kv(layer.sr(x, grid)).split(24, dim=2)
    assert k.shape[1] == 6
    assert_near(layer(x, grid), layer.proj(naive(layer.mechanism, layer.q(x), k, v)), 1e-12)


# Properties


@options_
def test_zero_tokens_give_zero_and_zero_keys_the_residual(options: dict[str, object]) -> None:
    module = mechanism({"name": "poly_nl", **options}, GRID)
    given = inputs(module, GRID)
    given.q[0, :, 3] = 0
    given.k[1] = 0
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, GRID)
    out.sum().backward()
    assert (out[0, :, 3] == 0).all()
    residual = 0 if module.alpha is None else module.alpha
    assert (out[1] == residual * given.q[1]).all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])


@pytest.mark.parametrize("options", [{}, {"alpha_beta": True}], ids=str)
def test_half_precision_at_many_tokens(options: dict[str, object]) -> None:
    """Only the result is rounded, at worst to nothing."""
    grid, dtype, scale = Grid((56, 56)), torch.float16, 16.0
    module = mechanism({"name": "poly_nl", **options}, grid, dim=8, num_heads=2, dtype=dtype)
    given = inputs(module, grid, batch=1, dtype=dtype, scale=scale, grad=True)
    out = given(module, grid)
    out.float().mean().backward()
    assert all(x.isfinite().all() for x in [out, *(x.grad for x in [*given.tensors, *module.parameters()])])
    exact = mechanism({"name": "poly_nl", **options}, grid, dim=8, num_heads=2)
    exact.load_state_dict(module.state_dict())
    want = naive(exact, *(x.detach().double() for x in (given.q, given.k, given.v)))
    limits = torch.finfo(dtype)
    assert ((out.double() - want).abs() <= 2 * limits.eps * want.abs().max() + limits.eps * limits.tiny).all()


@pytest.mark.parametrize(("reduce", "outer", "inner"), [("sum", 1e-3, 300.0), ("mean", 1e3, 1e-3)])
def test_products_leave_the_range_of_float16_where_the_result_does_not(reduce: str, outer: float, inner: float) -> None:
    grid = Grid((56, 56))
    module = mechanism({"name": "poly_nl", "reduce": reduce}, grid, dim=8, num_heads=2)
    scaled = (scale * x for scale, x in zip((outer, inner, inner), inputs(module, grid), strict=False))
    q, k, v = (x.half() for x in scaled)
    assert_near(module(q, k, v, grid), naive(module, q.double(), k.double(), v.double()), 2e-3)
