"""Nystrom attention equals Nystromformer's code, and, option by option, the formula written out naively."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit import Grid, UserError
from linvit.attention.nystrom import NystromAttention
from tests.attention.ops.test_landmarks import naive_bounds
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, randn, relative_error

GRID = Grid((4, 5), num_prefix=1)
REDUCED = Grid((5, 7), (3, 4), num_prefix=1)


# The reference implementation


def official(golden: Golden, dtype: torch.dtype, **options: object) -> tuple[NystromAttention, Grid]:
    """Our mechanism for an official configuration, with its parameters, and the grid of its sequence."""
    config = golden.constructor["config"]
    grid = Grid((1, config["seq_len"]))
    module = NystromAttention(
        config["num_head"] * config["head_dim"],
        config["num_head"],
        grid,
        num_landmarks=config["num_landmarks"],
        conv_kernel=config.get("conv_kernel_size", 0),
        init=config.get("inv_init_coeff_option", "original"),
        **options,
    ).to(dtype)
    module.load_state_dict({n.removeprefix("attn."): t for n, t in golden.parameters().items() if "conv" in n})
    return module, grid


@both_precisions
@of_case("nystrom")
def test_equals_nystromformer(golden: Golden, dtype: torch.dtype) -> None:
    *given, mask = golden.inputs(dtype)
    module, grid = official(golden, dtype)
    out = module(*given, grid, mask=mask.detach())
    golden.check_qkv(out, given)
    for name in golden.named("grad_param."):
        golden.check(name, module.get_parameter(name.removeprefix("grad_param.")).grad)


@both_precisions
@of_case("nystrom_attention")
def test_equals_nystromformers_layer(golden: Golden, dtype: torch.dtype) -> None:
    x, mask = golden.inputs(dtype)
    module, grid = official(golden, dtype)
    p = {name: t.to(dtype, copy=True).requires_grad_() for name, t in golden.parameters().items()}

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])

    q, k, v = (linear(name, x).unflatten(2, (module.num_heads, -1)).transpose(1, 2) for name in ("W_q", "W_k", "W_v"))
    out = linear("ff", module(q, k, v, grid, mask=mask.detach()).transpose(1, 2).flatten(2))
    golden.check("output", out)
    (out * golden.tensors["probe"].to(dtype)).sum().backward()
    golden.check("grad_input", x.grad)
    for name in golden.named("grad_param."):
        own = name.removeprefix("grad_param.")
        golden.check(name, module.get_parameter("conv.weight").grad if "conv" in own else p[own].grad)


# The formula


def softmax(logits: Tensor) -> Tensor:
    weights = torch.exp(logits)
    return weights / weights.sum(-1, keepdim=True)


def naive_means(x: Tensor, pool: bool, count: int, size: tuple[int, int], prefix: int) -> Tensor:
    """Landmarks (B, h, m, dk), part by part."""
    if not pool:
        return torch.stack([x[:, :, a:b].mean(2) for a, b in naive_bounds(x.shape[2], count)], dim=2)
    height, width = size
    ways = [(a, count // a) for a in range(1, height + 1) if count % a == 0 and count // a <= width]
    stretch = {w: max(height * w[1], width * w[0]) / min(height * w[1], width * w[0]) for w in ways}
    rows, columns = min(ways, key=stretch.__getitem__)
    means = [
        torch.stack(
            [x[:, :, prefix + i * width + j] for i in range(top, bottom) for j in range(left, right)], dim=2
        ).mean(2)
        for top, bottom in naive_bounds(height, rows)
        for left, right in naive_bounds(width, columns)
    ]
    return torch.stack(means, dim=2)


def naive_pinv(kernel: Tensor, module: NystromAttention) -> Tensor:
    """`Z <- Z (13 I - K Z (15 I - K Z (7 I - K Z))) / 4`, multiplied out, one matrix after another."""
    sums = kernel.sum(-2)
    result = []
    for b in range(len(kernel)):
        heads = []
        for h in range(kernel.shape[1]):
            a = kernel[b, h]
            z = a.T / (sums.max() if module.init == "original" else sums[b, h].max())
            for _ in range(module.pinv_iters):
                az = a @ z
                z = (13 * z - 15 * z @ az + 7 * z @ az @ az - z @ az @ az @ az) / 4
            heads.append(z)
        result.append(torch.stack(heads))
    return torch.stack(result)


def naive(
    module: NystromAttention, q: Tensor, k: Tensor, v: Tensor, grid: Grid, count: int, mask: Tensor | None = None
) -> Tensor:
    """Three softmax kernels through `count` landmarks, and the convolution along the sequence, tap by tap."""
    if mask is not None:
        kept = mask[:, None, :, None]
        q, k, v = q * kept, k * kept, v * kept  # values of padding have weight 0
    q, k = q / module.key_dim**0.25, k / module.key_dim**0.25
    hidden = 0 if mask is None else -1e9 * (1 - mask[:, None, None])
    if count == min(q.shape[2], k.shape[2]):
        out = softmax(q @ k.mT + hidden) @ v
    else:
        qt = naive_means(q, module.pool, count, grid.size, grid.num_prefix)
        kt = naive_means(k, module.pool, count, grid.keys_size, grid.num_prefix)
        k1, k2, k3 = softmax(q @ kt.mT), softmax(qt @ kt.mT), softmax(qt @ k.mT + hidden)
        out = k1 @ naive_pinv(k2, module) @ k3 @ v
    if module.conv is None:
        return out
    weight = module.conv.weight[:, 0, :, 0]  # (h, s)
    half = weight.shape[1] // 2
    padded = F.pad(v, (0, 0, half, half))
    taps = [weight[:, i, None, None] * padded[:, :, i : i + v.shape[2]] for i in range(weight.shape[1])]
    return out + sum(taps)


OPTIONS = [
    {},
    {"pinv_iters": 0},
    {"pinv_iters": 1},
    {"pinv_iters": 20},
    {"init": "original"},
    {"conv_kernel": 3},
    {"conv_kernel": 33},
    {"landmarks": "pool2d"},
    {"landmarks": "pool2d", "init": "original", "conv_kernel": 5},
    {"num_landmarks": 1},
    {"num_landmarks": 7, "uneven": "error"},
    {"num_landmarks": 20},
    {"num_landmarks": 20, "landmarks": "pool2d"},
    {"num_landmarks": 21},
]


@pytest.mark.parametrize(
    ("options", "masked"), [*((options, False) for options in OPTIONS), *((options, True) for options in OPTIONS[4:9])]
)
def test_equals_formula(options: dict[str, object], masked: bool) -> None:
    """21 tokens, 20 of them patches."""
    options = {"num_landmarks": 4, **options}
    module = mechanism({"name": "nystrom", **options}, GRID)
    given = inputs(module, GRID, grad=True)
    mask = (randn(2, 21, seed=8) > -0.5).double() if masked else None
    out = module(given.q, given.k, given.v, GRID, mask=mask)
    want = naive(module, given.q, given.k, given.v, GRID, options["num_landmarks"], mask)
    assert_same_gradients(out, want, [*given.tensors, *module.parameters()], 1e-9)


@pytest.mark.parametrize("landmarks", ["segment", "pool2d"])
@pytest.mark.parametrize(
    ("grid", "count"),
    [
        (Grid((7, 9)), 6),
        (Grid((1, 20), num_prefix=2), 5),
        (REDUCED, 4),
    ],
    ids=str,
)
def test_equals_formula_on_any_grid(grid: Grid, count: int, landmarks: str) -> None:
    module = mechanism({"name": "nystrom", "num_landmarks": count, "landmarks": landmarks}, Grid((6, 8)))
    given = inputs(module, grid, grad=True)
    want = naive(module, given.q, given.k, given.v, grid, count)
    assert_same_gradients(given(module, grid), want, given.tensors, 1e-9)


@pytest.mark.parametrize(
    ("grid", "segment", "pool2d"),
    [
        (Grid((14, 14)), 64, 64),
        (Grid((6, 8)), 48, 48),
        (Grid((3, 4), num_prefix=1), 13, 12),
        (Grid((8, 9), (4, 4)), 16, 16),
        (Grid((14, 14), (7, 7), num_prefix=1), 50, 49),
        (Grid((1, 50)), 50, 50),
        (Grid((3, 30)), 64, 63),
    ],
    ids=str,
)
def test_default_is_64_or_as_many_as_the_grid_allows(grid: Grid, segment: int, pool2d: int) -> None:
    for landmarks, count in (("segment", segment), ("pool2d", pool2d)):
        module = mechanism({"name": "nystrom", "landmarks": landmarks}, grid)
        assert module.rank_bound(grid) == count
        given = inputs(module, grid, batch=1)
        assert_near(given(module, grid), naive(module, *given[:3], grid, count), 1e-9)


def test_equals_formula_with_narrow_keys() -> None:
    module = mechanism({"name": "nystrom", "num_landmarks": 4}, GRID, key_dim=3)
    given = inputs(module, GRID)
    assert_near(given(module, GRID), naive(module, *given[:3], GRID, 4), 1e-10)


# Claims


def test_neighbours_in_the_batch_matter_to_the_references_initial_value_only() -> None:
    grid = Grid((6, 6))
    for init, differs in (("exact", False), ("original", True)):
        module = mechanism({"name": "nystrom", "num_landmarks": 6, "init": init}, grid)
        given = inputs(module, grid)
        alone = given.map(lambda x: x[:1])(module, grid)
        assert (relative_error(alone, given(module, grid)[:1]) > 1e-6) == differs


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": 22}, "22 is more than the 21 tokens .* 4x5 .* 1 prefix tokens; use at most 21"),
        ({"num_landmarks": 21, "landmarks": "pool2d"}, "num_landmarks 21 is more than the 20 tokens"),
        ({"num_landmarks": 4, "uneven": "error"}, "4 segments of equal size; these numbers can: 1, 3, 7, 21$"),
        ({"uneven": "error", "num_landmarks": 8, "landmarks": "pool2d"}, "can: 1, 2, 4, 5, 10, 20$"),
        ({"num_landmarks": 7, "landmarks": "pool2d"}, "can: 1, 2, 3, 4, 5, 6, 8, 9, 10, 12, 15, 16, 20$"),
    ],
    ids=str,
)
def test_bad_option_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        NystromAttention(24, 3, GRID, **options)


def test_more_landmarks_than_the_tokens_of_a_call_are_refused() -> None:
    module = mechanism({"name": "nystrom", "num_landmarks": 16}, Grid((4, 5)))
    with pytest.raises(UserError, match=r"num_landmarks 16 is more than the 12 tokens .* 3x4"):
        inputs(module, Grid((3, 4)))(module, Grid((3, 4)))


@pytest.mark.parametrize("masked", [False, True])
def test_convolution_and_mask_need_one_grid(masked: bool) -> None:
    module = mechanism({"name": "nystrom", "conv_kernel": 0 if masked else 3, "num_landmarks": 4}, GRID)
    given = inputs(module, REDUCED)
    mask = torch.ones(2, 36) if masked else None
    said = "a mask needs keys of the queries' grid; got queries of 5x7, keys of 3x4" if masked else "same_grid"
    with pytest.raises(UserError, match=said):
        module(given.q, given.k, given.v, REDUCED, mask=mask)
