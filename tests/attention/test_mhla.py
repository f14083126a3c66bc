"""Token-level multi-head linear attention equals its formula, one token at a time, and the authors' code."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid
from linvit.attention.mhla import INITIAL, MHLAttention, initial_weights
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [Grid((4, 5), num_prefix=2), Grid((4, 6)), Grid((1, 3)), Grid((2, 2), num_prefix=1)]
OPTIONS: list[dict[str, Any]] = [
    {"blocks": 3},
    {"blocks": 3, "denominator": "reference", "qk_norm": False, "lepe_kernel": 0},
    {"blocks": 2, "denominator": "reference", "eps": 0.5},
    {"blocks": 1, "lepe_kernel": 3, "init": "gaussian", "eps": 0.1},
]


def naive_map(module: MHLAttention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """The matrix (N, N) of one head without the convolution, for features of the tokens (N, dk)."""
    (rows, columns), prefix = grid.size, grid.num_prefix
    sides = math.ceil(rows / module.blocks), math.ceil(columns / module.blocks)
    counts = math.ceil(rows / sides[0]), math.ceil(columns / sides[1])
    places: list[tuple[Any, Any]] = [(None, i) for i in range(prefix)]
    places += [
        ((r // sides[0], c // sides[1]), (r % sides[0], c % sides[1])) for r in range(rows) for c in range(columns)
    ]

    def weight(i: int, j: int) -> Tensor | float:
        if places[i][0] is None or places[j][0] is None:
            return 1 / math.prod(counts)
        return module.weights[places[i][0]][places[j][0]]

    index = {place: i for i, place in enumerate(places)}
    found = []
    for i, (block, place) in enumerate(places):
        row = torch.stack([weight(i, j) * q[i].dot(k[j]) for j in range(len(places))])
        total = row.sum()
        if block is not None and not module.own_queries:
            asking = [i if other is None else index.get((other, place)) for other, _ in places]
            total = sum(weight(i, j) * q[a].dot(k[j]) for j, a in enumerate(asking) if a is not None)
        found.append(row / (total + module.eps))
    return torch.stack(found)


def features(module: MHLAttention, x: Tensor, norm: torch.nn.RMSNorm | None) -> Tensor:
    tokens = x.transpose(1, 2).flatten(2)
    if norm is not None:
        size = (tokens.square().mean(-1, keepdim=True) + 2**-23).sqrt()
        tokens = tokens / size * norm.weight
    return torch.where(tokens > 0, tokens, 0).unflatten(2, (module.num_heads, -1)).transpose(1, 2) + 1e-6


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, Any], grid: Grid) -> None:
    module = mechanism({"name": "mhla", **options}, grid)
    given = inputs(module, grid, grad=True)
    q, k = features(module, given.q, module.q_norm), features(module, given.k, module.k_norm)
    maps = torch.stack([naive_map(module, q[b, h], k[b, h], grid) for b in range(2) for h in range(3)])
    want = maps.unflatten(0, (2, 3)) @ given.v
    if module.lepe is not None:
        plane = given.v[:, :, grid.num_prefix :].transpose(2, 3).flatten(1, 2).unflatten(2, grid.size)
        local = module.lepe(plane).flatten(2).unflatten(1, (3, 8)).transpose(2, 3)
        want = want + F.pad(local, (0, 0, grid.num_prefix, 0))
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-8)


@both_precisions
@of_case("mhla_core")
def test_equals_the_authors_code(golden: Golden, dtype: torch.dtype) -> None:
    q, k, v = given = golden.inputs(dtype)
    official, grid = golden.constructor, Grid((6, 6))
    module = MHLAttention(
        official["dim"],
        official["heads"],
        grid,
        blocks=6 // math.isqrt(official["window_size"]),
        qk_norm=official.get("qk_norm", False),
        denominator="reference",
    ).to(dtype)
    load(module, golden.parameters())
    golden.check_call(module(q, k, v, grid), given)
    golden.check_parameters(module, ours)


def ours(name: str) -> str:
    return name.replace("piece_attn.conv.weight", "weights")


def load(module: MHLAttention, official: dict[str, Tensor]) -> None:
    state = {ours(name): tensor for name, tensor in official.items()}
    module.load_state_dict({name: t.view_as(module.get_parameter(name)) for name, t in state.items()})


@both_precisions
@of_case("mhla")
def test_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    """They norm the layer's input once more."""
    (x,) = given = golden.inputs(dtype)
    grid = Grid((8, 8))
    attention = {"name": "mhla", "blocks": 2, "denominator": "reference"}
    layer = AttentionLayer(16, 2, grid, attention=attention, qkv_bias=False, input_norm=True).to(dtype)

    def of_layer(official: str) -> str:
        for theirs, name in {"norm.": "input_norm.", "to_qkv.": "qkv.", "to_out.0.": "proj."}.items():
            if official.startswith(theirs):
                return official.replace(theirs, name)
        return f"mechanism.{ours(official)}"

    state = {of_layer(name): tensor for name, tensor in golden.parameters().items()}
    layer.load_state_dict({name: t.view_as(layer.get_parameter(name)) for name, t in state.items()})
    golden.check_call(layer(x, grid), given)
    golden.check_parameters(layer, of_layer)


@pytest.mark.parametrize("init", INITIAL)
def test_initial_weights(init: str) -> None:
    """Of nearer blocks the larger ones; in an only block 1, where the reference's linear ones are NaN."""
    weights = initial_weights((2, 4), init).flatten(2).flatten(0, 1)
    assert weights.shape == (8, 8)
    assert (weights.diagonal() >= weights.amax(0) * (1 - 1e-6)).all()
    if init != "gaussian":
        torch.testing.assert_close(weights.sum(0), torch.ones(8))
    assert initial_weights((1, 1), init).item() == 1


def test_weights_have_the_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert {parameter.dtype for parameter in MHLAttention(8, 2, Grid((4, 4))).parameters()} == {torch.float64}
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_grid_and_a_checkpoint_of_it_have_the_same_weights() -> None:
    """Blocks are as many at most sizes; where they are fewer, W is interpolated, and each weighs more."""
    small, large = (mechanism({"name": "mhla", "blocks": 4}, Grid(size)) for size in ((2, 3), (16, 15)))
    assert large.weights.shape == (4, 4, 4, 4)
    assert large._all_weights(Grid((14, 40))).shape == (16, 16)
    state = small.resize_tables(large.state_dict(), lambda count: None)
    small.load_state_dict(state)
    given = inputs(large, Grid((2, 3)))
    assert_near(given(small, Grid((2, 3))), given(large, Grid((2, 3))), 1e-12)
    even = torch.full((4, 4, 4, 4), 1 / 16)
    assert_near(
        small.resize_tables({"weights": even}, lambda count: None)["weights"], torch.full((2, 3, 2, 3), 1 / 6), 1e-6
    )
