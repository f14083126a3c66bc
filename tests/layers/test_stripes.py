"""Cross-shaped stripes equal CSWin's, and the plain formula with any mechanism on planes of any size."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import linvit
from linvit import Grid, Host, UserError
from linvit.layers.block import Block
from linvit.layers.mlp import Mlp
from linvit.layers.stripes import StripeAttention, StripeBranch
from linvit.layers.windows import Windows
from linvit.weights.layouts.backbones import CSWIN as LAYOUT
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, perturb, randn
from tests.layers.test_attention_layer import Seen

# The reference


@both_precisions
@of_case("cswin_block")
def test_equals_cswin_block(golden: Golden, dtype: torch.dtype) -> None:
    def our_name(official: str) -> str:
        return LAYOUT.rename(f"stage1.0.{official}").removeprefix("stages.0.blocks.0.")

    official, (x,) = golden.constructor, golden.inputs(dtype)
    dim, grid = official["dim"], Grid((official["reso"],) * 2)
    attn = StripeAttention(
        dim, official["num_heads"], grid, official["split_size"], qkv_bias=official.get("qkv_bias", False)
    )
    block = Block(dim, attn, Mlp(dim, int(dim * official["mlp_ratio"])), 0.0, norm_eps=1e-5).to(dtype)
    block.load_state_dict({our_name(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(block(x, grid), [x])
    for name in golden.named("grad_param."):
        golden.check(name, block.get_parameter(our_name(name.removeprefix("grad_param."))).grad)


@both_precisions
@of_case("cswin_lepe")
def test_equals_cswin_lepe_attention(golden: Golden, dtype: torch.dtype) -> None:
    official, (qkv,) = golden.constructor, golden.inputs(dtype)
    width = official["split_size"]
    stripe = {-1: (None, None), 0: (None, width), 1: (width, None)}[official["idx"]]
    grid = Grid((official["resolution"],) * 2)
    branch = StripeBranch(official["dim"], official["num_heads"], grid, stripe, attention="softmax").to(dtype)
    branch.load_state_dict({name.replace("get_v.", "lepe."): t for name, t in golden.parameters().items()})
    golden.check_call(branch(list(qkv), qkv[0], grid), [qkv])
    for name in golden.named("grad_param."):
        golden.check(name, branch.get_parameter(name.removeprefix("grad_param.").replace("get_v.", "lepe.")).grad)


# The formula


class Gated(Seen):
    host = Host(input=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, **extra: Tensor) -> Tensor:
        mean = super().forward(q, k, v, grid)
        return mean * extra["x"].unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


OWN_HEADS = {"name": "enhanced_linear", "head_dim": 4, "heads_ratio": 2.0, "scales": [3]}  # 8 channels of 6
SURROUNDED = "tests.layers.test_attention_layer:Surrounded"
MECHANISMS = [SURROUNDED, "softmax", "focused", "soft", "poly_nl", "enhanced_linear", f"{__name__}:Gated", OWN_HEADS]


def layer_of(
    attention: linvit.registry.Spec,
    grid: Grid,
    width: int | None,
    dim: int = 12,
    num_heads: int = 4,
    key_dim: int | None = None,
) -> StripeAttention:
    return perturb(StripeAttention(dim, num_heads, grid, width, attention=attention, key_dim=key_dim).double()).eval()


def naive(layer: StripeAttention, x: Tensor, size: tuple[int, int]) -> Tensor:
    """Stripe by stripe, line by line: a line off the plane is zeros."""
    halves, inputs = len(layer.branches), x
    if layer.stem is not None:
        x = layer.stem(x, Grid(size))  # of the whole plane
    projected, outputs, start = F.linear(x, layer.qkv.weight, layer.qkv.bias), [], 0
    tensors: list[dict[str, Tensor]] = [{"x": part} for part in x.chunk(halves, -1)]
    for letter in layer.projections:  # rows of the projection: [q | k | v], each with the vertical half first
        for branch, own in zip(layer.branches, tensors, strict=True):
            mechanism = branch.mechanism
            width = mechanism.dim if letter == "v" else mechanism.key_dim * mechanism.num_heads
            own[letter] = projected[..., start : start + width]
            start += width
    assert start == projected.shape[-1]

    for half, (branch, own) in enumerate(zip(layer.branches, tensors, strict=True)):
        axis = 2 - half  # vertical stripes are sets of columns
        width = branch.stripe[axis - 1] or size[axis - 1]
        count = math.ceil(size[axis - 1] / width)
        before = (count * width - size[axis - 1]) // 2
        out = torch.zeros(len(x), *size, branch.mechanism.out_dim, dtype=x.dtype)
        for stripe in range(count):
            lines = [stripe * width - before + line for line in range(width)]

            def cut(name: str, own: dict[str, Tensor] = own, lines: list[int] = lines, axis: int = axis) -> Tensor:
                plane = own[name].unflatten(1, size)
                zeros = torch.zeros_like(plane.select(axis, 0))
                there = range(size[axis - 1])
                return torch.stack([plane.select(axis, i) if i in there else zeros for i in lines], axis)

            def heads(plane: Tensor, count: int = branch.mechanism.num_heads) -> Tensor:
                return plane.flatten(1, 2).unflatten(-1, (count, -1)).transpose(1, 2)

            v, q = cut("v" if "v" in own else "x"), cut("q" if "q" in own else "x")
            k = cut("k") if "k" in own else q
            extra = {"x": cut("x").flatten(1, 2)} if branch.mechanism.host.input else {}
            mixed = branch.mechanism(heads(q), heads(k), heads(v), Grid((v.shape[1], v.shape[2])), **extra)
            plane = mixed.transpose(1, 2).flatten(2).unflatten(1, v.shape[1:3])
            plane = plane + branch.lepe(v.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            for line, place in enumerate(lines):
                if 0 <= place < size[axis - 1]:
                    out.select(axis, place).copy_(plane.select(axis, line))
        outputs.append(out.flatten(1, 2))
    whole = torch.cat(outputs, -1)
    if layer.gate is not None:
        whole = layer.out_norm(whole) * F.silu(F.linear(inputs, layer.gate.weight, layer.gate.bias))
    return F.linear(whole, layer.proj.weight, layer.proj.bias)


@pytest.mark.parametrize("attention", MECHANISMS, ids=str)
@pytest.mark.parametrize("width", [1, 3, None])
def test_equals_the_plain_formula(attention: linvit.registry.Spec, width: int | None) -> None:
    """Whole stripes, padding on one side, on both, a plane narrower than a stripe; built for yet another plane."""
    layer = layer_of(attention, Grid((6, 4)), width)
    assert len(layer.branches) == (1 if width is None else 2)
    for size in [(6, 3), (5, 4), (4, 7), (2, 1)]:
        x = randn(2, math.prod(size), 12, grad=True)
        assert_same_gradients(layer(x, Grid(size)), naive(layer, x, size), [x], 1e-12)


# Layout


@pytest.mark.parametrize(
    ("plane", "stripe", "before"),
    [
        ((6, 4), (6, 2), (0, 0)),
        ((5, 9), (5, 4), (0, 1)),  # the smaller half comes before
        ((3, 9), (7, 9), (2, 0)),
    ],
)
def test_stripes_are_cut_and_joined(plane: tuple[int, int], stripe: tuple[int, int], before: tuple[int, int]) -> None:
    stripes = Windows(plane, stripe, centred=True)
    assert stripes.before == before
    x = randn(2, math.prod(plane), 3)
    parts = stripes.partition(x)
    assert parts.shape[1:] == (math.prod(stripe), 3)
    assert parts.abs().sum() == pytest.approx(float(x.abs().sum()))  # nothing lost, zeros added
    assert torch.equal(stripes.reverse(parts), x)


@pytest.mark.parametrize(
    ("size", "width", "branches"),
    [((8, 8), 4, 2), ((8, 8), 8, 1), ((8, 8), 9, 1), ((8, 8), None, 1), ((4, 8), 4, 2), ((4, 8), 8, 1)],
)
def test_a_stripe_that_covers_the_nominal_plane_leaves_one_branch(
    size: tuple[int, int], width: int | None, branches: int
) -> None:
    layer = StripeAttention(12, 4, Grid(size), width, attention="focused")
    grids = [(size[0], width), (width, size[1])] if branches == 2 else [size]
    assert [branch.mechanism.grid.size for branch in layer.branches] == grids
    for branch in layer.branches:
        assert (branch.mechanism.dim, branch.mechanism.num_heads) == (12 // branches, 4 // branches)
        assert branch.lepe.weight.shape == (12 // branches, 1, 3, 3)


def test_both_halves_share_the_norm_behind_the_projection() -> None:
    spec = {"name": "enhanced_linear", "scales": [], "proj_norm": "bn2d"}
    layer = layer_of(spec, Grid((4, 4)), 2).train()
    out = layer(randn(2, 16, 12), Grid((4, 4)))
    assert_near(out.mean((0, 1)), layer.proj.norm.bias, 1e-12)


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"proj_drop": 1.5}, "proj_drop must be a number at least 0 and at most 1; got 1.5"),
        ({"width": 0}, "the width of a stripe must be at least 1, or None for the whole plane; got 0"),
        ({"num_heads": 3}, r"both are even; got 3 heads and 12 channels. Change them, or let one stripe cover"),
        ({"dim": 9, "num_heads": 2}, "got 2 heads and 9 channels"),
        ({"num_heads": 10}, "dim 6 is not divisible by num_heads 5"),
        ({"grid": Grid((4, 4), num_prefix=1)}, "no place for prefix tokens; got num_prefix=1"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StripeAttention(**{"dim": 12, "num_heads": 4, "grid": Grid((4, 4)), "width": 2, **options})
