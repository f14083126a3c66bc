"""Focused attention equals FLatten's code, and, option by option, the formula written out naively."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid
from linvit.attention.focused import FocusedAttention
from tests.golden_files import (
    Golden,
    attention_layer,
    both_precisions,
    check_layer_gradients,
    focused_spec,
    of_case,
)
from tests.helpers import assert_formula, assert_near, formulas, inputs, mechanism

GRIDS = [Grid((7, 9), num_prefix=2), Grid((3, 2)), Grid((1, 20), num_prefix=1)]  # the second smaller than the kernel
REDUCED = [Grid((5, 7), (2, 3), num_prefix=1), Grid((3, 4), (7, 7))]


# The reference implementations


@both_precisions
@of_case("focused_swin", "focused_pvt", "focused_pvt_v2")
def test_equals_flatten(golden: Golden, dtype: torch.dtype) -> None:
    (x,) = given = golden.inputs(dtype)
    size = tuple(golden.constructor.get("window_size") or (golden.kwargs["H"], golden.kwargs["W"]))
    layer = attention_layer(golden, focused_spec(golden), size, dtype)
    golden.check_call(layer(x, Grid(size)), given)
    check_layer_gradients(golden, layer)


@both_precisions
@of_case("focused_cswin")
def test_equals_flatten_cswin(golden: Golden, dtype: torch.dtype) -> None:
    (qkv,) = given = golden.inputs(dtype)
    official, state = golden.constructor, golden.parameters()
    grid = Grid((official["resolution"],) * 2)
    spec = {key: value for key, value in focused_spec(golden).items() if key != "name"}
    module = FocusedAttention(official["dim"], official["num_heads"], grid, **spec).to(dtype)
    lepe = torch.nn.Conv2d(official["dim"], official["dim"], 3, padding=1, groups=official["dim"]).to(dtype)
    lepe.load_state_dict({name.removeprefix("get_v."): t for name, t in state.items() if name.startswith("get_v.")})
    module.load_state_dict({name: t for name, t in state.items() if not name.startswith("get_v.")})

    q, k, v = qkv.unflatten(-1, (official["num_heads"], -1)).transpose(2, 3)  # (B, h, L, d) each
    out = module(q, k, v, grid).transpose(1, 2).flatten(2)
    out = out + lepe(qkv[2].mT.unflatten(2, grid.size)).flatten(2).mT
    golden.check_call(out, given)
    for name in golden.named("grad_param."):
        own = name.removeprefix("grad_param.")
        owner = lepe if own.startswith("get_v.") else module
        golden.check(name, owner.get_parameter(own.removeprefix("get_v.")).grad)


# The formula


def naive_maps(module: FocusedAttention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """The matrix of the global part, (B, h, N, M): steps a to h of the reference, on tokens with all C channels."""
    heads = q.shape[1]
    q, k = q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)  # (B, N, C)
    if module.positional_encoding is not None:
        assert module.grid.keys_size == grid.keys_size
        k = torch.cat([k[:, : grid.num_prefix], k[:, grid.num_prefix :] + module.positional_encoding], dim=1)
    q, k = torch.clamp(q, min=0) + module.relu_eps, torch.clamp(k, min=0) + module.relu_eps
    if module.scale is not None:
        scale = torch.log(1 + torch.exp(module.scale))
        q, k = q / scale, k / scale

    def focused(x: Tensor) -> Tensor:  # (B, N, C) -> (B, h, N, d)
        vectors = x[..., None, :] if module.norm_scope == "all_heads" else x.unflatten(2, (heads, -1))
        powered = vectors**module.focusing_factor
        length = vectors.square().sum(-1, keepdim=True).sqrt() / powered.square().sum(-1, keepdim=True).sqrt()
        return (powered * length).flatten(2).unflatten(2, (heads, -1)).transpose(1, 2)

    scores = torch.einsum("bhnd,bhmd->bhnm", focused(q), focused(k))
    if module.denominator == "mean":
        scores = scores / scores.shape[-1]
    return scores / (scores.sum(-1, keepdim=True) + module.eps)


def toeplitz(kernels: Tensor, size: tuple[int, int]) -> Tensor:
    """T(w_j): the matrices (d, N, N) of zero-padded depthwise kernels (d, 1, k, k) on an H x W grid, entry by entry."""
    side, (height, width) = kernels.shape[-1], size
    places = torch.zeros(side, side, height * width, height * width, dtype=kernels.dtype)
    for i, j, row, column in itertools.product(range(side), range(side), range(height), range(width)):
        other_row, other_column = row + i - side // 2, column + j - side // 2
        if 0 <= other_row < height and 0 <= other_column < width:
            places[i, j, row * width + column, other_row * width + other_column] = 1
    return torch.einsum("dij,ijnm->dnm", kernels[:, 0], places)


def linear_stretch(new: int, old: int) -> Tensor:
    """U (new, old): 1-D linear interpolation with half-pixel centres, clamped at the ends."""
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        place = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
        low = min(int(place), old - 1)
        matrix[i, low] += 1 - (place - low)
        matrix[i, min(low + 1, old - 1)] += place - low
    return matrix


def stretch(grid: Grid, interp: str) -> Tensor:
    """The matrix (H*W, patches of the keys) that brings v back to the queries' grid."""
    if grid.keys_size == grid.size:
        return torch.eye(math.prod(grid.size), dtype=torch.float64)
    if interp == "linear1d":
        return linear_stretch(math.prod(grid.size), math.prod(grid.keys_size))
    rows, columns = (linear_stretch(new, old) for new, old in zip(grid.size, grid.keys_size, strict=True))
    return torch.kron(rows, columns)


def naive_local(module: FocusedAttention, grid: Grid) -> Tensor:
    """The matrices of the convolution of v, (d, N, M): T(w_j) U on patches, nothing for prefix tokens."""
    spread = stretch(grid, module.sr_interp)
    local = toeplitz(module.dwc.weight, grid.size) @ spread
    return F.pad(local, (grid.num_prefix, 0, grid.num_prefix, 0))


def naive(module: FocusedAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """`(A + T(w_j) U) v_j + b_j` for every channel j."""
    out = torch.einsum("bhnm,bhmd->bhnd", naive_maps(module, q, k, grid), v)
    if module.dwc is None:
        return out
    bias = module.dwc.bias.expand(grid.num_queries, -1)
    bias = torch.cat([torch.zeros_like(bias[: grid.num_prefix]), bias[grid.num_prefix :]])
    return out + torch.einsum("dnm,bhmd->bhnd", naive_local(module, grid), v) + bias


OPTIONS = [
    {},
    {"norm_scope": "per_head"},
    {"denominator": "sum"},
    {"denominator": "sum", "eps": 0.5},
    {"eps": 0.5},
    {"relu_eps": 0.25},
    {"stable_power": False},
    {"stable_power": False, "norm_scope": "per_head"},
    {"dwc": False},
    {"focus": False},
    {"pos_enc": False},
    {"learn_scale": False},
    {"dwc_kernel": 1},
    {"dwc_kernel": 3},
    {"focusing_factor": 1},
    {"focusing_factor": 2.5},
    {"focusing_factor": 8},
    {"focusing_factor": 32},
    {"dwc": False, "focus": False, "pos_enc": False, "learn_scale": False},
]


@formulas({"focused": (naive, [*OPTIONS, {"key_dim": 5}], [Grid((4, 3), num_prefix=1), *GRIDS])})
def test_equals_formula(spec: dict[str, object], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive)


@pytest.mark.parametrize("interp", ["linear1d", "bilinear2d"])
@pytest.mark.parametrize("grid", REDUCED, ids=str)
def test_equals_formula_under_spatial_reduction(grid: Grid, interp: str) -> None:
    assert_formula({"name": "focused", "sr_interp": interp}, grid, naive)


# Prefix tokens, other grids


def cubic_resize(new: int, old: int) -> Tensor:
    """(new, old): cubic convolution with a = -0.75 and half-pixel centres, edges repeated."""

    def weight(t: float) -> float:
        t, a = abs(t), -0.75
        if t <= 1:
            return (a + 2) * t**3 - (a + 3) * t**2 + 1
        return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0

    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        place = (i + 0.5) * old / new - 0.5
        for tap in range(math.floor(place) - 1, math.floor(place) + 3):
            matrix[i, min(max(tap, 0), old - 1)] += weight(place - tap)
    return matrix


@pytest.mark.parametrize("grid", [GRIDS[0], Grid((8, 12), (4, 6))], ids=str)
def test_position_encoding_follows_another_grid(grid: Grid) -> None:
    """One instance, every grid: as if it had been built for that grid with the bicubically resized table."""
    nominal = Grid((5, 6), num_prefix=grid.num_prefix)
    module = mechanism("focused", nominal, dim=8, num_heads=2)
    table = module.positional_encoding[0].detach()
    rows, columns = (cubic_resize(new, old) for new, old in zip(grid.keys_size, nominal.size, strict=True))
    resized = mechanism("focused", grid, dim=8, num_heads=2)
    resized.load_state_dict({**module.state_dict(), "positional_encoding": (torch.kron(rows, columns) @ table)[None]})
    given = inputs(module, grid)
    assert_near(given(module, grid), given(resized, grid), 1e-6)
    at_home = inputs(module, nominal)
    before = at_home(mechanism("focused", nominal, dim=8, num_heads=2), nominal)
    assert torch.equal(at_home(module, nominal), before)  # nothing is kept from the other grid


# In place


@pytest.mark.parametrize("options", [{}, {"norm_scope": "per_head"}, {"stable_power": False}, {"dwc": False}], ids=str)
def test_working_in_place_writes_to_no_input_and_parameter(options: dict[str, object]) -> None:
    """Nor to the module's own tensors, with one head, where views need no copy, and with several."""
    for heads in (1, 3):
        grid = Grid((4, 3))
        module = mechanism({"name": "focused", **options}, grid, num_heads=heads)
        given = inputs(module, grid)
        copies, state = given.map(torch.clone), {name: t.clone() for name, t in module.state_dict().items()}
        with torch.no_grad():
            given(module, grid)
        assert all(torch.equal(x, y) for x, y in zip(given.tensors, copies.tensors, strict=True))
        assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"stable_power": False}], ids=str)
def test_entries_of_exactly_zero_get_no_gradient(options: dict[str, object]) -> None:
    """As with relu: queries and keys (and positions) at the kink."""
    grid = Grid((3, 4))
    module = mechanism({"name": "focused", "pos_enc": False, **options}, grid)
    given = inputs(module, grid)
    given.q[:, :, 2], given.k[:, :, 5] = 0, 0
    given = given.map(lambda x: x.requires_grad_())
    given(module, grid).square().sum().backward()
    assert (given.q.grad[:, :, 2] == 0).all()
    assert (given.k.grad[:, :, 5] == 0).all()
    assert given.q.grad.abs().max() > 0


# Large powers


@pytest.mark.parametrize("norm_scope", ["all_heads", "per_head"])
@pytest.mark.parametrize("focusing_factor", [1, 32])
def test_token_without_a_positive_channel_stays_finite(focusing_factor: float, norm_scope: str) -> None:
    grid = Grid((3, 4))
    spec = {"name": "focused", "focusing_factor": focusing_factor, "norm_scope": norm_scope}
    module = mechanism(spec, grid, dtype=torch.float32)
    given = inputs(module, grid, dtype=torch.float32)
    given.q[:, :, 0] = -1
    given.k[:, :, 1] = -9  # below the position encoding
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, grid)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])

    exact = mechanism(spec, grid).eval()
    wide = given.map(lambda x: x.detach().double())
    assert_near(out, wide(exact, grid), 1e-4)


# Initial values and errors


def test_parameters_begin_as_in_flatten() -> None:
    module = FocusedAttention(32, 4, Grid((6, 7), num_prefix=1))
    assert module.scale.shape == (1, 1, 32)
    assert module.positional_encoding.shape == (1, 42, 32)
    assert module.dwc.weight.shape == (8, 1, 5, 5)
    assert module.scale.eq(0).all()
    assert module.positional_encoding.eq(0).all()
    assert module.dwc.weight.abs().max() <= 1 / 5  # torch's default: uniform within 1 / sqrt(fan in)
    assert module.dwc.bias.abs().max() <= 1 / 5
