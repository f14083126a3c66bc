"""Hydra attention equals the paper's listing and, kernel by kernel, the table of feature maps written out naively."""

import math

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.attention.hydra import KERNELS, HydraAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism, options_then_grids, perturb, randn

GRID = Grid((3, 5), kv_size=(2, 3), num_prefix=1)
NAMES = [
    "l2",
    "l1",
    "constant",
    "mean",
    "identity",
    "tanh",
    "sigmoid",
    "relu",
    "softmax_tokens",
    "softmax_features",
]
kernels = pytest.mark.parametrize("kernel", NAMES)


def split(tokens: Tensor, heads: int) -> Tensor:
    """(B, N, C) -> (B, h, N, d)."""
    return tokens.unflatten(2, (heads, -1)).transpose(1, 2)


def merge(x: Tensor) -> Tensor:
    """(B, h, N, d) -> (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


# The reference implementation


@both_precisions
@of_case("hydra")
@pytest.mark.parametrize("heads", [1, 4, 32])
def test_equals_the_papers_listing(golden: Golden, heads: int, dtype: torch.dtype) -> None:
    """The listing knows no heads; ours may have any number."""
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[1]))
    module = HydraAttention(q.shape[2], heads, grid, **golden.constructor).to(dtype)
    golden.check_call(merge(module(split(q, heads), split(k, heads), split(v, heads), grid)), given)


# The formula


def naive(module: HydraAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`phi_q(q_n) * sum_t phi_k(k_t) * v_t` on tokens of all channels, one query and one key at a time."""
    heads, num_keys = q.shape[1], k.shape[2]

    def phi(name: str, tokens: Tensor) -> list[Tensor]:
        """The features (B, C) of every token of (B, N, C)."""
        features = []
        for x in tokens.unbind(1):
            if name == "l2":
                x = x / torch.clamp((x * x).sum(1, keepdim=True).sqrt(), min=module.eps)
            elif name == "l1":
                x = x / torch.clamp(x.abs().sum(1, keepdim=True), min=module.eps)
            elif name == "constant":
                x = x / module.constant
            elif name == "mean":
                x = x / num_keys**0.5
            elif name == "tanh":
                x = (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x))
            elif name == "sigmoid":
                x = 1 / (1 + torch.exp(-x))
            elif name == "relu":
                x = torch.where(x > 0, x, 0)
            elif name == "softmax_tokens":
                x = torch.exp(x) / torch.exp(tokens).sum(1)
            elif name == "softmax_features":
                x = torch.exp(x) / torch.exp(x).sum(1, keepdim=True)
            else:
                assert name == "identity"
            features.append(x)
        return features

    gathered = sum(key * value for key, value in zip(phi(module.kernel_k, merge(k)), merge(v).unbind(1), strict=True))
    rows = [query * gathered for query in phi(module.kernel_q, merge(q))]
    return split(torch.stack(rows, dim=1), heads)


def check(options: dict[str, object], grid: Grid) -> None:
    """Holds output and gradients of inputs and parameters to the formula."""
    module = mechanism({"name": "hydra", **options}, grid)
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v)
    assert_same_gradients(given(module, grid), want, [*given.tensors, *module.parameters()], 1e-10)


def test_table_of_kernels_is_complete() -> None:
    assert list(KERNELS) == NAMES


@pytest.mark.parametrize(("kernel_q", "kernel_k"), [*zip(NAMES, NAMES[3:] + NAMES[:3], strict=True)])
def test_equals_formula(kernel_q: str, kernel_k: str) -> None:
    """Every kernel on either side."""
    check({"kernel_q": kernel_q, "kernel_k": kernel_k}, GRID)


OPTIONS = [
    {"kernel_q": "tanh", "kernel_k": "mean"},
    {"eps": 5.0},  # above some of the L2 norms, below all L1 norms
    {"eps": 20.0, "kernel_q": "l1", "kernel_k": "l1"},
    {"constant": 0.25, "kernel_q": "constant", "kernel_k": "constant"},
    {"kernel_q": "softmax_tokens", "kernel_k": "softmax_features"},
    {"kernel_q": "mean", "kernel_k": "mean"},
]
GRIDS = [GRID, Grid((7, 9)), Grid((1, 50)), Grid((50, 1)), Grid((13, 31))]


@pytest.mark.parametrize(("options", "grid"), options_then_grids(OPTIONS, GRIDS), ids=str)
def test_options_equal_formula_on_any_grid(options: dict[str, object], grid: Grid) -> None:
    check(options, grid)


def test_defaults_are_l2_without_norm_and_the_root_of_the_channels() -> None:
    module = HydraAttention(24, 3, GRID)
    assert (module.kernel_q, module.kernel_k, module.host.norm, module.eps) == ("l2", "l2", "none", 1e-12)
    assert module.constant == math.sqrt(24)
    assert not list(module.parameters())


@pytest.mark.parametrize("kernel", ["l2", "l1", "softmax_features"])
def test_gradients_are_those_of_finite_differences(kernel: str) -> None:
    grid = Grid((1, 3), kv_size=(1, 2))
    spec = {"name": "hydra", "kernel_q": kernel, "kernel_k": kernel}
    module = mechanism(spec, grid, dim=4, num_heads=2)
    given = inputs(module, grid, batch=1)
    q, k, v, _ = given.map(lambda x: (x + 0.2 * x.sign()).requires_grad_())  # relu has no derivative at 0
    assert torch.autograd.gradcheck(lambda q, k, v, *_: module(q, k, v, grid), (q, k, v, *module.parameters()))


def test_layer_equals_formula_end_to_end() -> None:
    """Host and mechanism, with the LayerNorm before the output projection."""
    grid = Grid((3, 4), num_prefix=1)
    spec = {"name": "hydra", "post_norm": "ln"}
    layer = perturb(AttentionLayer(24, 3, grid, attention=spec).double())
    x = randn(2, grid.num_queries, 24, grad=True)
    q, k, v = (split(part, 3) for part in (x @ layer.qkv.weight.T + layer.qkv.bias).split(24, dim=2))
    normed = torch.layer_norm(merge(naive(layer.mechanism, q, k, v)), [24], layer.out_norm.weight, layer.out_norm.bias)
    want = normed @ layer.proj.weight.T + layer.proj.bias
    assert_same_gradients(layer(x, grid), want, [x, *layer.parameters()], 1e-10)


# Properties


# Zero tokens, half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("kernel", ["l2", "l1"])
@pytest.mark.parametrize("eps", [1e-12, 0.0])
def test_zero_tokens_give_zero_and_finite_gradients(eps: float, kernel: str, dtype: torch.dtype) -> None:
    """The published code divides by their norm."""
    spec = {"name": "hydra", "kernel_q": kernel, "kernel_k": kernel, "eps": eps}
    module = mechanism(spec, GRID, dtype=dtype)
    given = inputs(module, GRID, dtype=dtype)
    given.q[0, :, 3] = 0
    given.k[1] = 0
    given = given.map(lambda x: x.requires_grad_())
    out = given(module, GRID)
    out.float().sum().backward()
    assert (merge(out)[[0, 1, 1], [3, 0, 15]] == 0).all()
    assert out.isfinite().all()
    assert all(x.grad.isfinite().all() for x in [*given.tensors, *module.parameters()])


@pytest.mark.parametrize("kernel", ["l2", "l1", "tanh", "sigmoid", "softmax_tokens", "softmax_features"])
def test_bounded_kernels_in_half_precision(kernel: str) -> None:
    """Finite at many tokens; the kernels without a bound may exceed what float16 can hold.

    The error is that of rounding the result; products of small features may fall below float16's smallest number.
    """
    grid, dtype, scale = Grid((56, 56)), torch.float16, 16.0
    spec = {"name": "hydra", "kernel_q": kernel, "kernel_k": kernel}
    module = mechanism(spec, grid, dim=8, num_heads=2, dtype=dtype)
    given = inputs(module, grid, batch=1, dtype=dtype, scale=scale, grad=True)
    out = given(module, grid)
    out.float().mean().backward()
    assert all(x.isfinite().all() for x in [out, *(x.grad for x in given.tensors)])
    want = naive(module, *(x.detach().double() for x in (given.q, given.k, given.v)))
    limits = torch.finfo(dtype)
    assert ((out.double() - want).abs() <= 2 * limits.eps * want.abs().max() + limits.eps * limits.tiny).all()
