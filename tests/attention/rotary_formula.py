"""What the tests of mechanisms with a rotated numerator share: naive formulas, and the references' vectors."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Attention, AttentionLayer, Grid
from linvit.attention.ops.rotary import RotaryLinearAttention
from tests.attention.soft_formula import naive_local
from tests.golden_files import Golden

GRIDS = [Grid((3, 4), num_prefix=1), Grid((1, 7)), Grid((4, 6), (2, 3), num_prefix=1)]


def positive(x: Tensor) -> Tensor:
    """`elu(x) + 1`."""
    return torch.where(x > 0, x + 1, torch.exp(x))


def angles(grid: Grid, size: tuple[int, int], width: int, last: bool = True) -> Tensor:
    """The angle of every token's every channel, (tokens, width), one by one; 0 for prefix tokens."""
    count = width // 4
    span = max(count - 1 if last else count, 1)
    steps = [units / side for units, side in zip(grid.size, size, strict=True)]
    places = [
        ((row + 0.5) * steps[0] - 0.5, (column + 0.5) * steps[1] - 0.5)
        for row in range(size[0])
        for column in range(size[1])
    ]
    rows = [
        [place[c // (width // 2)] * 10000 ** (-(c // 2 % count) / span) for c in range(width)]
        for place in [(0.0, 0.0)] * grid.num_prefix + places
    ]
    return torch.tensor(rows, dtype=torch.float64)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """(..., N, C) with neighbours turned by their angle (N, C) as complex numbers."""
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * torch.exp(1j * angle[:, ::2])).flatten(-2)


def rotated(x: Tensor, grid: Grid, size: tuple[int, int], width: int | None = None) -> Tensor:
    """(B, h, N, d) turned, every `width` channels alike."""
    width = width or x.shape[-1]
    return turned(x, angles(grid, size, width).repeat(1, x.shape[-1] // width))


def lepe(module: RotaryLinearAttention, v: Tensor, grid: Grid) -> Tensor:
    """The convolution of the values as one Toeplitz matrix per channel, with the bias on patches; 0 without one."""
    if module.lepe is None:
        return torch.zeros(())
    heads, width = v.shape[1], v.shape[3]
    matrices = naive_local(module.lepe.weight, grid).unflatten(0, (heads, width))  # (h, d, N, M)
    bias = module.lepe.bias.view(heads, 1, width).expand(-1, grid.size[0] * grid.size[1], -1)
    bias = F.pad(bias, (0, 0, grid.num_prefix, 0))
    return torch.einsum("hdnm,bhmd->bhnd", matrices, v) + bias


def check_core(golden: Golden, mechanism: type[Attention], dtype: torch.dtype, **options: Any) -> None:
    """Holds a mechanism to the reference's q, k, v -> o and to its gradients, parameters included."""
    official = golden.constructor
    size = tuple(official.get("input_resolution") or (golden.kwargs["H"], golden.kwargs["W"]))
    grid = Grid(size)
    module = mechanism(official["dim"], official["num_heads"], grid, **options).to(dtype)
    module.load_state_dict({name: t for name, t in golden.parameters().items() if not name.startswith("rope.")})
    given = golden.inputs(dtype)
    golden.check_call(module(*given, grid), given)
    golden.check_parameters(module, lambda name: name)


def check_layer(golden: Golden, attention: str, dtype: torch.dtype) -> None:
    """Holds the layer around a mechanism to the reference's module on planes (B, C, H, W), parameters included."""
    official, leaves = golden.constructor, golden.leaves(dtype)
    (plane,) = given = golden.inputs(dtype)
    grid = Grid(plane.shape[2:])
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=attention).to(dtype)
    names = {"lepe": "mechanism.lepe", "ln": "out_norm", "out_proj": "proj", "s1": "mechanism.s1", "s2": "mechanism.s2"}
    state = {}
    for name, leaf in leaves.items():
        module, dot, kind = name.partition(".")
        if module in ("qkvo", "qkvg"):  # a 1x1 convolution, or a linear layer
            rows = leaf.flatten(1) if leaf.ndim > 1 else leaf
            state[f"qkv.{kind}"], state[f"gate.{kind}"] = rows.split(
                [3 * layer.proj.in_features, layer.proj.in_features]
            )
        else:
            state[names.get(module, module) + dot + kind] = (
                leaf.flatten(1) if module == "proj" and leaf.ndim > 1 else leaf
            )
    assert set(state) == set(layer.state_dict())
    out = torch.func.functional_call(layer, state, (plane.flatten(2).mT, grid))
    golden.check_call(out.mT.unflatten(2, grid.size), given)
    golden.check_leaves(leaves)
