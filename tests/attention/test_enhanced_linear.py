"""Enhanced linear attention equals EfficientViT's code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import Attention, AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix
from linvit.attention.enhanced_linear import EnhancedLinearAttention
from linvit.inference.onnx import in_onnxruntime, to_onnx
from linvit.layers.block import Block
from linvit.layers.mlp import BatchNormLinear, feed_forward
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism

GRIDS = [
    Grid((7, 9), num_prefix=2),
    Grid((2, 3)),  # smaller than the kernel, fewer tokens than channels per head
    Grid((1, 20), num_prefix=1),
    Grid((5, 7), (2, 3), num_prefix=2),
]
OPTIONS = [
    {},
    {"scales": []},
    {"scales": [], "eps": 0.5},
    {"scales": (1,)},
    {"scales": [3, 5]},
    {"scales": [5, 5, 7], "agg_bias": True},
    {"agg_bias": True},
    {"eps": 1e-5},
    {"eps": 0.5},
    {"head_dim": 4, "scales": [3]},
    {"head_dim": 5, "heads_ratio": 2.0, "scales": [3]},
]


# The reference implementation


def leaves(golden: Golden, prefix: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The official state below a prefix, its parameters ready for gradients."""
    return {
        name: tensor.to(dtype, copy=True).requires_grad_("norm.running" not in name)
        for name, tensor in golden.parameters(prefix).items()
        if tensor.is_floating_point()
    }


def attention_layer(golden: Golden, p: dict[str, Tensor], grid: Grid) -> AttentionLayer:
    """Our layer for the official one, which may have another width behind it than before it."""
    official = golden.constructor
    width = official["dim"]
    spec = {
        "name": "enhanced_linear",
        "head_dim": width,
        "heads_ratio": official.get("heads_ratio", 1.0),
        "scales": official.get("scales", [5]),
        "eps": official.get("eps", 1e-15),
        "agg_bias": "aggreg.0.0.bias" in p,
        "proj_norm": "bn2d",
    }
    layer = AttentionLayer(official["in_channels"], 1, grid, attention=spec, qkv_bias="qkv.conv.bias" in p)
    assert layer.mechanism.num_heads == official.get("heads", official["in_channels"] // width)
    layer.proj = BatchNormLinear(layer.mechanism.out_dim, official.get("out_channels", official["in_channels"]))
    return layer.to(p["qkv.conv.weight"].dtype).eval()


def own_state(mechanism: Attention, p: dict[str, Tensor]) -> dict[str, Tensor]:
    """The official state of LiteMLA as our layer names and arranges it, differentiably."""
    heads, width = mechanism.num_heads, mechanism.head_dim
    own = {}
    for name, tensor in p.items():
        module, _, leaf = name.rpartition(".")
        if module.startswith("aggreg."):  # rows [q | k | v] of each head
            for letter, part in zip("qkv", tensor.unflatten(0, (heads, 3, width)).unbind(1), strict=True):
                own[f"mechanism.{letter}_aggregations.{name.removeprefix('aggreg.')}"] = part.flatten(0, 1)
        elif module == "qkv.conv":
            rows = tensor.flatten(1) if leaf == "weight" else tensor
            own[f"qkv.{leaf}"] = rows.unflatten(0, (heads, 3, width)).transpose(0, 1).flatten(0, 2)
        elif module == "proj.norm":
            own[name] = tensor
    weight = p["proj.conv.weight"].flatten(1).unflatten(1, (-1, heads, width))  # columns: scale, head, channel
    own["proj.weight"] = weight.transpose(1, 2).flatten(1)
    if "proj.conv.bias" in p:  # a bias before the norm is a shift behind it
        spread = (p["proj.norm.running_var"] + 1e-5).sqrt()
        own["proj.norm.bias"] = p["proj.norm.bias"] + p["proj.norm.weight"] * p["proj.conv.bias"] / spread
    return own


def check_parameter_gradients(golden: Golden, prefix: str, p: dict[str, Tensor]) -> None:
    names = golden.named(f"grad_param.{prefix}")
    assert names
    for name in names:
        golden.check(name, p[name.removeprefix(f"grad_param.{prefix}")].grad)


@both_precisions
@of_case("litemla")
def test_equals_efficientvit(golden: Golden, dtype: torch.dtype) -> None:
    """Both paths of the reference: the quadratic one for H * W <= d is the same function."""
    (x,) = given = golden.inputs(dtype)
    assert golden.constructor["norm"] == [None, "bn2d"]
    grid = Grid(tuple(x.shape[2:]))
    p = leaves(golden, "", dtype)
    layer = attention_layer(golden, p, grid)
    out = torch.func.functional_call(layer, own_state(layer.mechanism, p), (x.flatten(2).mT, grid))
    golden.check_call(grid.plane(out), given)
    check_parameter_gradients(golden, "", p)


@both_precisions
@of_case("efficientvit_block")
def test_equals_efficientvit_block(golden: Golden, dtype: torch.dtype) -> None:
    """Two residual branches without norms before them: the attention, then MBConv."""
    (x,) = given = golden.inputs(dtype)
    grid, channels = Grid(tuple(x.shape[2:])), x.shape[1]
    context, local = "context_module.main.", "local_module.main."
    p, conv = leaves(golden, context, dtype), leaves(golden, local, dtype)
    layer = attention_layer(golden, p, grid)
    mlp = feed_forward("mbconv", channels, golden.constructor["expand_ratio"] * channels)
    block = Block(channels, layer, mlp, drop_path=0.0, norm_eps=1e-5).to(dtype).eval()
    block.norm1 = block.norm2 = nn.Identity()
    state = {f"attn.{name}": tensor for name, tensor in own_state(layer.mechanism, p).items()}
    for name, tensor in conv.items():
        linear = name in ("inverted_conv.conv.weight", "point_conv.conv.weight")
        state[f"mlp.{name.replace('.conv.', '.')}"] = tensor.flatten(1) if linear else tensor
    out = torch.func.functional_call(block, state, (x.flatten(2).mT, grid))
    golden.check_call(grid.plane(out), given)
    check_parameter_gradients(golden, context, p)
    check_parameter_gradients(golden, local, conv)


# The formula


def naive_conv(plane: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """A zero-padded grouped convolution of (B, C, H, W), tap by tap."""
    side, (height, width) = weight.shape[-1], plane.shape[2:]
    padded = F.pad(plane, (side // 2,) * 4).unflatten(1, (groups, -1))  # (B, g, C/g, H+, W+)
    taps = weight.unflatten(0, (groups, -1))  # (g, C'/g, C/g, k, k)
    out = torch.zeros(())
    for i in range(side):
        for j in range(side):
            window = padded[..., i : i + height, j : j + width]
            out = out + torch.einsum("bgchw,goc->bgohw", window, taps[..., i, j])
    return out.flatten(1, 2) if bias is None else out.flatten(1, 2) + bias[:, None, None]


def naive_aggregation(
    module: EnhancedLinearAttention, letter: str, index: int, x: Tensor, size: tuple[int, int], num_prefix: int
) -> Tensor:
    """Tokens (B, h, N, d) aggregated: patches by both convolutions, prefix queries as they are, prefix k and v zero."""
    depthwise, pointwise = getattr(module, f"{letter}_aggregations")[index]
    prefix, patches = x[:, :, :num_prefix], x[:, :, num_prefix:]
    plane = patches.transpose(2, 3).reshape(x.shape[0], -1, *size)
    plane = naive_conv(plane, depthwise.weight, depthwise.bias, groups=plane.shape[1])
    plane = naive_conv(plane, pointwise.weight, pointwise.bias, groups=x.shape[1])
    patches = plane.reshape(*x.shape[:2], x.shape[3], -1).transpose(2, 3)
    return torch.cat([prefix if letter == "q" else 0 * prefix, patches], dim=2)


def naive_scales(
    module: EnhancedLinearAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid
) -> list[tuple[Tensor, Tensor]]:
    """The matrix (B, h, N, M) of every scale and the values (B, h, M, d) that it acts on."""
    scales = [(q, k, v)]
    for index in range(len(module.scales)):
        sizes = {"q": grid.size, "k": grid.keys_size, "v": grid.keys_size}
        parts = {"q": q, "k": k, "v": v}
        scales.append(
            tuple(naive_aggregation(module, s, index, x, sizes[s], grid.num_prefix) for s, x in parts.items())
        )
    result = []
    for q_s, k_s, v_s in scales:
        scores = torch.einsum("bhnd,bhmd->bhnm", q_s.clamp(min=0), k_s.clamp(min=0))
        result.append((scores / (scores.sum(-1, keepdim=True) + module.eps), v_s))
    return result


def naive(module: EnhancedLinearAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """The scales side by side."""
    return torch.cat([matrix @ values for matrix, values in naive_scales(module, q, k, v, grid)], dim=-1)


def alive(module: Attention, grid: Grid, **options: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v, the first two with a positive mean, so that no denominator is near 0."""
    given = inputs(module, grid, **options)
    return tuple(x.detach().add(shift).requires_grad_() for x, shift in ((given.q, 0.5), (given.k, 0.5), (given.v, 0)))


def check(options: dict[str, object], grid: Grid, **context: int) -> None:
    """Output and the gradients of inputs and parameters equal the formula's."""
    module = mechanism({"name": "enhanced_linear", **options}, grid, **context)
    assert module.out_dim == module.dim * (1 + len(module.scales))
    q, k, v = alive(module, grid)
    out = module(q, k, v, grid)
    heads = module.num_heads
    assert out.shape == (2, heads, grid.num_queries, module.out_dim // heads)
    assert_same_gradients(out, naive(module, q, k, v, grid), [q, k, v, *module.parameters()], 1e-9)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_formula(options: dict[str, object]) -> None:
    check(options, Grid((4, 3), num_prefix=1))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_formula_on_any_grid(grid: Grid) -> None:
    check({"scales": [3, 5]}, grid)


def test_equals_formula_with_narrow_keys() -> None:
    check({"scales": [3], "agg_bias": True}, Grid((4, 3), num_prefix=1), key_dim=5)


# The equivalent matrices


@pytest.mark.parametrize("grid", [Grid((3, 4), num_prefix=2), Grid((4, 6), (2, 3))], ids=str)
@pytest.mark.parametrize("scales", [[], [3, 5]], ids=str)
def test_matrices_act_on_the_values_of_their_scale(scales: list[int], grid: Grid) -> None:
    module = mechanism({"name": "enhanced_linear", "scales": scales}, grid)
    assert module.facts.linear_in_values == (not scales)
    q, k, v = alive(module, grid)
    matrix = attention_matrix(module, q, k, grid, v=v)
    assert matrix.shape == (2, 3 * (1 + len(scales)), grid.num_queries, grid.num_keys)
    want = torch.stack([m for m, _ in naive_scales(module, q, k, v, grid)], dim=2).flatten(1, 2)
    assert_near(matrix, want, 1e-12)
    values = torch.stack(module.values(v, grid), dim=2).flatten(1, 2)
    mixed = (matrix @ values).unflatten(1, (3, -1)).transpose(2, 3).flatten(3)  # (B, h, N, (1 + S) d)
    assert_near(mixed, module(q, k, v, grid), 1e-12)
    left, right = module.factors(q, k, grid)
    assert_near(left @ right.mT, matrix, 1e-12)


# Prefix tokens, tokens without a positive channel


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float16, 1e-3), (torch.float32, 1.0)])
def test_tokens_without_a_positive_channel_give_zero_and_finite_gradients(dtype: torch.dtype, scale: float) -> None:
    grid = Grid((3, 4))
    module = mechanism("enhanced_linear", grid, dtype=dtype)
    given = inputs(module, grid, dtype=dtype, scale=scale)
    given.q[:, :, 0] = -scale
    given.k[0] = -scale  # no key at all
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, grid)
    out.float().sum().backward()
    assert (out[1, :, 0, :8] == 0).all()
    assert (out[0, :, :, :8] == 0).all()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])


# Heads, initial values and errors


@pytest.mark.parametrize(
    ("options", "heads", "width"),
    [
        ({}, 3, 8),
        ({"head_dim": 8}, 3, 8),
        ({"head_dim": 4}, 6, 4),
        ({"head_dim": 7}, 3, 7),  # not all of C
        ({"head_dim": 7, "heads_ratio": 1.5}, 4, 7),  # whole heads first, as the reference
        ({"head_dim": 12, "heads_ratio": 0.5}, 1, 12),
        ({"heads_ratio": 2.0}, 6, 8),
        ({"heads_ratio": 0.5}, 1, 8),
    ],
    ids=str,
)
def test_heads(options: dict[str, object], heads: int, width: int) -> None:
    module = EnhancedLinearAttention(24, 3, Grid((4, 4)), **options)
    assert (module.num_heads, module.head_dim, module.key_dim) == (heads, width, width)
    assert (module.dim, module.out_dim) == (heads * width, 2 * heads * width)


def test_heads_of_a_width_of_their_own_need_not_be_the_hosts() -> None:
    assert EnhancedLinearAttention(24, 5, Grid((4, 4)), head_dim=8).num_heads == 3
    with pytest.raises(UserError, match="dim 24 is not divisible by num_heads 5"):
        EnhancedLinearAttention(24, 5, Grid((4, 4)), heads_ratio=2.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": 5}, r"scales must be a list such as \[5\] or \[3, 5\], or \[\] for none; got 5"),
        ({"scales": "5"}, "scales must be a list .*; got '5'"),
        *(
            ({"scales": [3, side]}, rf"scales must be odd and positive, such as \[5\] .*; got {side!r}$")
            for side in (4, -1, 2.5, True, "5")
        ),
        ({"head_dim": 25}, "dim 24 has room for 0 heads of 25 channels, .* set a smaller head_dim"),
        ({"heads_ratio": 0.3}, "room for 3 heads of 8 channels, and heads_ratio 0.3 leaves none; .* a larger"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnhancedLinearAttention(24, 3, Grid((4, 4)), **options)


def test_queries_without_a_positive_entry_give_zero_in_onnx_too() -> None:
    grid = Grid((3, 4))
    module = mechanism("enhanced_linear", grid, dtype=torch.float32).eval()
    given = inputs(module, grid, dtype=torch.float32)
    q = -given.q.abs()

    class Call(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return self.module(q, k, v, grid)

    run = in_onnxruntime(to_onnx(Call().eval(), (q, given.k, given.v)).SerializeToString())
    (found,) = run(q, given.k, given.v)
    assert_near(found, module(q, given.k, given.v, grid), 1e-5)
