"""Agent and InLine attention equal their authors' code and, option by option, the formulas written out naively."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.layers.stripes import StripeBranch
from linvit.weights.layouts.backbones import CSWIN, DEIT
from tests.attention.soft_formula import naive_local, naive_stretch
from tests.golden_files import Golden, both_precisions, layer_state, of_case, our_state
from tests.helpers import (
    assert_exported_for_any_batch,
    assert_formula,
    assert_near,
    formulas,
    inputs,
    mechanism,
    randn,
)

# The reference implementations


def spec_of(golden: Golden) -> dict[str, Any]:
    """Our spec for an official constructor."""
    official = golden.constructor
    if golden.meta["case"].startswith("inline"):
        return {"name": "inline", "feature_map": official.get("kernel_func", "identity")}
    return {"name": "agent", "agents": official["agent_num"]}


@both_precisions
@of_case("agent_core", "agent_cls_core", "inline_core")
def test_mechanism_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, leaves, size = golden.constructor, golden.leaves(dtype), tuple(golden.kwargs.values())
    q, k, v, *x = given = golden.inputs(dtype)
    grid = Grid(size or (6, 6), num_prefix=0 if size else 1)
    if ratio := official.get("sr_ratio"):
        grid = Grid(size, tuple(side // ratio for side in size))
    module = linvit.create_attention(spec_of(golden), dim=official["dim"], num_heads=official["num_heads"], grid=grid)
    state = our_state(leaves, DEIT, "blocks.0.attn.", "blocks.0.attn.mechanism.")
    extra = {"x": x[0]} if x else {}
    golden.check_call(functional_call(module, state, (q, k, v, grid), extra, strict=True), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("agent_cswin_core", "inline_cswin_core")
def test_stripes_equal_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """LePE is the host's, in the place of the convolution of agents."""
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    grid, heads, spec = Grid((official["resolution"],) * 2), official["num_heads"], spec_of(golden)
    stripe = (None, None) if spec["name"] == "inline" else (None, official["split_size"])
    spec |= {"dwc_kernel": 0} if spec["name"] == "agent" else {}
    branch = StripeBranch(official["dim"], heads, grid, stripe, attention=spec)
    state = our_state(leaves, CSWIN, "stage1.0.attns.0.", "stages.0.blocks.0.attn.branches.0.")
    joined = [part.transpose(1, 2).flatten(2) for part in given[:3]]  # (B, N, C)
    out = functional_call(branch, state, (joined, given[3] if len(given) > 3 else joined[0], grid), strict=True)
    golden.check_call(out.unflatten(2, (heads, -1)).transpose(1, 2), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("agent_deit", "agent_pvt", "agent_swin", "inline_deit", "inline_pvt", "inline_swin")
def test_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    if golden.meta["case"].endswith("deit"):
        grid = Grid((official.get("window", 6),) * 2, num_prefix=1)
    else:
        grid = Grid(tuple(official.get("window_size") or golden.kwargs.values()))
    ratio = official.get("sr_ratio", 1) if golden.meta["case"].startswith("agent") else 1
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec_of(golden), sr_ratio=ratio)
    golden.check_call(functional_call(layer, layer_state(golden, leaves, layer), (*given, grid), strict=True), given)
    golden.check_leaves(leaves)


# The formulas


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


def agent(module: linvit.Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`left right v`, and the convolution as one matrix per channel."""
    left, right = naive_factors(module, q, k, grid)
    out = torch.einsum("bhna,bham,bhmd->bhnd", left, right, v)
    if module.dwc is None:
        return out
    heads = (v.shape[1], v.shape[3])
    local = naive_local(module.dwc.weight, grid).unflatten(0, heads)  # (h, d, N, M)
    bias = module.dwc.bias.view(v.shape[1], 1, -1) * (torch.arange(grid.num_queries) >= grid.num_prefix)[:, None]
    return out + torch.einsum("hdnm,bhmd->bhnd", local, v) + bias


def naive_map(module: linvit.Attention, q: Tensor, k: Tensor) -> Tensor:
    """The matrix of the linear attention (B, h, N, M): a row of 1/M, and what differs from the mean key."""
    phi = {
        "identity": lambda x: x,
        "relu": lambda x: x.clamp(min=0),
        "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
        "exp": lambda x: torch.exp(x / 5),
    }[module.feature_map]
    q, k = phi(q), phi(k)
    logits = torch.einsum("bhnd,bhmd->bhnm", q, k - k.mean(2, keepdim=True)) / math.sqrt(q.shape[-1])
    return (1 + logits) / k.shape[2]


def naive_kernels(module: linvit.Attention, x: Tensor) -> Tensor:
    """One kernel for each channel of each image, (B, C, s, s): two linear maps of the mean token, head by head."""
    first, _, second = module.residual
    heads, tokens = module.num_heads, x.mean(1).unflatten(1, (module.num_heads, -1))  # (B, h, d)

    def within_heads(conv: nn.Conv1d, tokens: Tensor) -> Tensor:
        weight = conv.weight[..., 0].unflatten(0, (heads, -1))  # (h, out, d)
        return torch.einsum("hod,bhd->bho", weight, tokens) + conv.bias.view(heads, -1)

    hidden = within_heads(first, tokens)
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return within_heads(second, hidden).flatten(1).unflatten(1, (-1, module.side, module.side))


def inline(module: linvit.Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor | None = None) -> Tensor:
    """The map, and the convolution as one matrix per image and channel."""
    out = torch.einsum("bhnm,bhmd->bhnd", naive_map(module, q, k), v)
    if x is None:
        return out
    local = torch.stack([naive_local(kernels[:, None], grid) for kernels in naive_kernels(module, x)])  # (B, C, N, M)
    return out + torch.einsum("bhdnm,bhmd->bhnd", local.unflatten(1, v.shape[1::2]), v)


OF_AGENT: list[dict[str, object]] = [
    {"agents": 4},
    {"agents": 9, "dwc_kernel": 5},
    {"agents": 9, "dwc_kernel": 0},
    {"agents": 4, "bias_size": 2},
    {"agents": 4, "pool_size": 3},
    {"agents": 1, "position_bias": False},
]
OF_INLINE: list[dict[str, object]] = [
    *({"feature_map": name} for name in ("identity", "relu", "leaky_relu", "exp")),
    {"residual_kernel": 5},
    {"residual_kernel": 0},
    {"key_dim": 5},
]
GRIDS = [Grid((4, 5), num_prefix=1), Grid((2, 7)), Grid((4, 6), (2, 3)), Grid((5, 7), (2, 3), num_prefix=2)]


@formulas({"agent": (agent, OF_AGENT, GRIDS), "inline": (inline, OF_INLINE, GRIDS)})
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive, 1e-12)


@pytest.mark.parametrize("grid", [Grid((7, 3), num_prefix=2), Grid((6, 4), (3, 2))], ids=str)
def test_agents_equal_formula_on_another_grid_than_the_nominal(grid: Grid) -> None:
    """The biases of rows and columns are interpolated; prefix tokens that the nominal grid lacks have none."""
    module = mechanism({"name": "agent", "agents": 4}, Grid((4, 5)), key_dim=5)
    given = inputs(module, grid)
    assert_near(given(module, grid), agent(module, given.q, given.k, given.v, grid), 1e-12)


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


def test_every_image_has_kernels_of_its_own() -> None:
    grid = Grid((4, 4))
    module = mechanism("inline", grid)
    given = inputs(module, grid)
    same = given.map(lambda t: t[:1].expand_as(t))
    other = same._replace(extra=given.extra)
    assert_near(other(module, grid)[:1], same(module, grid)[:1], 1e-14)
    assert (other(module, grid) - same(module, grid))[1].abs().amin() > 0


def test_the_convolution_asks_for_the_input() -> None:
    module, grid = mechanism("inline", Grid((4, 4))), Grid((4, 4))
    with pytest.raises(UserError, match="pass it as x=, or set residual_kernel=0"):
        module(*inputs(module, grid)[:3], grid)


def test_an_exported_network_is_for_any_number_of_images() -> None:
    model = linvit.create_backbone("deit_nano", attention="inline", depth=1, img_size=32)
    assert_exported_for_any_batch(model, randn(3, 3, 32, 32, dtype=torch.float32), 1e-5)
