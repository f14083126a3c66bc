"""Circulant, additive, cross-covariance and separable attention equal their formulas and their authors' code."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Attention, AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix, attention_rank, channel_matrix
from linvit.attention.additive import AdditiveAttention
from linvit.attention.circulant import CirculantAttention
from linvit.attention.ops.activations import cosines
from linvit.attention.separable import SeparableAttention
from linvit.attention.xca import XCAttention
from linvit.layers.windows import WindowAttention
from linvit.tasks.parameter_groups import parameter_groups
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_formula, assert_near, assert_same_gradients, formulas, inputs, mechanism, randn

GRID = Grid((3, 4), num_prefix=1)


def joined(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


def shifted(x: Tensor, grid: Grid) -> Tensor:
    """(B, h, P, d) -> (B, h, shifts, P, d), entry t being the tokens at n + t."""
    plane = x.unflatten(2, grid.size)
    rows, columns = grid.size
    return torch.stack([plane.roll((-i, -j), (2, 3)).flatten(2, 3) for i in range(rows) for j in range(columns)], dim=2)


def circulant(module: Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Prefix tokens are shifts of their own, and queries of softmax attention of heads of one channel."""
    prefix, patches = grid.num_prefix, grid.size[0] * grid.size[1]
    keys = torch.cat([k[:, :, :prefix, None].expand(-1, -1, -1, patches, -1), shifted(k[:, :, prefix:], grid)], 2)
    values = torch.cat([v[:, :, :prefix, None].expand(-1, -1, -1, patches, -1), shifted(v[:, :, prefix:], grid)], 2)
    logits = torch.einsum("bhnd,bhtnd->bhtd", q[:, :, prefix:], keys) / patches**0.5
    out = torch.einsum("bhtd,bhtnd->bhnd", logits.exp() / logits.exp().sum(2, keepdim=True), values)
    weights = torch.einsum("bhpd,bhmd->bhpmd", q[:, :, :prefix], k).exp()
    first = torch.einsum("bhpmd,bhmd->bhpd", weights / weights.sum(3, keepdim=True), v)
    return torch.cat([first, out], 2)


def separable_of_image(module: SeparableAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`relu(k_n) sum_m exp(w . x_m) v_m / sum_m exp(w . x_m)` for tokens (N, C) of one image; q is the input x."""
    weights = torch.stack([module.scores.weight[0].dot(x).exp() for x in q])
    total = sum(weight * value for weight, value in zip(weights, v, strict=True)) / weights.sum()
    return torch.stack([torch.where(gate > 0, gate, 0) * total for gate in k])


def separable(module: SeparableAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **x: Tensor) -> Tensor:
    images = torch.stack([separable_of_image(module, *each) for each in zip(*map(joined, (q, k, v)), strict=True)])
    return images.unflatten(2, (q.shape[1], -1)).transpose(1, 2)


@formulas(
    {
        "circulant": (
            circulant,
            [{}],
            [Grid((3, 4)), Grid((1, 5)), Grid((5, 1)), Grid((3, 3), num_prefix=2)],
        ),
        "separable": (separable, [{}], [GRID, Grid((5, 2))]),
    }
)
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, naive, 1e-9)


@both_precisions
@of_case("circulant_core")
def test_circulant_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = CirculantAttention(golden.constructor["dim"], given[0].shape[1], grid)
    golden.check_call(module(*given, grid), given)


@both_precisions
@of_case("circulant")
def test_circulant_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    """The host leaves the bias of q, k and v out and keeps the gate's, though it is asked for both."""
    given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    layer = AttentionLayer(golden.constructor["dim"], 2, grid, attention="circulant", qkv_bias=True).to(dtype)

    def ours(name: str) -> str:
        return name.replace("gate.0.", "gate.")

    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(given[0], grid), given)
    golden.check_parameters(layer, ours)


# Separable


def tokens(plane: Tensor) -> Tensor:
    """Every phase of the pixels a sample of its own: (B, C, P, N) -> (B P, 1, N, C), one head."""
    return plane.permute(0, 2, 3, 1).flatten(0, 1).unsqueeze(1)


@both_precisions
@of_case("separable_core")
def test_separable_equals_mobilevitv2(golden: Golden, dtype: torch.dtype) -> None:
    """The scores are given there: here they are the first channel of an input, which the layer picks out."""
    scores, key, value = given = golden.inputs(dtype)
    module = SeparableAttention(12, 1, Grid((5, 6))).to(dtype)
    module.scores.weight.data = torch.eye(1, 12, dtype=dtype)
    x = torch.cat([scores, torch.zeros_like(key[:, 1:])], dim=1)
    out = module(tokens(x), tokens(value), tokens(key), Grid((5, 6)))  # (B P, 1, N, C)
    golden.check_call(out.unflatten(0, (2, 4)).squeeze(2).permute(0, 3, 1, 2), given)


def projections(golden: Golden, dtype: torch.dtype) -> dict[str, Tensor]:
    """The official projection `[scores 1 | key C | value C]` as our parameters, ready for gradients."""
    p = {name.replace("block.conv.", ""): t.to(dtype).squeeze() for name, t in golden.parameters().items()}
    return {name: t.clone().requires_grad_() for name, t in p.items()}


def on_map(phases: Tensor) -> Tensor:
    """(B, C, 4, 28) -> tokens (B, 8 * 14, C): the pixels of 2 x 2 in each of 4 x 7 patches."""
    return phases.unflatten(3, (4, 7)).unflatten(2, (2, 2)).permute(0, 4, 2, 5, 3, 1).flatten(1, 4)


@both_precisions
@of_case("separable")
def test_layer_equals_mobilevitv2s(golden: Golden, dtype: torch.dtype) -> None:
    """A window host with `dilation` makes of a map what the official code unfolds."""
    (x,) = given = golden.inputs(dtype)
    p, grid = projections(golden, dtype), Grid((8, 14))
    layer = WindowAttention(12, 1, grid, window=None, dilation=2, attention="separable").to(dtype)
    own = {"mechanism.scores.weight": p["qkv_proj.weight"][:1]}
    for kind in ("weight", "bias"):
        own[f"qkv.{kind}"] = p[f"qkv_proj.{kind}"][1:].roll(12, 0)  # [value | key]
        own[f"proj.{kind}"] = p[f"out_proj.{kind}"]
    out = torch.func.functional_call(layer, own, (on_map(x), grid), strict=True)  # (B, 8 * 14, C)
    phases = out.unflatten(1, (4, 2, 7, 2)).permute(0, 5, 2, 4, 1, 3)  # (B, C, 2, 2, 4, 7)
    golden.check_call(phases.flatten(4).flatten(2, 3), given)
    check_parameters(golden, p)


@both_precisions
@of_case("separable_cross")
def test_scores_and_keys_of_other_tokens_equal_mobilevitv2s(golden: Golden, dtype: torch.dtype) -> None:
    """10 tokens gate what is mixed of 27 others. No host of ours does that, so it goes past the check of numbers."""
    x, other = given = golden.inputs(dtype)
    p = projections(golden, dtype)

    def linear(plane: Tensor, name: str, rows: slice) -> Tensor:
        return tokens(plane) @ p[f"{name}.weight"][rows].T + p[f"{name}.bias"][rows]

    module = SeparableAttention(12, 1, Grid((1, 27)))
    del module.scores.weight
    module.scores.weight = p["qkv_proj.weight"][:1]
    k, v = linear(x, "qkv_proj", slice(13, 25)), linear(other, "qkv_proj", slice(1, 13))
    out = module.forward(tokens(other), k, v, Grid((1, 27))).squeeze(1) @ p["out_proj.weight"].T + p["out_proj.bias"]
    golden.check_call(out.unflatten(0, (2, 4)).permute(0, 3, 1, 2), given)
    check_parameters(golden, p)


def check_parameters(golden: Golden, p: dict[str, Tensor]) -> None:
    for name in golden.named("grad_param."):
        ours = p[name.removeprefix("grad_param.").replace("block.conv.", "")].grad
        golden.check(name, ours.view_as(golden.tensors[name]))  # that of the scores' bias is 0


def test_fewer_keys_are_refused_by_separable() -> None:
    module, reduced = mechanism("separable", GRID), Grid((4, 4), (2, 2))
    with pytest.raises(UserError, match=r"needs as many keys as queries .* got a grid of 4x4 queries and 2x2 keys"):
        inputs(module, reduced)(module, reduced)


# Additive


def additive(module: AdditiveAttention, q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (N, C) for tokens (N, C) of one image, and how the values of length 1 are mixed, (C, N, N)."""
    q, v = (torch.stack([x / x.square().sum().sqrt() for x in tokens]) for tokens in (q, v))
    scores = torch.stack([x.dot(module.w_g[:, 0]) / q.shape[1] ** 0.5 for x in v])
    weights = scores / scores.square().sum().sqrt()
    total = sum(weight * value for weight, value in zip(weights, v, strict=True))
    rows = [module.proj.weight @ (total * q[n]) + module.proj.bias + v[n] for n in range(len(q))]
    return torch.stack(rows), q.T[:, :, None] * weights


@pytest.mark.parametrize("grid", [GRID, Grid((5, 2))], ids=str)
def test_additive_equals_formula(grid: Grid) -> None:
    module = mechanism("additive", grid)
    given = inputs(module, grid, grad=True)
    found = [additive(module, joined(given.q)[b], joined(given.v)[b]) for b in range(2)]
    want = torch.stack([out for out, _ in found])
    sources = [given.q, given.v, *module.parameters()]
    assert_same_gradients(joined(given(module, grid)), want, sources, 1e-10)
    matrix = attention_matrix(module, given.q, given.k, grid, v=given.v)
    assert_near(matrix, torch.stack([mixed for _, mixed in found]).unflatten(1, (3, 8)), 1e-12)


@both_precisions
@of_case("additive_core")
def test_equals_swiftformer(golden: Golden, dtype: torch.dtype) -> None:
    query, key = given = golden.inputs(dtype)
    grid = Grid((6, 6))
    module = AdditiveAttention(16, 1, grid).to(dtype)
    module.load_state_dict({name.lower(): tensor for name, tensor in golden.parameters().items()})
    q, v = key.unsqueeze(1), query.unsqueeze(1)  # (B, 1, N, C)
    golden.check_call(module(q, q, v, grid).squeeze(1), given)
    golden.check_parameters(module, str.lower)


@both_precisions
@of_case("additive")
def test_layer_equals_swiftformers(golden: Golden, dtype: torch.dtype) -> None:
    """The mechanism has all `token_dim * num_heads` channels, whatever our number of heads is."""
    (x,) = given = golden.inputs(dtype)
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}
    grid, heads = Grid((1, x.shape[1])), 4
    module = AdditiveAttention(16, heads, grid)
    own = {"w_g": p["w_g"], "proj.weight": p["Proj.weight"], "proj.bias": p["Proj.bias"]}
    q, v = (
        F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"]).unflatten(2, (heads, -1)).transpose(1, 2)
        for name in ("to_key", "to_query")
    )
    out = joined(torch.func.functional_call(module, own, (q, q, v, grid), strict=True))
    golden.check_call(F.linear(out, p["final.weight"], p["final.bias"]), given)
    for name in golden.named("grad_param."):
        golden.check(name, p[name.removeprefix("grad_param.")].grad)


def test_additive_layer_projects_keys_then_queries_and_back() -> None:
    grid = Grid((3, 5))
    layer = AttentionLayer(24, 3, grid, attention="additive").double()
    x = inputs(layer.mechanism, grid).v.transpose(1, 2).flatten(2)
    key, query = layer.qkv(x).split(24, dim=2)
    want = torch.stack([additive(layer.mechanism, key[b], query[b])[0] for b in range(2)])
    assert_near(layer(x, grid), layer.proj(want), 1e-12)


def test_the_matrix_of_additive_needs_the_values() -> None:
    module = mechanism("additive", GRID)
    given = inputs(module, GRID)
    with pytest.raises(UserError, match="depends on the values; pass v="):
        attention_matrix(module, given.q, given.k, GRID)


# Cross-covariance


def xca(temperature: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (N, d) of one head, and its matrix (d, d), channel by channel."""
    q, k = ([x / x.square().sum().sqrt() for x in tokens.T] for tokens in (q, k))
    weights = torch.stack([torch.stack([(temperature * a.dot(b)).exp() for b in k]) for a in q])
    matrix = weights / weights.sum(1, keepdim=True)
    channels = [sum(matrix[c, e] * v[:, e] for e in range(len(k))) for c in range(len(q))]
    return torch.stack(channels, dim=1), matrix


@pytest.mark.parametrize("grid", [GRID, Grid((5, 2))], ids=str)
def test_xca_equals_formula(grid: Grid) -> None:
    module = mechanism({"name": "xca", "temperature": 3}, grid)
    given = inputs(module, grid, grad=True)
    found = [xca(module.temperature[h, 0, 0], *(x[b, h] for x in given[:3])) for b in range(2) for h in range(3)]
    want, matrices = (torch.stack(each).unflatten(0, (2, 3)) for each in zip(*found, strict=True))
    assert_same_gradients(given(module, grid), want, [*given.tensors, module.temperature], 1e-10)
    assert_near(channel_matrix(module, given.q, given.k, grid), matrices, 1e-12)


@both_precisions
@of_case("xca_core")
def test_equals_xcit(golden: Golden, dtype: torch.dtype) -> None:
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]))
    module = XCAttention(golden.constructor["dim"], golden.constructor["num_heads"], grid).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(q, k, v, grid), given)
    golden.check_parameters(module, str)


@both_precisions
@of_case("xca")
def test_layer_equals_xcits(golden: Golden, dtype: torch.dtype) -> None:
    def ours(name: str) -> str:
        return f"mechanism.{name}" if name == "temperature" else name

    (x,) = given = golden.inputs(dtype)
    layer = AttentionLayer(16, 2, Grid((5, 8)), attention="xca").to(dtype)
    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, Grid((5, 8))), given)
    golden.check_parameters(layer, ours)


def test_gradients_of_the_cosines_also_of_channels_of_zeros_and_second_ones() -> None:
    q, k = randn(2, 2, 3, 6, 4)
    q[..., 1] = 0
    given, gradient = (q.requires_grad_(), k.requires_grad_()), randn(2, 3, 4, 4)
    units = (x / x.norm(dim=-2, keepdim=True).clamp_min(1e-12) for x in given)
    found, want = (
        torch.autograd.grad(y, given, gradient) for y in (cosines(q, k, 1e-12), next(units).mT @ next(units))
    )
    assert_near(found[0][..., 2:], want[0][..., 2:], 1e-13)
    assert_near(found[1], want[1], 1e-13)
    assert found[0].isfinite().all()
    few = (randn(1, 2, 3, 2, seed=1).requires_grad_(), randn(1, 2, 3, 2, seed=2).requires_grad_())
    assert torch.autograd.gradgradcheck(lambda q, k: cosines(q, k, 1e-12), few)


def test_xca_has_no_matrix_and_no_rank_over_tokens() -> None:
    module = mechanism("xca", GRID)
    given = inputs(module, GRID)
    for look in (attention_matrix, attention_rank):
        with pytest.raises(UserError, match="XCAttention mixes the channels of each token by a matrix A, 8 x 8 per"):
            look(module, given.q, given.k, GRID, v=given.v)
    other = mechanism("linear", GRID)
    assert channel_matrix(other, given.q, given.k, GRID) is None


def test_temperature_is_not_decayed() -> None:
    layer = AttentionLayer(24, 3, GRID, attention="xca")
    decayed, kept = parameter_groups(layer, lr=1.0, weight_decay=0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0)
    assert any(p is layer.mechanism.temperature for p in kept["params"])
