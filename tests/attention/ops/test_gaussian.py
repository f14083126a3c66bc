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
    paper_ratio,
)
from tests.attention.soft_formula import naive_gaussian
from tests.helpers import assert_same_gradients, perturb, randn


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


@given(st.integers(1, 300), st.integers(1, 300))
def test_number_of_landmarks_has_a_bound(height: int, width: int) -> None:
    count = math.prod(landmark_grid((height, width), paper_ratio((height, width))))
    assert min(49, height * width) <= count < 300
