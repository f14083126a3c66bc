"""RALA, MALA, MLLA, NaLaFormer and PolaFormer++ equal their authors' code, and their formulas, option by option."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import linvit
from linvit import Attention, AttentionLayer, Grid, UserError
from linvit.attention.mala import MALAAttention
from linvit.attention.mlla import MLLAAttention
from linvit.attention.nala import NaLaAttention
from linvit.attention.pola_pp import PolaPPAttention
from linvit.attention.rala import RALAAttention
from tests.attention.rotary_formula import GRIDS, angles, check_core, check_layer, lepe, positive, rotated, turned
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_formula, assert_near, formulas, inputs, mechanism


def weights_of(q: Tensor, k: Tensor) -> Tensor:
    return torch.einsum("bhnd,bhmd->bhnm", q, k)


def rala(module: RALAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(q_n).rot(k_m) v_m / (sum_m q_n.k_m + M eps) + lepe(v)` with keys weighted by the mean query."""
    q, k = positive(q), positive(k)
    if module.key_weights:
        logits = torch.einsum("bhd,bhmd->bhm", q.mean(2), k) / q.shape[-1] ** 0.5
        k = k * (torch.softmax(logits, -1) * k.shape[2])[..., None]
    sums = weights_of(q, k).mean(-1, keepdim=True) + module.eps
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    return weights_of(q, k) / k.shape[2] / sums @ v + lepe(module, v, grid)


def mala(module: MALAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m ((1 + 1/(z_n + eps)) s rot(q_n).rot(k_m) - z_n) v_m / M + lepe(v)`, `z_n = s mean_m(q_n.k_m)`."""
    q, k = positive(q), positive(k)
    scale = q.shape[-1] ** -0.5
    z = scale * weights_of(q, k).mean(-1, keepdim=True)
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    matrix = ((1 + 1 / (z + module.eps)) * scale * weights_of(q, k) - z) / k.shape[2]
    return matrix @ v + lepe(module, v, grid)


def mlla(module: MLLAAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(q_n).rot(k_m) v_m / (sum_m q_n.k_m + M eps) + lepe(v)`."""
    q, k = positive(q), positive(k)
    sums = weights_of(q, k).sum(-1, keepdim=True) + k.shape[2] * module.eps
    if module.facts.rotary and not module.across_heads:
        q, k = rotated(q, grid, grid.size), rotated(k, grid, grid.keys_size)
    elif module.facts.rotary:
        q, k = (
            turned(x.transpose(1, 2).flatten(2), angles(grid, size, q.shape[1] * q.shape[3], last=False))
            .unflatten(2, (q.shape[1], -1))
            .transpose(1, 2)
            for x, size in ((q, grid.size), (k, grid.keys_size))
        )
    return weights_of(q, k) / sums @ v + lepe(module, v, grid)


def nala(module: NaLaAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(Q_n).rot(K_m) v_m / (sum_m Q_n.K_m + M eps) + lepe(v)`."""
    width, norm = q.shape[-1], q.square().sum(-1, keepdim=True).sqrt()
    power = module.power * (0.5 + norm.tanh())
    q = torch.cat([(q.clamp(min=0) / norm) ** power, ((-q).clamp(min=0) / norm) ** power], dim=-1)
    k = torch.cat([k.clamp(min=0), (-k).clamp(min=0)], dim=-1) ** module.key_power
    sums = weights_of(q, k).sum(-1, keepdim=True) + k.shape[2] * module.eps
    if module.facts.rotary:
        q, k = rotated(q, grid, grid.size, width), rotated(k, grid, grid.keys_size, width)
    return weights_of(q, k) / sums @ v + lepe(module, v, grid)


def pola_pp(module: PolaPPAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`sum_m rot(Q_in).rot(K_m) v_im / (sum_m Q_in.K_m + M eps) + lepe(v)` for the halves v_i of the values."""
    plus, minus = q.clamp(min=0), (-q).clamp(min=0)
    key = torch.cat([k.clamp(min=0), (-k).clamp(min=0)], -1).exp() - 1
    halves = []
    for pair, s, half in zip(
        ([plus, minus], [minus, plus]), (module.s1, module.s2), v.tensor_split(2, -1), strict=True
    ):
        query = (torch.cat(pair, -1) * torch.sigmoid(s)).exp() - 1
        sums = weights_of(query, key).sum(-1, keepdim=True) + k.shape[2] * module.eps
        turned = key
        if module.facts.rotary:
            query, turned = rotated(query, grid, grid.size), rotated(key, grid, grid.keys_size)
        halves.append(weights_of(query, turned) / sums @ half)
    return torch.cat(halves, -1) + lepe(module, v, grid)


SHARED: list[dict[str, Any]] = [{}, {"lepe_kernel": 0}, {"lepe_kernel": 3, "eps": 0.5}]
OPTIONS = [*SHARED, {"rotary": False}]
FORMULAS = {
    "rala": (rala, [*OPTIONS, {"key_weights": False}, {"key_dim": 4}], GRIDS),
    "mala": (mala, [*OPTIONS, {"key_dim": 4}], GRIDS),
    "mlla": (mlla, [*SHARED, {"rotary": "per_head"}, {"rotary": "none"}], GRIDS),
    "nala": (nala, [*OPTIONS, {"power": 2, "key_power": 1.5}, {"key_dim": 4}], GRIDS),
    "pola_pp": (pola_pp, OPTIONS, GRIDS),
}
CLASSES: dict[str, type[Attention]] = {
    "rala": RALAAttention,
    "mala": MALAAttention,
    "mlla": MLLAAttention,
    "nala": NaLaAttention,
    "pola_pp": PolaPPAttention,
}


@formulas(FORMULAS)
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive)


@both_precisions
@of_case(*(f"{name}_core" for name in CLASSES))
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    check_core(golden, CLASSES[golden.meta["case"].removesuffix("_core")], dtype)


@both_precisions
@of_case("rala", "mala", "nala", "pola_pp")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    check_layer(golden, golden.meta["case"], dtype)


@both_precisions
@of_case("mlla")
def test_mlla_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
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


def test_heads_that_cannot_turn_are_refused_and_others_turn() -> None:
    """MLLA turns all heads as one; PolaFormer++ turns none of odd width, of which the first half is the larger one."""
    grid = Grid((2, 3))
    assert_formula("mlla", grid, mlla, dim=12, num_heads=2)  # heads of 6 channels
    assert_formula({"name": "pola_pp", "rotary": False}, grid, pola_pp, dim=15)
    for name, dim, heads, way in (
        ("mlla", 24, 8, "1, 2, 3, 4, 6, 12 heads"),
        ("mlla", 6, 2, "Make dim a multiple of 4"),
        ("pola_pp", 15, 3, r"multiple of 2 channels per head; dim 15 with num_heads 3 has 5\."),
    ):
        with pytest.raises(UserError, match=way):
            linvit.create_attention(name, dim=dim, num_heads=heads, grid=grid)


@pytest.mark.parametrize(("rotary", "scale"), [(True, 1e-3), (True, 3.0), (False, 60.0)])
def test_pola_pp_of_small_and_large_entries_in_float32(rotary: bool, scale: float) -> None:
    """Up to entries of 200, whose exponentials float32 does not have and the formula in float64 has."""
    grid = Grid((3, 4))
    module = mechanism({"name": "pola_pp", "rotary": rotary, "lepe_kernel": 0}, grid, dtype=torch.float32)
    given = inputs(module, grid, dtype=torch.float32, scale=scale)
    given.q[:, :, 1] = 0
    wide = given.map(Tensor.double)
    want = pola_pp(copy.deepcopy(module).double(), wide.q, wide.k, wide.v, grid)
    assert want.isfinite().all()
    assert_near(given(module, grid), want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_of_zero_gives_zero_in_nala_and_finite_gradients(dtype: torch.dtype) -> None:
    """The reference divides by its norm."""
    grid = Grid((3, 4))
    module = mechanism({"name": "nala", "lepe_kernel": 0}, grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype)
    given.q[:, :, 1] = 0
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, grid)
    assert (out[:, :, 1] == 0).all()
    assert out.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), given.tensors))
