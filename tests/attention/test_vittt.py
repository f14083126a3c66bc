"""ViT^3's inner models equal the authors' code, and, option by option, a step of autograd on the inner losses."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import AttentionLayer, Grid, UserError
from linvit.attention.vittt import ViTTTAttention
from linvit.backbones.ravlt import ConvMlp
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.weights.layouts.backbones import H_VITTT, VITTT
from tests.attention.rotary_formula import angles, turned
from tests.golden_files import Golden, both_precisions, of_case, our_state
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids

OPTIONS: list[dict[str, Any]] = [{}, {"rotary": True}, {"inner_lr": 0.3}]
GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((1, 1)), Grid((5, 2))]


def divided(gradient: Tensor, dims: tuple[int, ...]) -> Tensor:
    return gradient / (gradient.square().sum(dims, keepdim=True).sqrt() + 1)


def naive(module: ViTTTAttention, options: dict[str, Any], given: list[Tensor], grid: Grid, x: Tensor) -> Tensor:
    """Both branches by autograd of their inner losses, image by image."""
    q, k, v = given
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


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_equals_formula(options: dict[str, Any], grid: Grid) -> None:
    module = mechanism({"name": "vittt", **options}, grid)
    assert isinstance(module, ViTTTAttention)
    given = inputs(module, grid, grad=True)
    want = naive(module, options, [given.q, given.k, given.v], grid, given.extra["x"])
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-9)


@both_precisions
@of_case("vittt_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
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
def test_equals_reference_with_projections(golden: Golden, dtype: torch.dtype) -> None:
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
