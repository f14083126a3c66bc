"""Rotary position embeddings turn pairs of channels by row and by column, as the reference's tables do."""

import pytest
import torch
from torch import Tensor

from linvit import Grid, UserError
from linvit.attention.ops.rotary import check_rotary, rotary_table, rotate
from tests.golden_files import Golden, of_case
from tests.helpers import assert_near, assert_same_gradients, randn

GRIDS = [Grid((3, 4)), Grid((1, 5), num_prefix=2), Grid((4, 6), (2, 3), num_prefix=1), Grid((2, 3), (4, 4))]


def angles(positions: list[tuple[float, float]], width: int, last: bool) -> Tensor:
    """The angle of every channel, (tokens, width), written out one by one."""
    count = width // 4
    span = max(count - 1 if last else count, 1)
    rows = []
    for place in positions:
        rows.append([place[c // (width // 2)] * 10000 ** (-(c // 2 % count) / span) for c in range(width)])
    return torch.tensor(rows, dtype=torch.float64).reshape(len(positions), width)


def naive(x: Tensor, grid: Grid, size: tuple[int, int], width: int, last: bool) -> Tensor:
    """(B, h, N, d) through one rotation matrix per token over all h * d channels."""
    steps = [units / side for units, side in zip(grid.size, size, strict=True)]
    middles = [
        ((row + 0.5) * steps[0] - 0.5, (column + 0.5) * steps[1] - 0.5)
        for row in range(size[0])
        for column in range(size[1])
    ]
    heads, channels = x.shape[1], x.shape[1] * x.shape[3]
    angle = angles([(0.0, 0.0)] * grid.num_prefix + middles, width, last).repeat(1, channels // width)  # (N, h d)
    quarter = torch.zeros(channels, channels, dtype=x.dtype)
    for c in range(0, channels, 2):
        quarter[c, c + 1], quarter[c + 1, c] = -1, 1
    matrices = torch.diag_embed(angle.cos()) + torch.diag_embed(angle.sin()) @ quarter
    rows = torch.einsum("nij,bnj->bni", matrices, x.transpose(1, 2).flatten(2))
    return rows.unflatten(2, (heads, -1)).transpose(1, 2)


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize(("width", "last"), [(None, True), (24, False), (4, True)])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_equals_one_matrix_per_token(
    grid: Grid, width: int | None, last: bool, compiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k = randn(2, 3, grid.num_queries, 8, grad=True), randn(2, 3, grid.num_keys, 8, seed=1, grad=True)
    turned = rotate(q, k, grid, width=width, last=last)
    assert_same_gradients(turned[0], naive(q, grid, grid.size, width or 8, last), [q], 1e-13)
    assert_same_gradients(turned[1], naive(k, grid, grid.keys_size, width or 8, last), [k], 1e-13)


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
    turned, _ = rotate(q, q, grid)
    assert turned.dtype == dtype
    assert_near(turned, rotate(q.float(), q.float(), grid)[0], torch.finfo(dtype).eps)


def test_products_depend_on_offsets_alone() -> None:
    grid = Grid((4, 5))
    q = randn(1, 1, 1, 8).expand(-1, -1, 20, -1)
    k = randn(1, 1, 1, 8, seed=1).expand(-1, -1, 20, -1)
    turned, keys = rotate(q, k, grid)
    scores = (turned @ keys.mT).unflatten(3, (4, 5)).unflatten(2, (4, 5))[0, 0]
    assert_near(scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1], 1e-13)


def test_impossible_widths_are_refused_with_the_possible_ones() -> None:
    check_rotary(24, 3, 8, "rotary=False")
    with pytest.raises(UserError, match=r"dim 24 with num_heads 4 has 6\. Dim 24 can be split into 1, 2, 3, 6 heads"):
        check_rotary(24, 4, 6, "rotary=False")
    with pytest.raises(UserError, match=r"Make dim a multiple of 4, or set rotary=False"):
        check_rotary(10, 1, 10, "rotary=False")
    with pytest.raises(UserError, match=r"dim 24 with num_heads 3 has 5\. Set key_dim to such a number"):
        check_rotary(24, 3, 5, "rotary=False")
