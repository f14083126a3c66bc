"""Probing reads a mechanism's exact matrix from outside and leaves no trace.

That the matrix times v is the mechanism's output is held for every registered mechanism in tests/test_contracts.py.
"""

import copy

import pytest
import torch
from torch import Tensor

from linvit import Attention, Facts, Grid, UserError
from linvit.analysis import attention_matrix
from tests.helpers import assert_near, inputs, mechanism, randn

GRID = Grid((4, 3), num_prefix=1)
REDUCED = Grid((4, 6), (2, 3), num_prefix=1)


@pytest.mark.parametrize("grid", [GRID, REDUCED])
@pytest.mark.parametrize("fused", [True, False])
def test_matrix_of_softmax_is_the_softmax(grid: Grid, fused: bool) -> None:
    module = mechanism({"name": "softmax", "fused": fused, "attn_drop": 0.5}, grid).train()
    given = inputs(module, grid)
    bias = randn(1, 3, grid.num_queries, grid.num_keys, seed=9)
    logits = given.q @ given.k.mT * module.scale + bias
    assert_near(attention_matrix(module, given.q, given.k, grid, bias=bias), logits.softmax(-1), 1e-12)


@pytest.mark.parametrize("dim", [3, 300])  # 1 and 100 channels per head, for 13 keys
def test_any_number_of_channels_reads_every_key(dim: int) -> None:
    module = mechanism("linear", GRID, dim=dim)
    given = inputs(module, GRID)
    left, right = module.factors(given.q, given.k, GRID)
    assert_near(attention_matrix(module, given.q, given.k, GRID), left @ right.mT, 1e-12)


def test_additive_bias_is_not_part_of_the_matrix() -> None:
    module = mechanism("focused", GRID)
    given = inputs(module, GRID)
    before = attention_matrix(module, given.q, given.k, GRID)
    with torch.no_grad():
        module.dwc.bias += 100
    assert_near(attention_matrix(module, given.q, given.k, GRID), before, 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_matrix_is_formed_in_float64_whatever_the_mechanism_is_in(dtype: torch.dtype) -> None:
    module = mechanism("focused", GRID, dtype=dtype)
    given = inputs(module, GRID, dtype=dtype)
    copied = copy.deepcopy(module).double()
    matrix = attention_matrix(module, given.q, given.k, GRID)
    assert matrix.dtype == torch.float64
    assert torch.equal(matrix, attention_matrix(copied, given.q.double(), given.k.double(), GRID))


def test_autocast_around_the_probing_changes_nothing() -> None:
    """A callback may probe inside a step of a mixed-precision run."""
    module = mechanism("focused", GRID, dtype=torch.float32)
    given = inputs(module, GRID, dtype=torch.float32)
    want = attention_matrix(module, given.q, given.k, GRID)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_matrix(module, given.q, given.k, GRID)
    assert got.dtype == torch.float64
    assert_near(got, want, 1e-12)


class Recorder:
    """Holds something that must never be copied, as a callback holds its trainer."""

    def __init__(self) -> None:
        self.calls = 0

    def hook(self, *_: object) -> None:
        self.calls += 1

    def __deepcopy__(self, memo: object) -> None:
        raise AssertionError("the owner of a hook was copied")


def test_hooks_inside_the_mechanism_do_not_fire() -> None:
    calls = []
    module = mechanism("focused", GRID)
    module.dwc.register_forward_hook(lambda *_: calls.append("after"))
    given = inputs(module, GRID)
    attention_matrix(module, given.q, given.k, GRID)
    assert calls == []


def test_owner_of_a_hook_is_not_copied() -> None:
    """The hook of a callback is a bound method: copying it would copy the trainer and the whole model."""
    recorder = Recorder()
    module = mechanism("focused", GRID)
    module.register_forward_hook(recorder.hook)
    given = inputs(module, GRID)
    attention_matrix(module, given.q, given.k, GRID)
    assert recorder.calls == 0


def test_mechanism_is_left_as_it_was() -> None:
    module = mechanism("focused", GRID, dtype=torch.float32).train()
    before = copy.deepcopy(module.state_dict())
    given = inputs(module, GRID, dtype=torch.float32, grad=True)
    given(module, GRID).sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    matrix = attention_matrix(module, given.q, given.k, GRID)
    assert not matrix.requires_grad
    assert all(m.training for m in module.modules())
    assert all(torch.equal(t, before[name]) and t.dtype == torch.float32 for name, t in module.state_dict().items())
    assert all(torch.equal(p.grad, g) and p.requires_grad for p, g in zip(module.parameters(), gradients, strict=True))
    assert given.q.dtype == torch.float32


class Squared(Attention):
    """Not of the form M v, so it answers for itself."""

    facts = Facts(linear_in_values=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return v**2

    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        assert q.dtype == k.dtype == torch.float64
        return torch.eye(k.shape[-2], dtype=q.dtype) if v is None else v


def test_mechanism_that_cannot_be_probed_answers_for_itself() -> None:
    module = Squared(24, 3, GRID)
    given = inputs(module, GRID, dtype=torch.float32)
    assert torch.equal(attention_matrix(module, given.q, given.k, GRID), torch.eye(13, dtype=torch.float64))
    got = attention_matrix(module, given.q, given.k, GRID, v=given.v)
    assert torch.equal(got, given.v.double())


class TwiceAsWide(Attention):
    """Linear in v, with an output of twice as many channels."""

    def __init__(self, dim: int, num_heads: int, grid: Grid) -> None:
        super().__init__(dim, num_heads, grid)
        self.out_dim = 2 * dim

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return torch.cat([v, v], dim=-1)


class Untold(TwiceAsWide):
    facts = Facts(linear_in_values=False)


class Told(Untold):
    def attention_matrix(self, q: Tensor, k: Tensor, v: Tensor | None, grid: Grid) -> Tensor:
        return torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            TwiceAsWide,
            r"TwiceAsWide: out_dim differs from dim \(12 and 6\), .*: declare linear_in_values=False and give ",
        ),
        (Untold, r"Untold declares linear_in_values=False and has no attention_matrix\(q, k, v, grid\)"),
    ],
)
def test_what_has_no_matrix_to_read_is_a_user_error(kind: type[Attention], message: str) -> None:
    module = kind(6, 3, GRID)
    given = inputs(module, GRID)
    with pytest.raises(UserError, match=message):
        attention_matrix(module, given.q, given.k, GRID)


def test_an_output_of_another_width_with_its_own_matrix_is_taken() -> None:
    module = Told(6, 3, GRID)
    given = inputs(module, GRID)
    assert attention_matrix(module, given.q, given.k, GRID).shape == (*given.q.shape[:2], 13, 13)
