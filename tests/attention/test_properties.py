"""What the formulas promise of every input: seed, size of the entries and grid are drawn, the arithmetic is float64."""

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from linvit import Attention, Grid
from linvit.analysis import attention_matrix, rank
from linvit.attention.hydra import KERNELS
from linvit.attention.ops.activations import ACTIVATIONS
from linvit.attention.ops.softmax_free import gaussian_kernel
from tests.helpers import assert_near, inputs, mechanism

Spec = dict[str, Any]

sides = st.tuples(st.integers(1, 5), st.integers(1, 5))
prefixes = st.integers(0, 2)
grids = st.builds(Grid, sides, st.none() | sides, prefixes)
seeds = st.integers(0, 2**31)
scales = st.floats(1e-3, 30.0)
some = settings(max_examples=12)


def with_options(name: str, *options: Spec) -> list[Spec]:
    return [{"name": name, **chosen} for chosen in options]


def of_specs(*specs: list[Spec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("spec", [*chain(*specs)], ids=str)


# Rows


def normalised(q: Tensor, k: Tensor, eps: float) -> Tensor:
    """`s / (s + eps)` for the sum s of a row of `q k^T`."""
    sums = torch.einsum("bhnd,bhmd->bhn", q, k)
    return sums / (sums + eps)


def one(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    return torch.ones_like(q[..., 0])


def linear(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    if module.feature_map == "elu":
        q, k = (torch.where(x > 0, x + 1, x.exp()) for x in (q, k))
    else:
        q, k = (x.clamp(min=0) + module.relu_eps for x in (q, k))
    return normalised(q, k, module.eps)


def focused(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    q, k = module.features(q, k, grid)
    return normalised(q, k / grid.num_keys if module.denominator == "mean" else k, module.eps)


def enhanced_linear(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    return normalised(q.clamp(min=0), k.clamp(min=0), module.eps)


def taylor(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """One but for eps, which stands in the denominator `M + q . (sum_j k_j + eps)` alone."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    kept = grid.num_keys + torch.einsum("bhnd,bhmd->bhn", q, k)
    return kept / (kept + module.eps * q.sum(-1))


def nystrom(module: Attention, q: Tensor, k: Tensor, grid: Grid) -> Tensor:
    """`1 - L R 1` with the residual `R = I - Z K`, since rows of all three kernels sum to 1: `Z 1 = Z K 1`.

    A step of the iteration makes `R^3 (3 I + R) / 4` of R, which begins as `I - K^T K / c`.
    """
    parts = module._kernels(q, k, grid)
    if len(parts) == 1:
        return one(module, q, k, grid)
    left, middle, _ = parts
    eye = torch.eye(middle.shape[-1], dtype=middle.dtype)
    residual = eye - middle.mT @ middle / middle.sum(-2).amax(-1)[..., None, None]
    for _ in range(module.pinv_iters):
        residual = residual @ residual @ residual @ (3 * eye + residual) / 4
    return 1 - (left @ residual).sum(-1)


SUMS: dict[str, Callable[[Attention, Tensor, Tensor, Grid], Tensor]] = {
    "softmax": one,
    "efficient": one,
    "performer": one,
    "agent": one,
    "linear": linear,
    "focused": focused,
    "enhanced_linear": enhanced_linear,
    "taylor": taylor,
}
HYDRAS = with_options("hydra", *({"kernel_q": kernel, "kernel_k": kernel} for kernel in KERNELS))
AFTS = with_options("aft_simple", *({"query_act": act} for act in ACTIVATIONS))
PERFORMERS = [
    *with_options("performer", {}, {"nb_features": 5}, {"ortho_scaling": 1}),
    *with_options("performer", *({"kernel": kernel} for kernel in ("relu", "exp", "none"))),
]
PLAIN = {"dwc": False, "pos_enc": False}  # what is left of focused attention without places


@some
@drawn(seed=seeds, scale=scales, grid=grids)
@of_specs(
    with_options("softmax", {}, {"fused": False}, {"qk_norm": True}),
    with_options("efficient", {}),
    with_options("agent", {"agents": 4, "dwc_kernel": 0}),
    PERFORMERS,
    with_options("linear", {}, {"eps": 0.5}, {"feature_map": "relu"}, {"feature_map": "relu", "relu_eps": 0.25}),
    with_options(
        "focused", {"dwc": False}, {"dwc": False, "eps": 0.5}, {"dwc": False, "eps": 0.5, "denominator": "sum"}
    ),
    with_options("enhanced_linear", {"scales": []}, {"scales": [], "eps": 0.5}),
    with_options("taylor", {}, {"eps": 0.0}, {"eps": 1e-3}),
)
def test_rows_are_weights_of_a_known_sum(spec: Spec, seed: int, scale: float, grid: Grid) -> None:
    matrix_of_performer = {"seed": seed} if spec["name"] == "performer" else {}
    module = mechanism({**spec, **matrix_of_performer}, grid)
    q, k, _, _ = inputs(module, grid, seed=seed, scale=scale)
    matrix = attention_matrix(module, q, k, grid)
    assert matrix.min() >= -1e-15
    assert_near(matrix.sum(-1), SUMS[spec["name"]](module, q, k, grid), 1e-13)


@some
@drawn(seed=seeds, scale=scales, grid=grids)
@of_specs(with_options("nystrom", {}, {"pinv_iters": 0}, {"pinv_iters": 12}, {"num_landmarks": None}))
def test_rows_of_nystrom_miss_one_by_what_the_iteration_leaves(spec: Spec, seed: int, scale: float, grid: Grid) -> None:
    half = max(1, min(grid.num_queries, grid.num_keys) // 2)
    module = mechanism({"num_landmarks": half, **spec}, grid)
    q, k, _, _ = inputs(module, grid, seed=seed, scale=scale)
    assert_near(attention_matrix(module, q, k, grid).sum(-1), nystrom(module, q, k, grid), 1e-9)


# Order


@some
@drawn(seed=seeds, scale=scales, grid=grids)
@of_specs(
    with_options("softmax", {}, {"fused": False}, {"qk_norm": True}),
    with_options("linear", {}, {"feature_map": "relu"}, {"normalize": False}),
    with_options("efficient", {}, {"normalization": "scaling"}),
    with_options("taylor", {}, {"gamma": True}),
    PERFORMERS,
    HYDRAS,
    with_options("flow", {}, {"feature_map": "elu"}),
    AFTS,
    with_options("poly_nl", {}),
    with_options("enhanced_linear", {"scales": []}),
    with_options("inline", {"residual_kernel": 0}),
    with_options("focused", PLAIN, {**PLAIN, "norm_scope": "per_head"}),
)
def test_outputs_move_with_their_queries_and_keys_are_a_set(spec: Spec, seed: int, scale: float, grid: Grid) -> None:
    module = mechanism(spec, grid)
    q, k, v, _ = inputs(module, grid, seed=seed, scale=scale)
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(count, generator=generator) for count in (grid.num_queries, grid.num_keys))
    moved = module(q[:, :, rows], k[:, :, columns], v[:, :, columns], grid)
    assert_near(moved, module(q, k, v, grid)[:, :, rows], 1e-12)


# Ranks and norms


@some
@drawn(seed=seeds, scale=scales, grid=grids)
@of_specs(HYDRAS, AFTS, with_options("poly_nl", {}))
def test_every_channel_is_of_rank_one(spec: Spec, seed: int, scale: float, grid: Grid) -> None:
    """Of rank 0 where relu makes every query or every key 0."""
    module = mechanism(spec, grid)
    q, k, _, _ = inputs(module, grid, seed=seed, scale=scale)
    matrix = attention_matrix(module, q, k, grid)
    assert matrix.shape == (2, 3, 8, grid.num_queries, grid.num_keys)
    assert module.rank_bound(grid) == 1
    assert (rank(matrix) == (matrix != 0).any(-1).any(-1)).all()


def spectral_norm(matrix: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrix, 2)


gaussian = drawn(
    seed=seeds,
    scale=st.floats(1e-3, 5.0),
    grid=st.builds(Grid, sides, st.none(), prefixes),
    options=st.fixed_dictionaries(
        {
            "ratio": st.sampled_from([1, 2, 4]),
            "newton_iters": st.integers(1, 20),
            "landmarks": st.sampled_from(["conv", "avgpool", "random"]),
            "landmark_norm": st.booleans(),
        }
    ),
)


@gaussian
def test_soft_never_exceeds_the_kernel_it_stands_for(seed: int, scale: float, grid: Grid, options: Spec) -> None:
    """A Nystrom approximation is symmetric, positive and below G(q, q), whose spectral norm is at most its trace N."""
    module = mechanism({"name": "soft", "conv_size": 0, **options}, grid)
    given = inputs(module, grid, seed=seed, scale=scale)
    matrix = attention_matrix(module, given.q, given.k, grid)
    assert_near(matrix.mT, matrix, 1e-12)
    matrix = (matrix + matrix.mT) / 2
    scaled = given.q * module.key_dim**-0.25
    assert torch.linalg.eigvalsh(matrix).min() > -1e-9
    assert torch.linalg.eigvalsh(gaussian_kernel(scaled, scaled) - matrix).min() > -1e-9
    assert spectral_norm(matrix).max() <= grid.num_queries * (1 + 1e-9)
    assert matrix.abs().max() <= 1 + 1e-9


@gaussian
def test_soft_norm_divides_the_norm_by_a_row_sum(seed: int, scale: float, grid: Grid, options: Spec) -> None:
    """SOFT++, Proposition 6: `||D^-1/2 Y D^-1/2|| <= ||Y|| / min_i D_i`, with row sums between 1 and m."""
    module = mechanism({"name": "soft_norm", **options}, grid)
    given = inputs(module, grid, seed=seed, scale=scale)
    _, kernel, _ = module.kernels(given.q, None, grid)
    _, middle, _ = module.parts(given.q, given.k, grid)
    whole, sums = spectral_norm(module.inverse(kernel)), kernel.sum(-1)
    assert (sums >= 1 - 1e-12).all()
    assert (sums <= module.kernels.count(grid) + 1e-12).all()
    assert (spectral_norm(middle) <= whole / sums.amin(-1) * (1 + 1e-9)).all()
    assert (spectral_norm(middle) >= whole / sums.amax(-1) * (1 - 1e-9)).all()


@gaussian
def test_norm_of_soft_norm_is_at_most_softs(seed: int, scale: float, grid: Grid, options: Spec) -> None:
    """Under the same start, ridge and steps of Newton's iteration."""
    newton = {"newton_alpha": 1.8, "ridge": 0.01, "max_backtrack": 0, "conv_size": 0}
    soft, soft_norm = (mechanism({"name": name, **newton, **options}, grid) for name in ("soft", "soft_norm"))
    given = inputs(soft, grid, seed=seed, scale=scale)
    norms = [spectral_norm(attention_matrix(module, given.q, given.k, grid)) for module in (soft_norm, soft)]
    assert (norms[0] <= norms[1] * (1 + 1e-9)).all()
