"""Rotary position embeddings turn pairs of channels by row and by column, as the reference's tables do."""

import pytest
import torch
from torch import Tensor

from linvit import Grid, UserError
from linvit.attention.ops.rotary import (
    _RotaryAttention,
    check_rotary,
    position_turns,
    rotary_attention,
    rotary_table,
    rotate,
)
from tests.attention.rotary_formula import angles, turned
from tests.golden_files import Golden, of_case
from tests.helpers import assert_near, assert_same_gradients, randn

GRIDS = [Grid((3, 4)), Grid((1, 5), num_prefix=2), Grid((4, 6), (2, 3), num_prefix=1), Grid((2, 3), (4, 4))]


def naive(x: Tensor, grid: Grid, size: tuple[int, int], width: int, last: bool) -> Tensor:
    """(B, h, N, d) turned over all h * d channels of a token, every `width` of them alike."""
    rows = x.transpose(1, 2).flatten(2)  # (B, N, h d)
    angle = angles(grid, size, width, last).repeat(1, rows.shape[2] // width)
    return turned(rows, angle).unflatten(2, (x.shape[1], -1)).transpose(1, 2)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("width", "last"), [(None, True), (24, False), (4, True)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_products_of_complex_numbers(
    grid: Grid, width: int | None, last: bool, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k = randn(2, 3, grid.num_queries, 8, grad=True), randn(2, 3, grid.num_keys, 8, seed=1, grad=True)
    queries, keys = rotate(q, k, grid, width=width, last=last)
    assert_same_gradients(queries, naive(q, grid, grid.size, width or 8, last), [q], 1e-13)
    assert_same_gradients(keys, naive(k, grid, grid.keys_size, width or 8, last), [k], 1e-13)


@of_case("rala_core", "mala_core", "nala_core", "pola_pp_core")
def test_tables_are_those_of_the_references(golden: Golden) -> None:
    size, want = (golden.kwargs["H"], golden.kwargs["W"]), golden.tensors["aux.cos"]
    cos, sin = rotary_table(size, size, 0, want.shape[1], True, want)
    torch.testing.assert_close(cos.repeat_interleave(2, 1), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sin.repeat_interleave(2, 1), golden.tensors["aux.sin"], rtol=1e-5, atol=1e-6)


@of_case("mlla_core")
def test_tables_over_all_channels_are_those_of_the_reference(golden: Golden) -> None:
    want = golden.tensors["param.rope.rotations"]  # (H, W, C / 2, 2)
    table = rotary_table(want.shape[:2], want.shape[:2], 0, 2 * want.shape[2], False, want)
    torch.testing.assert_close(torch.stack(table, dim=-1), want.flatten(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_turns_in_float32(dtype: torch.dtype) -> None:
    grid = Grid((1, 300))
    q = randn(1, 1, 300, 4, dtype=dtype)
    queries, _ = rotate(q, q, grid)
    assert queries.dtype == dtype
    assert_near(queries, rotate(q.float(), q.float(), grid)[0], torch.finfo(dtype).eps)


def test_an_empty_batch_stays_empty() -> None:
    q = randn(0, 2, 6, 4)
    assert rotate(q, q, Grid((2, 3)))[0].shape == q.shape


def test_impossible_widths_are_refused_with_the_possible_ones() -> None:
    check_rotary(24, 3, 8)
    with pytest.raises(UserError, match=r"dim 24 with num_heads 4 has 6\. Dim 24 can be split into 1, 2, 3, 6 heads"):
        check_rotary(24, 4, 6)
    with pytest.raises(UserError, match=r"Make dim a multiple of 4, or set rotary=False"):
        check_rotary(10, 1, 10)
    with pytest.raises(UserError, match=r"dim 24 with num_heads 3 has 5\. Set key_dim to such a number"):
        check_rotary(24, 3, 5)


@pytest.mark.parametrize("difference", [None, 0.5])
@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_gradient_written_by_hand_is_that_of_the_formula(
    grid: Grid, rotary: bool, difference: float | None
) -> None:
    """In float64; a GPU computes with it in bfloat16."""
    q, k = (randn(2, 3, n, 8, seed=n).exp().requires_grad_() for n in (grid.num_queries, grid.num_keys))
    v = randn(2, 3, grid.num_keys, 5, grad=True)
    turns = (position_turns(q, grid), position_turns(k, grid, keys=True)) if rotary else (None, None)
    found = _RotaryAttention.apply(q, k, v, *turns, 0.1, difference)
    assert_same_gradients(found, rotary_attention(q, k, v, turns, 0.1, difference), [q, k, v], 1e-12)
