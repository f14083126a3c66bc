"""Circulant attention equals its authors' code, and the formula as a sum over shifts of the torus."""

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid
from linvit.attention.circulant import CirculantAttention
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_same_gradients, inputs, mechanism


def shifted(x: Tensor, grid: Grid) -> Tensor:
    """(B, h, P, d) -> (B, h, shifts, P, d), entry t being the tokens at n + t."""
    plane = x.unflatten(2, grid.size)
    rows, columns = grid.size
    return torch.stack([plane.roll((-i, -j), (2, 3)).flatten(2, 3) for i in range(rows) for j in range(columns)], dim=2)


def naive(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
    """Prefix tokens are shifts of their own, and queries of softmax attention of heads of one channel."""
    prefix, patches = grid.num_prefix, grid.size[0] * grid.size[1]
    keys = torch.cat([k[:, :, :prefix, None].expand(-1, -1, -1, patches, -1), shifted(k[:, :, prefix:], grid)], 2)
    values = torch.cat([v[:, :, :prefix, None].expand(-1, -1, -1, patches, -1), shifted(v[:, :, prefix:], grid)], 2)
    logits = torch.einsum("bhnd,bhtnd->bhtd", q[:, :, prefix:], keys) / patches**0.5
    out = torch.einsum("bhtd,bhtnd->bhnd", logits.exp() / logits.exp().sum(2, keepdim=True), values)
    weights = torch.einsum("bhpd,bhmd->bhpmd", q[:, :, :prefix], k).exp()
    first = torch.einsum("bhpmd,bhmd->bhpd", weights / weights.sum(3, keepdim=True), v)
    return torch.cat([first, out], 2)


@pytest.mark.parametrize("grid", [Grid((3, 4)), Grid((4, 3)), Grid((1, 5)), Grid((5, 1)), Grid((3, 3), num_prefix=2)])
def test_equals_formula(grid: Grid) -> None:
    module = mechanism("circulant", grid)
    given = inputs(module, grid, grad=True)
    assert_same_gradients(given(module, grid), naive(given.q, given.k, given.v, grid), given.tensors, 1e-9)


@both_precisions
@of_case("circulant_core")
def test_equals_reference(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    module = CirculantAttention(golden.constructor["dim"], given[0].shape[1], grid)
    golden.check_call(module(*given, grid), given)


@both_precisions
@of_case("circulant")
def test_equals_reference_with_projections_and_gate(golden: Golden, dtype: torch.dtype) -> None:
    """The host leaves the bias of q, k and v out and keeps the gate's, though it is asked for both."""
    given = golden.inputs(dtype)
    grid = Grid((golden.kwargs["H"], golden.kwargs["W"]))
    layer = AttentionLayer(golden.constructor["dim"], 2, grid, attention="circulant", qkv_bias=True).to(dtype)

    def ours(name: str) -> str:
        return name.replace("gate.0.", "gate.")

    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(given[0], grid), given)
    golden.check_parameters(layer, ours)
