"""The rank by thin factors is the rank of the probed matrix, and takes no matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor

from linvit import Grid, Host, UserError
from linvit.analysis import attention_matrix, attention_rank, rank
from linvit.attention.linear import LinearAttention
from linvit.registry import attentions
from tests.helpers import inputs, low_rank, mechanism, own_names, randn

GRID = Grid((4, 3), num_prefix=1)
NEGLIGIBLE = 1e-10
"""As the conformance kit has it: an inverse by iteration leaves singular values of 1e-12, where rounding decides."""


def no_forward(*_: Any, **__: Any) -> Tensor:
    raise AssertionError("the matrix is probed")


@pytest.mark.parametrize(
    ("name", "grid"),
    [
        *((name, Grid((5, 7), num_prefix=2)) for name in ("softmax", "hydra", "focused", "soft", "agent", "additive")),
        *((name, Grid((6, 6), (3, 4), num_prefix=1)) for name in ("hydra", "linear", "linformer")),
    ],
    ids=str,
)
def test_rank_is_that_of_the_probed_matrix(name: str, grid: Grid) -> None:
    tied = mechanism(name, Grid((6, 8)))
    if tied.host.project != "qkv" or tied.facts.same_grid:
        grid = grid._replace(kv_size=None)
    module = mechanism(low_rank(name), grid)
    given = inputs(module, grid)
    want = rank(attention_matrix(module, given.q, given.k, grid, v=given.v, **given.extra), NEGLIGIBLE)
    got = attention_rank(module, given.q, given.k, grid, v=given.v, **given.extra, rtol=NEGLIGIBLE)
    assert got.shape == ((2, 3, 8) if module.facts.channelwise else (2, 3))
    assert torch.equal(got, want)


@pytest.mark.parametrize("name", own_names(attentions))
def test_at_784_tokens_there_is_no_matrix_where_there_are_factors(name: str) -> None:
    grid = Grid((28, 28))
    module = mechanism(low_rank(name), grid, num_heads=2, dtype=torch.float32)
    if module.facts.channelwise:  # a matrix of each channel: few will do
        module = mechanism(low_rank(name), grid, dim=8, num_heads=2, dtype=torch.float32)
    given = inputs(module, grid, batch=1, dtype=torch.float32)
    if module.factors(given.q, given.k, grid) is None:
        assert module.rank_bound(grid) == 784 or not module.facts.linear_in_values
        return
    module.forward = no_forward
    ranks = attention_rank(module, given.q, given.k, grid)
    # Features of softmax and the squares of unit vectors sum to 1 for every token: one of them follows from the others.
    assert (ranks == module.rank_bound(grid) - (name in ("hedgehog", "taylor_shift"))).all()


@pytest.mark.parametrize(("name", "dtype"), [("linear", torch.float16), ("hydra", torch.float32)], ids=str)
def test_precision_of_the_mechanism_and_autocast_change_nothing(name: str, dtype: torch.dtype) -> None:
    module = mechanism(name, GRID, dtype=dtype)
    given = inputs(module, GRID, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        got = attention_rank(module, given.q, given.k, GRID)
    assert got.dtype == torch.float64
    assert (got == module.rank_bound(GRID)).all()


class Biased(LinearAttention):
    """Factors that know nothing of the bias."""

    host = Host(accepts_bias=True)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, bias: Tensor | None = None) -> Tensor:
        out = super().forward(q, k, v, grid)
        return out if bias is None else out + bias @ v


def test_a_bias_is_part_of_the_matrix() -> None:
    module = Biased(24, 3, GRID).double()
    given = inputs(module, GRID)
    bias = randn(1, 3, 13, 13, seed=9)
    assert (attention_rank(module, given.q, given.k, GRID) == 8).all()
    assert (attention_rank(module, given.q, given.k, GRID, bias=bias) == 13).all()


def test_rtol_moves_the_threshold() -> None:
    module = mechanism("linear", GRID)
    k = randn(2, 3, 13, 8)
    q = k.clone()
    strict, lenient = (attention_rank(module, q, k, GRID, rtol=rtol) for rtol in (1e-12, 0.9))
    assert (strict == 8).all()
    assert (lenient == 1).all()


@pytest.mark.parametrize("name", ["linear", "hydra", "softmax"])
def test_a_non_finite_matrix_has_no_rank(name: str) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    given.k[1] = torch.nan
    ranks = attention_rank(module, given.q, given.k, GRID)
    assert ranks[0].isfinite().all()
    assert ranks[1].isnan().all()


class Misshapen(LinearAttention):
    """One matrix's factors under the declaration of one per channel, or the other way round."""

    def __init__(self, channelwise: bool) -> None:
        super().__init__(24, 3, GRID)
        self.declare(channelwise=channelwise)

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        return (q, k) if self.facts.channelwise else (q.mT.unsqueeze(-1), k.mT.unsqueeze(-1))


@pytest.mark.parametrize(
    ("channelwise", "message"),
    [
        (True, r"channelwise=True, has factors of shapes \(2, 3, 13, 8\), .* must be \(B, h, d, N, r\)"),
        (False, r"channelwise=False, has factors of shapes \(2, 3, 8, 13, 1\), .* must be \(B, h, N, r\)"),
    ],
)
def test_factors_of_other_shapes_than_declared_are_refused(channelwise: bool, message: str) -> None:
    module = Misshapen(channelwise)
    given = inputs(module, GRID)
    with pytest.raises(UserError, match=message):
        attention_rank(module, given.q, given.k, GRID)
