"""Hedgehog equals its authors' code and its formula, pair of tokens by pair of tokens."""

import pytest
import torch
from torch import Tensor

from linvit import Grid, UserError
from linvit.attention.hedgehog import HedgehogAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids

GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((4, 6), (2, 3), num_prefix=1)]
OPTIONS = [
    {},
    {"feature_dim": 3, "half_space": True},
    {"activation": "exp_dim", "skip": True},
    {"tied": True, "init": "kaiming"},
    {"joint": True, "feature_dim": 5},
]


def naive_features(module: HedgehogAttention, x: Tensor, name: str) -> Tensor:
    """Channel by channel, without the bound of 1e-12, which no feature of these tests reaches."""
    name = name if name in module.maps else "q"
    weight = module.maps[name].expand(module.num_heads, -1, -1)
    y = torch.einsum("bhnd,hdf->bhnf", x, weight) + (x if module.skip else 0)
    if module.joint:
        e = torch.exp(2 * torch.cat([y + module.biases[name], -y - module.biases[name]], -1))
        return e / e.sum(-1, keepdim=True)
    if module.activation == "exp_dim":
        both = [torch.exp(y) / torch.exp(y.max(-1, keepdim=True)[0]), torch.exp(-y) / torch.exp((-y).max(-1, True)[0])]
    else:
        both = [torch.exp(sign * y) / torch.exp(sign * y).sum(-1, keepdim=True) for sign in (1, -1)]
    return both[0] if module.half_space else torch.cat(both, -1)


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "hedgehog", **options}, grid)
    given = inputs(module, grid, grad=True)
    weights = naive_features(module, given.q, "q") @ naive_features(module, given.k, "k").mT
    want = weights / weights.sum(-1, keepdim=True) @ given.v
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-9)


@both_precisions
@of_case("hedgehog_core", "hedgehog_fla_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, leaves = golden.constructor, golden.leaves(dtype)
    heads, width, joint = official["num_heads"], official["head_dim"], "activation_name" not in official
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]), (1, k.shape[2]))
    module = HedgehogAttention(
        heads * width,
        heads,
        grid,
        feature_dim=official.get("feature_dim"),
        activation=official.get("activation_name", "softmax_dim"),
        half_space=not official.get("fullspace", True),
        skip=official.get("skip_connection", False),
        joint=joint,
    ).to(dtype)
    state = {}
    for name, leaf in leaves.items():
        letter = name.removeprefix("feature_map_")[0]
        if name.endswith("mlp.bias"):  # one number, which has no effect
            leaf.grad = torch.zeros_like(leaf)
        elif name.endswith("bias"):
            state[f"biases.{letter}"] = leaf
        else:
            state[f"maps.{letter}"] = leaf.mT[None] if joint else leaf
    assert state.keys() == module.state_dict().keys()
    golden.check_call(torch.func.functional_call(module, state, (q, k, v, grid)), given)
    golden.check_leaves(leaves)


def test_begins_as_the_softmax_of_the_keys_channels() -> None:
    """With and without `skip`; kaiming's numbers are within the bounds of the published code."""
    grid = Grid((2, 3))
    x = torch.randn(1, 3, 6, 8)
    for skip in (False, True):
        phi = HedgehogAttention(24, 3, grid, skip=skip).features(x, "k")
        assert torch.equal(phi, torch.cat([x.softmax(-1), (-x).softmax(-1)], -1))
    weight = HedgehogAttention(24, 3, grid, init="kaiming").maps["q"]
    assert 0 < weight.abs().max() <= (6 / (8 * 8)) ** 0.5


def test_what_does_not_go_together_is_refused() -> None:
    with pytest.raises(UserError, match="skip adds the keys' 8 channels to feature_dim=4; make them equal"):
        HedgehogAttention(24, 3, Grid((2, 3)), skip=True, feature_dim=4)
    with pytest.raises(UserError, match="joint is for activation=softmax_dim, skip=false; got exp_dim, skip=False"):
        HedgehogAttention(24, 3, Grid((2, 3)), joint=True, activation="exp_dim")
