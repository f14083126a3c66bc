"""VSSD's attention equals the authors' code, and, option by option, the formula written out naively."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix
from linvit.attention.vssd import VSSDAttention
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.tasks.parameter_groups import parameter_groups
from linvit.weights.layouts.backbones import VSSD as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case, our_state
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

OPTIONS = [
    {},
    {"expand": 2, "d_state": 5, "groups": 1},
    {"expand": 3, "groups": 2, "positive": False},
    {"d_state": 3, "out_norm": "none", "gate": "none"},
]
GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((1, 1)), Grid((5, 2))]


def convolved(module: VSSDAttention, grid: Grid, **parts: Tensor) -> list[Tensor]:
    """Each of v, k and q by itself, by its own rows of the kernels."""
    kernels, biases = module.conv2d.weight, module.conv2d.bias
    found, start = [], 0
    for x in parts.values():
        width = x.shape[1] * x.shape[3]
        rows = slice(start, start + width)
        plane = x[:, :, grid.num_prefix :].transpose(1, 2).flatten(2).mT.unflatten(2, grid.size)
        local = F.conv2d(plane, kernels[rows], biases[rows], padding=1, groups=width)
        local = local.flatten(2).mT.unflatten(2, x.shape[1::2]).transpose(1, 2)
        found.append(F.silu(torch.cat([x[:, :, : grid.num_prefix], local], 2)))
        start += width
    return found


def naive(module: VSSDAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor) -> Tensor:
    """`o_n = sum_t a_t (q_n . k_t) v_t + D v_n`, head by head."""
    v, k, q = convolved(module, grid, v=v, k=k, q=q)
    heads = []
    for i in range(v.shape[1]):
        group = i % q.shape[1]
        step = torch.log1p(torch.exp(x @ module.dt.weight[i] + module.dt.bias[i]))  # (B, N)
        weight = step * module.A_log[i].exp() * (1 if module.positive else -1)
        products = torch.einsum("bnc,btc,bt->bnt", q[:, group], k[:, group], weight)
        heads.append(products @ v[:, i] + module.D[i] * v[:, i])
    return torch.stack(heads, 1)


def even_module(options: dict[str, Any], grid: Grid) -> VSSDAttention:
    module = mechanism({"name": "vssd", **options}, grid, num_heads=4)
    assert isinstance(module, VSSDAttention)
    return module


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, Any], grid: Grid) -> None:
    module = even_module(options, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid, given.extra["x"])
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_matrix_acts_on_the_convolved_values(options: dict[str, Any]) -> None:
    grid = GRIDS[0]
    module = even_module(options, grid)
    q, k, v, extra = given = inputs(module, grid)
    matrix = attention_matrix(module, q, k, grid, **extra)
    assert_near(matrix @ convolved(module, grid, v=v)[0], given(module, grid), 1e-12)


@both_precisions
@of_case("vssd_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, (q, k, v, dt) = golden.constructor, golden.inputs(dtype)
    heads, grid = official["num_heads"], Grid((1, q.shape[2]))
    options = {"d_state": official["d_state"], "groups": official["ngroups"], "positive": official["ssd_positve_dA"]}
    module = VSSDAttention(heads * official["headdim"], heads, grid, **options).to(dtype)
    module.load_state_dict(golden.parameters(), strict=False)
    before = dt + torch.log(-torch.expm1(-dt))  # softplus gives dt
    module.dt = torch.nn.Linear(heads, heads, dtype=dtype)
    torch.nn.init.eye_(module.dt.weight)
    torch.nn.init.zeros_(module.dt.bias)
    golden.check_call(module.mixed(q, k, v, before.mT), [q, k, v, dt])
    golden.check_parameters(module, lambda name: name)


def spec(official: dict[str, Any]) -> dict[str, Any]:
    options = {"expand": ("expand", "ssd_expansion"), "d_state": ("d_state",), "groups": ("ngroups", "ssd_ngroups")}
    found = {ours: official[name] for ours, names in options.items() for name in names if name in official}
    return {"name": "vssd", **found}


def layer_of(golden: Golden, dim: int, heads: int, size: tuple[int, int]) -> AttentionLayer:
    attention = spec(golden.constructor)
    return AttentionLayer(dim, heads, Grid(size), attention=attention, qkv_bias=False, proj_bias=False)


@both_precisions
@of_case("vssd")
def test_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    official, sizes = golden.constructor, golden.kwargs
    dim, grid = official["d_model"], Grid((sizes["H"], sizes["W"]))
    layer = layer_of(golden, dim, official["expand"] * dim // official["headdim"], grid.size).to(dtype)
    leaves, (x,) = golden.leaves(dtype), golden.inputs(dtype)
    state = our_state(leaves, LAYOUT, "layers.0.blocks.0.attn.", "stages.0.blocks.0.attn.")
    assert state.keys() == layer.state_dict().keys()
    golden.check_call(torch.func.functional_call(layer, state, (x, grid)), [x])
    golden.check_leaves(leaves)


@both_precisions
@of_case("vssd_block")
def test_block_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, sizes = golden.constructor, golden.kwargs
    dim, grid = official["dim"], Grid((sizes["H"], sizes["W"]))
    mlp = Mlp(dim, int(dim * official["mlp_ratio"]))
    block = Block(dim, layer_of(golden, dim, official["num_heads"], grid.size), mlp, 0, 1e-5, cpe=2).to(dtype)
    leaves, (x,) = golden.leaves(dtype), golden.inputs(dtype)
    state = our_state(leaves, LAYOUT, "layers.0.blocks.0.", "stages.0.blocks.0.")
    assert state.keys() == block.state_dict().keys()
    golden.check_call(torch.func.functional_call(block, state, (x, grid)), [x])
    golden.check_leaves(leaves)


def test_initial_values_and_what_is_not_decayed() -> None:
    torch.manual_seed(0)
    layer = AttentionLayer(64, 16, Grid((4, 4)), attention={"name": "vssd", "d_state": 6, "groups": 1, "expand": 2})
    module = layer.mechanism
    assert isinstance(module, VSSDAttention)
    steps = F.softplus(module.dt.bias)
    assert steps.min() >= 1e-3 * 0.999
    assert 0.01 < steps.max() <= 0.1
    assert 0 <= module.A_log.min() < 1 < module.A_log.max() <= 16
    assert (module.D == 1).all()
    kept = {id(p) for group in parameter_groups(layer, 1.0, 0.05) if not group["weight_decay"] for p in group["params"]}
    assert {id(module.A_log), id(module.D), id(module.dt.bias)} <= kept
    assert layer.qkv.weight.shape == (2 * 6 + 128, 64)
    assert (layer.gate.weight.shape, layer.proj.weight.shape) == ((128, 64), (64, 128))
    assert module.facts.state_size == 6 * 128


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="groups must divide the 4 heads; got 3"):
        VSSDAttention(8, 4, Grid((2, 2)), groups=3)
    module = even_module({}, GRIDS[1])
    q, k, v, _ = inputs(module, GRIDS[1])
    with pytest.raises(UserError, match="pass it as x="):
        module(q, k, v, GRIDS[1])
