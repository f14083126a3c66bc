"""Landmarks are means over parts of lengths that differ by at most one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from linvit.attention.nystrom import segment_means
from tests.helpers import assert_near, randn


def naive_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """T2T-ViT's parts: the first `(s + 1) count - length` have s = length // count entries, the others s + 1."""
    size = length // count
    bounds, start = [], 0
    for i in range(count):
        stop = start + (size if i < (size + 1) * count - length else size + 1)
        bounds.append((start, stop))
        start = stop
    return bounds


@given(st.integers(1, 60), st.data())
def test_segment_means_are_those_of_t2t(length: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, length))
    x = randn(2, 2, length, 3)
    bounds = naive_bounds(length, count)
    assert bounds[-1][1] == length
    want = torch.stack([x[:, :, start:stop].mean(2) for start, stop in bounds], dim=2)
    assert_near(segment_means(x, count), want, 1e-12)
