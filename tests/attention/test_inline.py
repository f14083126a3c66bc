"""InLine attention equals its authors' code and, option by option, the formula written out naively."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.layers.stripes import StripeBranch
from linvit.weights.layouts.backbones import CSWIN, DEIT
from tests.attention.soft_formula import naive_local
from tests.golden_files import Golden, both_precisions, layer_state, of_case, our_state
from tests.helpers import (
    assert_exported_for_any_batch,
    assert_near,
    assert_same_gradients,
    inputs,
    mechanism,
    options_then_grids,
    randn,
)

# The reference implementation


@both_precisions
@of_case("inline_core")
def test_mechanism_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, leaves = golden.constructor, golden.leaves(dtype)
    q, k, v, x = given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = linvit.create_attention("inline", dim=official["dim"], num_heads=official["num_heads"], grid=grid)
    state = our_state(leaves, DEIT, "blocks.0.attn.", "blocks.0.attn.mechanism.")
    golden.check_call(functional_call(module, state, (q, k, v, grid), {"x": x}, strict=True), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("inline_cswin_core")
def test_global_stripes_equal_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, leaves = golden.constructor, golden.leaves(dtype)
    *qkv, x = given = golden.inputs(dtype)
    grid, heads = Grid((official["resolution"],) * 2), official["num_heads"]
    branch = StripeBranch(official["dim"], heads, grid, (None, None), attention="inline")
    state = our_state(leaves, CSWIN, "stage1.0.attns.0.", "stages.0.blocks.0.attn.branches.0.")
    joined = [part.transpose(1, 2).flatten(2) for part in qkv]  # (B, N, C)
    out = functional_call(branch, state, (joined, x, grid), strict=True)
    golden.check_call(out.unflatten(2, (heads, -1)).transpose(1, 2), given)
    golden.check_leaves(leaves)


@both_precisions
@of_case("inline_deit", "inline_pvt", "inline_swin")
def test_layer_equals_the_authors(golden: Golden, dtype: torch.dtype) -> None:
    official, given, leaves = golden.constructor, golden.inputs(dtype), golden.leaves(dtype)
    if golden.meta["case"] == "inline_deit":
        grid = Grid((6, 6), num_prefix=1)
    else:
        grid = Grid(tuple(official.get("window_size") or golden.kwargs.values()))
    attention = {"name": "inline", "feature_map": official.get("kernel_func", "identity")}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=attention)
    golden.check_call(functional_call(layer, layer_state(golden, leaves, layer), (*given, grid), strict=True), given)
    golden.check_leaves(leaves)


# The formula


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


def naive(module: linvit.Attention, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, grid: Grid) -> Tensor:
    """The map, and the convolution as one matrix per image and channel."""
    out = torch.einsum("bhnm,bhmd->bhnd", naive_map(module, q, k), v)
    if x is None:
        return out
    local = torch.stack([naive_local(kernels[:, None], grid) for kernels in naive_kernels(module, x)])  # (B, C, N, M)
    return out + torch.einsum("bhdnm,bhmd->bhnd", local.unflatten(1, v.shape[1::2]), v)


OPTIONS: list[dict[str, object]] = [
    {},
    {"feature_map": "relu"},
    {"feature_map": "leaky_relu"},
    {"feature_map": "exp"},
    {"residual_kernel": 5},
    {"residual_kernel": 0},
]
GRIDS = [
    Grid((4, 3), num_prefix=1),
    Grid((3, 5), num_prefix=2),
    Grid((1, 7)),
    Grid((4, 6), (2, 3)),
    Grid((5, 4), (2, 3), num_prefix=1),
]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, object], grid: Grid) -> None:
    """Output and the gradients of inputs and parameters."""
    module = mechanism({"name": "inline", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, given.extra.get("x"), grid)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-12)


def test_equals_formula_with_narrow_keys() -> None:
    grid = Grid((4, 3))
    module = mechanism("inline", grid, key_dim=5)
    given = inputs(module, grid)
    assert_near(given(module, grid), naive(module, given.q, given.k, given.v, given.extra["x"], grid), 1e-13)


# The equivalent matrix


def test_every_image_has_kernels_of_its_own() -> None:
    grid = Grid((4, 4))
    module = mechanism("inline", grid)
    given = inputs(module, grid)
    same = given.map(lambda t: t[:1].expand_as(t))
    other = same._replace(extra=given.extra)
    assert_near(other(module, grid)[:1], same(module, grid)[:1], 1e-14)
    assert (other(module, grid) - same(module, grid))[1].abs().amin() > 0


# Errors


def test_the_convolution_asks_for_the_input() -> None:
    module, grid = mechanism("inline", Grid((4, 4))), Grid((4, 4))
    with pytest.raises(UserError, match="pass it as x=, or set residual_kernel=0"):
        module(*inputs(module, grid)[:3], grid)


def test_an_exported_network_is_for_any_number_of_images() -> None:
    model = linvit.create_backbone("deit_nano", attention="inline", depth=1, img_size=32)
    assert_exported_for_any_batch(model, randn(3, 3, 32, 32, dtype=torch.float32), 1e-5)
