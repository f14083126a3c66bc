"""Landmarks are means over parts of lengths that differ by at most one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from linvit.attention.nystrom import division, segment_means
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
    x = randn(2, length, 3)
    bounds = naive_bounds(length, count)
    assert bounds[-1][1] == length
    want = torch.stack([x[:, start:stop].mean(1) for start, stop in bounds], dim=1)
    assert_near(segment_means(x, count, dim=1), want, 1e-12)
    assert_near(segment_means(x.transpose(1, 2), count, dim=2), want.transpose(1, 2), 1e-12)


@given(st.integers(1, 70), st.tuples(st.integers(1, 20), st.integers(1, 20)), st.booleans())
def test_a_division_is_the_squarest_of_all_there_are(count: int, size: tuple[int, int], even: bool) -> None:
    stretches = {
        (a, b): max(size[0] * b, size[1] * a) / min(size[0] * b, size[1] * a)
        for a in range(1, size[0] + 1)
        for b in range(1, size[1] + 1)
        if a * b == count and not (even and (size[0] % a or size[1] % b))
    }
    best = division(count, size, even)
    assert (best is None) == (not stretches)
    assert best is None or stretches[best] <= min(stretches.values()) + 1e-9
