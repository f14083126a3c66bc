"""Cross-covariance attention equals its formula, one channel at a time, and XCiT's code."""

import pytest
import torch
from torch import Tensor

from linvit import AttentionLayer, Grid, UserError
from linvit.analysis import attention_matrix, attention_rank, channel_matrix
from linvit.attention.ops.activations import cosines
from linvit.attention.xca import XCAttention
from linvit.tasks.parameter_groups import parameter_groups
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import assert_near, assert_same_gradients, inputs, mechanism, randn

GRID = Grid((3, 4), num_prefix=1)


def naive(temperature: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The output (N, d) of one head, and its matrix (d, d), channel by channel."""
    q, k = ([x / x.square().sum().sqrt() for x in tokens.T] for tokens in (q, k))
    weights = torch.stack([torch.stack([(temperature * a.dot(b)).exp() for b in k]) for a in q])
    matrix = weights / weights.sum(1, keepdim=True)
    channels = [sum(matrix[c, e] * v[:, e] for e in range(len(k))) for c in range(len(q))]
    return torch.stack(channels, dim=1), matrix


@pytest.mark.parametrize("grid", [GRID, Grid((5, 2))], ids=str)
def test_equals_formula(grid: Grid) -> None:
    module = mechanism({"name": "xca", "temperature": 3}, grid)
    given = inputs(module, grid, grad=True)
    found = [naive(module.temperature[h, 0, 0], *(x[b, h] for x in given[:3])) for b in range(2) for h in range(3)]
    want, matrices = (torch.stack(each).unflatten(0, (2, 3)) for each in zip(*found, strict=True))
    assert_same_gradients(given(module, grid), want, [*given.tensors, module.temperature], 1e-10)
    assert_near(channel_matrix(module, given.q, given.k, grid), matrices, 1e-12)


@both_precisions
@of_case("xca_core")
def test_equals_xcit(golden: Golden, dtype: torch.dtype) -> None:
    q, k, v = given = golden.inputs(dtype)
    grid = Grid((1, q.shape[2]))
    module = XCAttention(golden.constructor["dim"], golden.constructor["num_heads"], grid).to(dtype)
    module.load_state_dict(golden.parameters())
    golden.check_call(module(q, k, v, grid), given)
    golden.check_parameters(module, str)


@both_precisions
@of_case("xca")
def test_layer_equals_xcits(golden: Golden, dtype: torch.dtype) -> None:
    def ours(name: str) -> str:
        return f"mechanism.{name}" if name == "temperature" else name

    (x,) = given = golden.inputs(dtype)
    layer = AttentionLayer(16, 2, Grid((5, 8)), attention="xca").to(dtype)
    layer.load_state_dict({ours(name): tensor for name, tensor in golden.parameters().items()})
    golden.check_call(layer(x, Grid((5, 8))), given)
    golden.check_parameters(layer, ours)


def test_gradients_of_the_cosines_also_of_channels_of_zeros_and_second_ones() -> None:
    q, k = randn(2, 2, 3, 6, 4)
    q[..., 1] = 0
    given, gradient = (q.requires_grad_(), k.requires_grad_()), randn(2, 3, 4, 4)
    units = (x / x.norm(dim=-2, keepdim=True).clamp_min(1e-12) for x in given)
    found, want = (
        torch.autograd.grad(y, given, gradient) for y in (cosines(q, k, 1e-12), next(units).mT @ next(units))
    )
    assert_near(found[0][..., 2:], want[0][..., 2:], 1e-13)
    assert_near(found[1], want[1], 1e-13)
    assert found[0].isfinite().all()
    few = (randn(1, 2, 3, 2, seed=1).requires_grad_(), randn(1, 2, 3, 2, seed=2).requires_grad_())
    assert torch.autograd.gradgradcheck(lambda q, k: cosines(q, k, 1e-12), few)


def test_there_is_no_matrix_and_no_rank_over_tokens() -> None:
    module = mechanism("xca", GRID)
    given = inputs(module, GRID)
    for look in (attention_matrix, attention_rank):
        with pytest.raises(UserError, match="XCAttention mixes the channels of each token by a matrix A, 8 x 8 per"):
            look(module, given.q, given.k, GRID, v=given.v)
    other = mechanism("linear", GRID)
    assert channel_matrix(other, given.q, given.k, GRID) is None


def test_temperature_is_not_decayed() -> None:
    layer = AttentionLayer(24, 3, GRID, attention="xca")
    decayed, kept = parameter_groups(layer, lr=1.0, weight_decay=0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0)
    assert any(p is layer.mechanism.temperature for p in kept["params"])
