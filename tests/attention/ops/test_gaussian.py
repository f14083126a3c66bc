"""The Gaussian kernel and its landmarks equal their formulas, window by window."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from linvit import Grid
from linvit.attention.ops.softmax_free import (
    GaussianKernels,
    gaussian_kernel,
    landmark_grid,
    paper_conv_size,
    paper_ratio,
)
from tests.attention.soft_formula import GRIDS, naive_gaussian, naive_landmarks, naive_parts
from tests.helpers import assert_same_gradients, perturb, randn

KINDS = ["conv", "avgpool", "random"]


def kernels(landmarks: str = "conv", ratio: int = 2, norm: bool = True, width: int = 4) -> GaussianKernels:
    module = GaussianKernels(width, landmarks=landmarks, ratio=ratio, landmark_norm=norm)
    return perturb(module.double()).eval()


# The kernel


@given(st.integers(1, 6), st.integers(1, 6), st.floats(1e-3, 30), st.integers(0, 1000))
def test_kernel_is_that_of_the_differences(n: int, m: int, scale: float, seed: int) -> None:
    a, b = scale * randn(2, n, 5, seed=seed), scale * randn(2, m, 5, seed=seed + 1)
    torch.testing.assert_close(gaussian_kernel(a, b), naive_gaussian(a, b), rtol=1e-9, atol=1e-12)


def test_kernel_gradient_is_that_of_the_differences_even_at_distance_zero() -> None:
    a = randn(5, 3, grad=True)
    assert_same_gradients(gaussian_kernel(a, a), naive_gaussian(a, a), [a], 1e-12)


# Landmarks


@pytest.mark.parametrize(("ratio", "norm"), [(1, False), (2, True), (4, True)])
@pytest.mark.parametrize("landmarks", KINDS)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_landmarks_equal_the_formula(grid: Grid, landmarks: str, ratio: int, norm: bool) -> None:
    module = kernels(landmarks, ratio, norm)
    q = randn(2, 3, grid.num_queries, 4, grad=True)
    want = naive_landmarks(module, q, grid)
    assert want.shape[2] == module.count(grid) == math.prod(landmark_grid(grid.size, ratio))
    assert_same_gradients(module.choose(q, grid), want, [q, *module.parameters()], 1e-10)


def test_kernels_are_of_scaled_queries_and_keys() -> None:
    grid = Grid((4, 6), (2, 3), num_prefix=1)
    module = kernels()
    q, k = randn(2, 3, 25, 4, grad=True), randn(2, 3, 7, 4, seed=1, grad=True)
    got, want = (
        torch.cat([part.flatten() for part in parts]) for parts in (module(q, k, grid), naive_parts(module, q, k, grid))
    )
    assert_same_gradients(got, want, [q, k, *module.parameters()], 1e-10)
    left, _, right = module(q, None, grid)
    assert right is left


@pytest.mark.parametrize("landmarks", KINDS)
def test_prefix_tokens_make_no_landmark(landmarks: str) -> None:
    grid = Grid((4, 6), num_prefix=2)
    module = kernels(landmarks)
    q = randn(2, 3, 26, 4)
    changed = torch.cat([q[:, :, :2] + 100, q[:, :, 2:]], dim=2)
    assert torch.equal(module.choose(changed, grid), module.choose(q, grid))


def test_random_landmarks_are_patches_fixed_in_evaluation_and_drawn_in_training() -> None:
    grid = Grid((12, 10), num_prefix=1)
    module = kernels("random", norm=False)
    q = torch.arange(121.0).view(1, 1, 121, 1).expand(2, 3, -1, 4)  # every patch names itself

    def draw() -> list[float]:
        chosen = module.choose(q, grid)
        assert chosen.shape == (2, 3, 30, 4)
        assert chosen.eq(chosen[:1, :1, :, :1]).all()  # the same for all images and heads
        return chosen[0, 0, :, 0].tolist()

    fixed = draw()
    assert fixed == draw()
    module.train()
    draws = [draw() for _ in range(3)]
    assert len({tuple(drawn) for drawn in draws}) == 3
    for drawn in [fixed, *draws]:
        assert len(set(drawn)) == 30
        assert min(drawn) >= 1
    assert sorted(set(draws[0] + draws[1] + draws[2]))[-1] > 100


def test_fixed_random_landmarks_are_scattered() -> None:
    grid = Grid((56, 56))
    chosen = kernels("random", ratio=8, width=1, norm=False).choose(torch.arange(3136.0).view(1, 1, -1, 1), grid)
    rows, columns = (chosen.flatten() // 56).long(), (chosen.flatten() % 56).long()
    assert (torch.bincount(rows // 14, minlength=4) >= 8).all()
    assert (torch.bincount(columns // 14, minlength=4) >= 4).all()


@pytest.mark.parametrize("landmarks", ["conv", "avgpool"])
def test_landmarks_run_in_the_precision_of_the_queries(landmarks: str) -> None:
    module = kernels(landmarks).bfloat16()
    assert module.choose(randn(1, 2, 12, 4, dtype=torch.float32), Grid((3, 4))).dtype == torch.float32


# Sizes


@pytest.mark.parametrize(("side", "ratio", "conv_size"), [(56, 8, 9), (28, 4, 5), (14, 2, 3), (7, 1, 3)])
def test_sizes_are_the_papers_on_its_stages(side: int, ratio: int, conv_size: int) -> None:
    assert paper_ratio((side, side)) == ratio
    assert math.prod(landmark_grid((side, side), ratio)) == 49
    assert paper_conv_size(ratio) == conv_size


@given(st.integers(1, 300), st.integers(1, 300))
def test_number_of_landmarks_has_a_bound(height: int, width: int) -> None:
    count = math.prod(landmark_grid((height, width), paper_ratio((height, width))))
    assert min(49, height * width) <= count < 300
