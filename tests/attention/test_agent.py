"""Agent attention equals its authors' code and, option by option, the formula written out naively."""

import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.layers.stripes import StripeBranch
from linvit.weights.layouts.backbones import CSWIN, DEIT
from tests.attention.soft_formula import naive_local, naive_stretch
from tests.golden_files import Golden, both_precisions, layer_state, of_case, our_state
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

# The reference implementation


@both_precisions
@of_case("agent_core", "agent_cls_core")
def test_mechanism_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    grid = Grid((6, 6), num_prefix=1)
    if "sr_ratio" in official:
        size = golden.kwargs["H"], golden.kwargs["W"]
        grid = Grid(size, tuple(side // official["sr_ratio"] for side in size))
    spec = {"name": "agent", "agents": official["agent_num"]}
    module = linvit.create_attention(spec, dim=official["dim"], num_heads=official["num_heads"], grid=grid)
    state = our_state(leaves, DEIT, "blocks.0.attn.", "blocks.0.attn.mechanism.")
    golden.check_call(functional_call(module, state, (*given, grid), strict=True), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("agent_cswin_core")
def test_stripes_equal_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """LePE is the host's, in the place of the mechanism's convolution."""
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    grid, heads = Grid((official["resolution"],) * 2), official["num_heads"]
    spec = {"name": "agent", "agents": official["agent_num"], "dwc_kernel": 0}
    branch = StripeBranch(official["dim"], heads, grid, (None, official["split_size"]), attention=spec)
    state = our_state(leaves, CSWIN, "stage1.0.attns.0.", "stages.0.blocks.0.attn.branches.0.")
    joined = [x.transpose(1, 2).flatten(2) for x in given]  # (B, N, C)
    out = functional_call(branch, state, (joined, joined[0], grid), strict=True)
    golden.check_call(out.unflatten(2, (heads, -1)).transpose(1, 2), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("agent_deit", "agent_pvt", "agent_swin")
def test_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    if "window" in official:
        grid = Grid((official["window"],) * 2, num_prefix=1)
    else:
        grid = Grid(tuple(official.get("window_size") or golden.kwargs.values()))
    layer = AttentionLayer(
        official["dim"],
        official["num_heads"],
        grid,
        attention={"name": "agent", "agents": official["agent_num"]},
        sr_ratio=official.get("sr_ratio", 1),
    )
    golden.check_call(functional_call(layer, layer_state(golden, leaves, layer), (*given, grid), strict=True), given)
    golden.check_leaves(leaves)


# The formula


def naive_pool(x: Tensor, side: int) -> Tensor:
    """Means (B, h, side^2, d) over the parts, overlapping where they do not divide, of a plane (B, h, H, W, d)."""

    def bounds(i: int, length: int) -> slice:
        return slice(i * length // side, -(-(i + 1) * length // side))

    rows, columns = x.shape[2:4]
    parts = [x[:, :, bounds(i, rows), bounds(j, columns)] for i in range(side) for j in range(side)]
    return torch.stack([part.mean((2, 3)) for part in parts], dim=2)


def naive_bias(tables: dict[str, Tensor], names: str, size: tuple[int, int], prefix: int, side: int) -> Tensor | float:
    """(h, side^2, tokens): one table per place, one per row, one per column, each stretched to grid and agents."""
    if not tables:
        return 0.0
    total = sum(
        torch.einsum("yi,hnij,xj->hnyx", naive_stretch(size[0], t.shape[2]), t, naive_stretch(size[1], t.shape[3]))
        for t in (tables[f"{name}_bias"] for name in names.split()[:3])
    )
    assert isinstance(total, Tensor)
    first = tables.get(f"{names.split()[3]}_bias", total.new_zeros(*total.shape[:2], 1))
    bias = torch.cat([*[first] * prefix, total.flatten(2)], dim=2)
    small = math.isqrt(bias.shape[1])
    return torch.einsum(
        "yi,hijt,xj->hyxt", naive_stretch(side, small), bias.unflatten(1, (small, small)), naive_stretch(side, small)
    ).flatten(1, 2)


def naive_factors(module: linvit.Attention, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Weights (B, h, N, n) of the agents for the queries, (B, h, n, M) of the keys for the agents."""
    side, prefix, tables = module.side, grid.num_prefix, dict(module.tables)
    agents = naive_pool(q[:, :, prefix:].unflatten(2, grid.size), side)
    of_keys = naive_bias(tables, "an ah aw ac", grid.keys_size, prefix, side)
    of_queries = naive_bias(tables, "na ha wa ca", grid.size, prefix, side)

    def weights(rows: Tensor, columns: Tensor, bias: Tensor | float) -> Tensor:
        powers = torch.exp(torch.einsum("bhnd,bhmd->bhnm", rows, columns) / math.sqrt(q.shape[-1]) + bias)
        return powers / powers.sum(-1, keepdim=True)

    to_agents = weights(q, agents, of_queries.mT if isinstance(of_queries, Tensor) else 0.0)
    return to_agents, weights(agents, k, of_keys)


def naive(module: linvit.Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`left right v`, and the convolution as one matrix per channel."""
    left, right = naive_factors(module, q, k, grid)
    out = torch.einsum("bhna,bham,bhmd->bhnd", left, right, v)
    if module.dwc is None:
        return out
    heads = (v.shape[1], v.shape[3])
    local = naive_local(module.dwc.weight, grid).unflatten(0, heads)  # (h, d, N, M)
    bias = module.dwc.bias.view(v.shape[1], 1, -1) * (torch.arange(grid.num_queries) >= grid.num_prefix)[:, None]
    return out + torch.einsum("hdnm,bhmd->bhnd", local, v) + bias


OPTIONS: list[dict[str, object]] = [
    {"agents": 4},
    {"agents": 9, "dwc_kernel": 5},
    {"agents": 9, "dwc_kernel": 0},
    {"agents": 4, "bias_size": 2},
    {"agents": 4, "pool_size": 3},
    {"agents": 1, "position_bias": False},
]
GRIDS = [
    Grid((4, 5), num_prefix=1),
    Grid((5, 3), num_prefix=2),
    Grid((2, 7)),
    Grid((4, 6), (2, 3)),
    Grid((5, 7), (2, 3), num_prefix=1),
]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    """Output and the gradients of inputs and parameters."""
    module = mechanism({"name": "agent", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-12)


@pytest.mark.parametrize("grid", [Grid((7, 3), num_prefix=2), Grid((3, 8)), Grid((6, 4), (3, 2))], ids=str)
def test_equals_formula_on_another_grid_than_the_nominal(grid: Grid) -> None:
    """The biases of rows and columns are interpolated; prefix tokens that the nominal grid lacks have none."""
    module = mechanism({"name": "agent", "agents": 4}, Grid((4, 5)), key_dim=5)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-12)


# The equivalent matrix


# Sizes, errors


def test_biases_of_a_checkpoint_are_interpolated_to_the_nominal_grid() -> None:
    """And compute there what the module that they come from computes."""
    old, new = (mechanism({"name": "agent", "agents": 4}, Grid(size)) for size in ((4, 5), (7, 3)))
    state = new.resize_tables(old.state_dict(), lambda count: None)
    new.load_state_dict(state)
    given = inputs(old, Grid((7, 3)))
    assert_near(given(new, Grid((7, 3))), given(old, Grid((7, 3))), 1e-14)


def test_number_of_agents_that_is_no_square_is_refused() -> None:
    with pytest.raises(UserError, match=r"agents must be a square, .*: 9 and 16 are the nearest; got 10"):
        linvit.create_attention({"name": "agent", "agents": 10}, dim=24, num_heads=3, grid=Grid((4, 4)))
