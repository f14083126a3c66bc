"""What the tests of SOFT and SOFT++ have in common: their formulas written out naively, official parameter names."""

import math

import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.attention.ops.softmax_free import GaussianKernels, NewtonInverse
from tests.golden_files import Golden

GRIDS = [
    Grid((4, 6)),
    Grid((5, 7), num_prefix=2),  # not divisible by any ratio
    Grid((2, 3)),  # smaller than the ratio
    Grid((1, 13), num_prefix=1),
    Grid((13, 1)),
]


class InverseByRule(torch.autograd.Function):
    """The iterate Y of a given function of A, with the gradient `-Y^T g Y^T` of an inverse."""

    @staticmethod
    def forward(ctx, kernel, iterate):  # type: ignore[no-untyped-def]
        inverse = iterate(kernel)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (inverse,) = ctx.saved_tensors
        return -inverse.mT @ gradient @ inverse.mT, None


def naive_iterate(inverse: NewtonInverse, kernel: Tensor) -> Tensor:
    """Newton's iteration, every matrix by itself, or all under one alpha; backtracking as a loop that ends."""
    matrices = kernel.flatten(0, -3) if kernel.ndim > 2 else kernel[None]
    identity = torch.eye(matrices.shape[-1], dtype=kernel.dtype)

    def iterate(group: Tensor) -> Tensor:
        alpha = inverse.alpha / max(row.sum() for matrix in group for row in matrix) ** 2
        regular = [matrix + inverse.ridge * identity for matrix in group]
        for _ in range(inverse.max_backtrack):
            columns = [(identity - a @ (alpha * a)).abs().sum(0).max() for a in regular]
            if max(columns) <= inverse.backtrack_tol:
                break
            alpha = alpha * inverse.beta
        results = []
        for a in regular:
            y = alpha * a
            for _ in range(inverse.iters):
                y = 2 * y - y @ a @ y
            results.append(y)
        return torch.stack(results)

    groups = [matrices] if inverse.alpha_scope == "batch" else list(matrices.split(1))
    return torch.cat([iterate(group) for group in groups]).view_as(kernel)


def naive_inverse(inverse: NewtonInverse, kernel: Tensor) -> Tensor:
    """The inverse under every option."""
    if inverse.method == "solve":
        identity = torch.eye(kernel.shape[-1], dtype=kernel.dtype)
        return torch.linalg.inv(kernel + inverse.ridge * identity)
    if inverse.backward == "autograd":
        return naive_iterate(inverse, kernel)
    return InverseByRule.apply(kernel, lambda x: naive_iterate(inverse, x))


def naive_gaussian(a: Tensor, b: Tensor) -> Tensor:
    """`exp(-||a_i - b_j||^2 / 2)` from the differences."""
    return torch.exp(-(a.unsqueeze(-2) - b.unsqueeze(-3)).square().sum(-1) / 2)


def naive_landmarks(kernels: GaussianKernels, q: Tensor, grid: Grid) -> Tensor:
    """Landmarks of scaled queries (B, h, N, d), window by window."""
    (height, width), ratio = grid.size, kernels.ratio
    patches = q[:, :, grid.num_prefix :]
    plane = patches.unflatten(2, grid.size)  # (B, h, H, W, d)
    rows, columns = max(1, height // ratio), max(1, width // ratio)
    landmarks = []
    for i in range(rows):
        for j in range(columns):
            window = plane[:, :, i * ratio : (i + 1) * ratio, j * ratio : (j + 1) * ratio]
            if kernels.landmarks == "conv":
                weight = kernels.conv.weight[:, :, : window.shape[2], : window.shape[3]]
                landmarks.append(torch.einsum("bhyxc,ocyx->bho", window, weight))
            else:
                landmarks.append(window.mean((2, 3)))
    if kernels.landmarks == "random":
        order = sorted(range(height * width), key=lambda token: token * 40503 % 65536)
        landmarks = [patches[:, :, token] for token in order[: rows * columns]]
    x = torch.stack(landmarks, dim=2)
    if kernels.norm is None:
        return x
    deviation = x - x.mean(-1, keepdim=True)
    x = deviation / (deviation.square().mean(-1, keepdim=True) + 1e-5).sqrt() * kernels.norm.weight + kernels.norm.bias
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def naive_parts(kernels: GaussianKernels, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """`G(q, l)`, `G(l, l)` and `G(k, l)`."""
    q, k = q / q.shape[-1] ** 0.25, k / k.shape[-1] ** 0.25
    landmarks = naive_landmarks(kernels, q, grid)
    return naive_gaussian(q, landmarks), naive_gaussian(landmarks, landmarks), naive_gaussian(k, landmarks)


def naive_stretch(new: int, old: int) -> Tensor:
    """U (new, old): linear interpolation with half-pixel centres, clamped at the ends."""
    matrix = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        place = min(max((i + 0.5) * old / new - 0.5, 0), old - 1)
        low = min(int(place), old - 1)
        matrix[i, low] += 1 - (place - low)
        matrix[i, min(low + 1, old - 1)] += place - low
    return matrix


def naive_local(weight: Tensor, grid: Grid) -> Tensor:
    """The matrices (h, N, M) of zero-padded kernels (h, 1, s, s), one per head; 0 for prefix tokens."""
    (height, width), side = grid.size, weight.shape[-1]
    spread = torch.eye(height * width, dtype=torch.float64)
    if grid.keys_size != grid.size:
        spread = torch.kron(*(naive_stretch(n, o) for n, o in zip(grid.size, grid.keys_size, strict=True)))
    patches = torch.zeros(len(weight), height * width, height * width, dtype=torch.float64)
    for n in range(height * width):
        for m in range(height * width):
            down, right = m // width - n // width + side // 2, m % width - n % width + side // 2
            if 0 <= down < side and 0 <= right < side:
                patches[:, n, m] += weight[:, 0, down, right]
    return torch.nn.functional.pad(patches @ spread, (grid.num_prefix, 0, grid.num_prefix, 0))


# The official modules


def kernel_state(official: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our mechanism's state dict for that of an official kernel module."""
    names = {
        "Qlandmark_op.weight": "kernels.conv.weight",
        "Qnorm_act.0.weight": "kernels.norm.weight",
        "Qnorm_act.0.bias": "kernels.norm.bias",
        "conv.weight": "conv.weight",
    }
    return {names[name]: tensor for name, tensor in official.items()}


def kernel_options(golden: Golden) -> dict[str, object]:
    """Our options for the official constructor of a kernel module or of a whole layer."""
    official = golden.constructor
    size = official["conv_size"] if "conv_size" in official else official["use_conv"]
    return {"ratio": official["ratio"], "conv_size": size or 0, "newton_iters": official["max_iter"]}


def check_layer(golden: Golden, spec: dict[str, object], dtype: torch.dtype) -> None:
    """Holds our layer to an official one: output, gradients of the input and of every parameter."""
    (x,) = given = golden.inputs(dtype)
    official, p = golden.constructor, golden.parameters()
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    layer = AttentionLayer(official["dim"], official["num_heads"], grid, attention=spec).to(dtype).eval()
    state = {f"mechanism.{name}": tensor for name, tensor in kernel_state(golden.parameters("attn.")).items()}
    for kind in ("weight", "bias"):
        state[f"qkv.{kind}"] = torch.cat([p[f"W_q.{kind}"], p[f"W_v.{kind}"]])
        state[f"proj.{kind}"] = p[f"ff.{kind}"]
    layer.load_state_dict(state)

    golden.check_call(layer(x, grid), given)
    found = dict(layer.named_parameters())
    for kind in ("weight", "bias"):
        for name, gradient in zip(("W_q", "W_v"), found[f"qkv.{kind}"].grad.chunk(2), strict=True):
            golden.check(f"grad_param.{name}.{kind}", gradient)
        golden.check(f"grad_param.ff.{kind}", found[f"proj.{kind}"].grad)
    for name, own in zip(golden.parameters("attn."), kernel_state(golden.parameters("attn.")), strict=True):
        golden.check(f"grad_param.attn.{name}", found[f"mechanism.{own}"].grad)


def check_kernel(golden: Golden, module: torch.nn.Module) -> None:
    """Holds a mechanism to an official kernel module."""
    module.load_state_dict(kernel_state(golden.parameters()))
    q, v = given = golden.inputs(next(module.parameters()).dtype)
    golden.check_call(module(q, q, v, Grid((golden.kwargs["H"], golden.kwargs["W"]))), given)
    for name, own in zip(golden.parameters(), kernel_state(golden.parameters()), strict=True):
        golden.check(f"grad_param.{name}", module.get_parameter(own).grad)
