"""MLLA's attention equals its authors' code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.attention.mlla import MLLAAttention
from tests.attention.rotary_formula import GRIDS, angles, check_core, lepe, positive, rotated, turned
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids


def naive(module: MLLAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, rotary: str) -> Tensor:
    """`sum_m rot(q_n).rot(k_m) v_m / (sum_m q_n.k_m + M eps) + lepe(v)`."""
    q, k = positive(q), positive(k)
    sums = torch.einsum("bhnd,bhmd->bhn", q, k) + k.shape[2] * module.eps
    if rotary == "per_head":
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    elif rotary == "all_heads":
        q, k = (
            turned(x.transpose(1, 2).flatten(2), angles(grid, size, q.shape[1] * q.shape[3], last=False))
            .unflatten(2, (q.shape[1], -1))
            .transpose(1, 2)
            for x, size in ((q, grid.size), (k, grid.keys_size))
        )
    return torch.einsum("bhnd,bhmd->bhnm", q, k) / sums[..., None] @ v + lepe(module, v, grid)


OPTIONS = [{}, {"rotary": "per_head"}, {"rotary": "none"}, {"lepe_kernel": 0}, {"lepe_kernel": 5, "eps": 0.5}]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    module = mechanism({"name": "mlla", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid, str(options.get("rotary", "all_heads")))
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


@both_precisions
@of_case("mlla_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, MLLAAttention, dtype)


@both_precisions
@of_case("mlla")
def test_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    """Of queries and keys; gate, stem and output projection are the block's there."""
    official, names = golden.constructor, {"qk": "qkv", "lepe": "mechanism.lepe"}
    grid = Grid(tuple(official["input_resolution"]))
    attention = {"name": "mlla", "stem": "none", "gate": "none"}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=attention).to(dtype)

    def our_name(name: str) -> str:
        module, _, kind = name.rpartition(".")
        return f"{names[module]}.{kind}"

    state = {our_name(name): t for name, t in golden.parameters().items() if not name.startswith("rope.")}
    assert set(layer.load_state_dict(state, strict=False).missing_keys) == {"proj.weight", "proj.bias"}
    given = golden.inputs(dtype)
    golden.check_call(layer.mix(*given, grid), given)
    golden.check_parameters(layer, our_name)


def test_heads_that_cannot_turn_are_refused_and_those_of_even_width_turn() -> None:
    grid = Grid((2, 3))
    module = mechanism("mlla", grid, dim=12, num_heads=2)  # heads of 6 channels
    given = inputs(module, grid)
    want = naive(module, given.q, given.k, given.v, grid, "all_heads")
    torch.testing.assert_close(given(module, grid), want)
    for dim, heads, way in ((24, 8, "1, 2, 3, 4, 6, 12 heads"), (6, 2, "Make dim a multiple of 4")):
        with pytest.raises(UserError, match=way):
            linvit.create_attention("mlla", dim=dim, num_heads=heads, grid=grid)
