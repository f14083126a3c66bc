"""Inner models of T5 and ViT^3 equal the authors' code, and, option by option, a step of autograd on inner losses."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linvit
from linvit import AttentionLayer, Grid, UserError
from linvit.analysis import Recorder, attention_matrix
from linvit.attention.t5 import T5Attention
from linvit.attention.vittt import ViTTTAttention
from linvit.backbones.ravlt import ConvMlp
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.weights.layouts.backbones import H_VITTT, VITTT
from tests.attention.rotary_formula import angles, turned
from tests.golden_files import Golden, both_precisions, of_case, our_state
from tests.helpers import assert_formula, formulas, inputs, mechanism, randn

MLP = {"inner_model": "silu_mlp"}
VARIANTS: dict[str, dict[str, Any]] = {"t5": {}, "t5_v0": {**MLP, "conv": 0}, "t5_dit": {**MLP, "inner_loss": "mse"}}
OF_T5 = [*VARIANTS.values(), {"inner_loss": "mse", "inner_lr": 0.3}, {"key_norm": "none", "conv": 5}]
OF_VITTT: list[dict[str, Any]] = [{}, {"rotary": True}, {"inner_lr": 0.3}]
GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((1, 1)), Grid((5, 2))]


def convolved(x: Tensor, conv: torch.nn.Module | None, grid: Grid) -> Tensor:
    """`x + conv(x)` for the patches of (B, h, N, d)."""
    if conv is None:
        return x
    plane = x[:, :, grid.num_prefix :].transpose(1, 2).flatten(2).mT.unflatten(2, grid.size)
    local = conv(plane).flatten(2).mT.unflatten(2, x.shape[1::2]).transpose(1, 2)
    return x + F.pad(local, (0, 0, grid.num_prefix, 0))


def inner(weights: list[Tensor], x: Tensor) -> Tensor:
    if len(weights) == 2:
        return F.silu(x @ weights[0]) @ weights[1]
    return (F.silu(x @ weights[0]) * (x @ weights[1])) @ weights[2]


def t5(options: dict[str, Any], module: T5Attention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """f' by autograd of the inner loss, whose gradient is itself differentiated."""
    if options.get("key_norm") != "none":
        k = (k - k.mean(2, keepdim=True)) / (k.var(2, correction=0, keepdim=True) + 1).sqrt()
    q, k = convolved(q, module.q_conv2d, grid), convolved(k, module.k_conv2d, grid)
    weights = [w.expand(len(q), -1, -1, -1) for w in (module.w1, module.w2, module.w3) if w is not None]
    made, scale = inner(weights, k), 1 / (math.sqrt(q.shape[3]) * k.shape[2])
    loss = (made - v).square().sum() / 2 if options.get("inner_loss") == "mse" else -(made * v).sum()
    steps = torch.autograd.grad(scale * loss, weights, create_graph=True)
    return inner([w - options.get("inner_lr", 1) * g for w, g in zip(weights, steps, strict=True)], q)


def divided(gradient: Tensor, dims: tuple[int, ...]) -> Tensor:
    return gradient / (gradient.square().sum(dims, keepdim=True).sqrt() + 1)


def vittt(
    options: dict[str, Any], module: ViTTTAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, x: Tensor
) -> Tensor:
    """Both branches by autograd of their inner losses, image by image."""
    if options.get("rotary"):
        table = angles(grid, grid.size, module.dim, last=False)
        q, k = (
            turned(t.transpose(1, 2).flatten(2), table).unflatten(2, (t.shape[1], -1)).transpose(1, 2) for t in (q, k)
        )
    rate = options.get("inner_lr", 1)
    images = []
    for i in range(len(x)):
        weights = [module.w1[0] * 1, module.w2[0] * 1]
        loss = -((k[i] @ weights[0]) * F.silu(k[i] @ weights[1]) * v[i]).sum() / (3 * k.shape[2])
        steps = torch.autograd.grad(loss, weights, create_graph=True)
        first, second = (w - rate * divided(g, (-2,)) for w, g in zip(weights, steps, strict=True))
        heads = (q[i] @ first) * F.silu(q[i] @ second)

        planes = F.linear(x[i], module.qkv2.weight, module.qkv2.bias)[grid.num_prefix :].mT.unflatten(1, grid.size)
        q2, k2, v2 = planes.chunk(3)
        kernel = module.w3 * 1
        made = F.conv2d(k2, kernel, padding=1, groups=len(kernel))
        (step,) = torch.autograd.grad(-(made * v2).sum() / (3 * v2[0].numel()), kernel, create_graph=True)
        local = F.conv2d(q2, kernel - rate * divided(step, (-2, -1)), padding=1, groups=len(kernel))
        images.append(torch.cat([heads, F.pad(local.flatten(1).mT, (0, 0, grid.num_prefix, 0))[None]]))
    return torch.stack(images)


@formulas({"t5": (t5, OF_T5, GRIDS), "vittt": (vittt, OF_VITTT, GRIDS)})
def test_equals_formula(spec: dict[str, Any], grid: Grid, naive: Any) -> None:
    assert_formula(spec, grid, partial(naive, spec), 1e-9)


# T5


@both_precisions
@of_case("t5_core", "t5_v0_core", "t5_dit_core")
def test_t5_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, given = golden.constructor, golden.inputs(dtype)
    sizes = golden.kwargs
    grid = Grid((sizes["H"], sizes["W"]) if sizes else (1, given[0].shape[2]))
    options = VARIANTS[golden.meta["case"].removesuffix("_core")]
    module = T5Attention(official["dim"], official["num_heads"], grid, **options).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, lambda name: name)


@both_precisions
@of_case(*VARIANTS)
def test_t5_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    official, (x,) = golden.constructor, golden.inputs(dtype)
    sizes = golden.kwargs
    grid = Grid((sizes["H"], sizes["W"]) if sizes else (1, x.shape[1]))
    spec = {"name": "t5", **VARIANTS[golden.meta["case"]]}
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec).to(dtype)

    def our_name(name: str) -> str:
        return name if name.startswith(("qkv", "proj")) else f"mechanism.{name}"

    layer.load_state_dict({our_name(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, grid), [x])
    golden.check_parameters(layer, our_name)


def test_analysis_says_why_there_is_no_matrix_and_how_large_the_state_is() -> None:
    model = linvit.create_backbone("deit_nano", attention="t5")
    with Recorder(model) as recorder:
        model(torch.randn(1, 3, 32, 32))
    call = recorder.calls["blocks.0.attn"]
    with pytest.raises(UserError, match="T5Attention has no matrix over tokens, and no rank: one step of training"):
        attention_matrix(call.mechanism, call.q, call.k, call.grid, v=call.v)
    assert call.state() == 4 * 3 * 3 * 32 * 32  # three matrices of each of three heads


def test_bias_of_the_keys_has_no_effect() -> None:
    grid = Grid((3, 4))
    module = mechanism("t5", grid)
    q, k, v, _ = inputs(module, grid)
    torch.testing.assert_close(module(q, k + randn(1, 3, 1, 8), v, grid), module(q, k, v, grid))


# ViT^3


@both_precisions
@of_case("vittt_core")
def test_vittt_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, kwargs, given = golden.constructor, golden.kwargs, golden.inputs(dtype)
    grid = Grid((kwargs["h"], kwargs["w"]))
    module = ViTTTAttention(official["dim"], official["num_heads"], grid, rotary=kwargs["rope"]).to(dtype)
    module.load_state_dict(golden.parameters(), strict=False)
    heads = module.core(*given[:3], grid).transpose(1, 2).flatten(2)
    local = module.convolved(*(grid.plane(x) for x in given[3:])).flatten(2).mT
    golden.check_call(torch.cat([heads, local], -1), given)
    golden.check_parameters(module, lambda name: name)


def layer_of(golden: Golden, size: tuple[int, int], rotary: bool) -> AttentionLayer:
    attention, official = {"name": "vittt", "rotary": rotary}, golden.constructor
    return AttentionLayer(official["dim"], official["num_heads"], Grid(size), attention=attention)


@both_precisions
@of_case("vittt")
def test_vittt_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
    kwargs, leaves, (x,) = golden.kwargs, golden.leaves(dtype), golden.inputs(dtype)
    grid = Grid((kwargs["h"], kwargs["w"]))
    layer = layer_of(golden, grid.size, golden.meta["options"]["rotary"]).to(dtype)
    state = our_state(leaves, VITTT, "blocks.0.attn.", "blocks.0.attn.")
    assert state.keys() == layer.state_dict().keys()
    golden.check_call(torch.func.functional_call(layer, state, (x, grid)), [x])
    golden.check_leaves(leaves)


@both_precisions
@of_case("vittt_block", "vittt_h_block")
def test_block_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    official, kwargs, (x,) = golden.constructor, golden.kwargs, golden.inputs(dtype)
    pyramid = golden.meta["case"] == "vittt_h_block"
    size = tuple(official["input_resolution"]) if pyramid else (kwargs["H"], kwargs["W"])
    dim, hidden = official["dim"], int(official["dim"] * official["mlp_ratio"])
    mlp = ConvMlp(dim, hidden, last_act=True) if pyramid else Mlp(dim, hidden)
    block = Block(dim, layer_of(golden, size, pyramid), mlp, 0, 1e-5 if pyramid else 1e-6, cpe=1).to(dtype)
    leaves = {name: leaf for name, leaf in golden.leaves(dtype).items() if name != "rope.rotations"}
    names = (H_VITTT, "layers.0.blocks.0.", "stages.0.blocks.0.") if pyramid else (VITTT, *["blocks.0."] * 2)
    state = our_state(leaves, *names)
    assert state.keys() == block.state_dict().keys()
    golden.check_call(torch.func.functional_call(block, state, (x, Grid(size))), [x])
    golden.check_leaves(leaves)


def test_state_and_what_does_not_fit() -> None:
    module = mechanism("vittt", GRIDS[1])  # 3 heads of 8 channels
    assert module.facts.state_size == 2 * 3 * 64 + 9 * 8
    assert (module.out_heads, module.out_dim) == (4, 32)
    q, k, v, _ = inputs(module, GRIDS[1])
    with pytest.raises(UserError, match="pass it as x="):
        module(q, k, v, GRIDS[1])
    with pytest.raises(UserError, match="rotary position embeddings turn pairs of channels"):
        mechanism({"name": "vittt", "rotary": True}, GRIDS[1], dim=6, num_heads=2)
