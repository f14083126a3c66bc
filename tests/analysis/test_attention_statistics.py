"""Statistics of equivalent matrices: by factors and by probing they are those of the dense matrix in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from linvit import Attention, Grid
from linvit.analysis import attention_matrix, attention_statistics
from tests.helpers import inputs, low_rank, mechanism, randn, token_mixers

GRID = Grid((6, 5), num_prefix=1)
RTOL = 1e-10


def naive(matrix: Tensor, grid: Grid, top: int) -> dict[str, float]:
    """All numbers of one matrix (N, M), query by query and key by key."""
    values = torch.linalg.svd(matrix)[1].tolist()
    shares = [value / sum(values) for value in values]
    found = {
        "rank": sum(value > RTOL * values[0] for value in values),
        "effective_rank": math.exp(-sum(share * math.log(share) for share in shares if share)),
        "stable_rank": sum(value**2 for value in values) / values[0] ** 2,
        "spectral_norm": values[0],
    }
    sums = [sum(map(abs, row)) or 1 for row in matrix.tolist()]  # a row of zeros counts as 0 everywhere
    weights = [[abs(entry) / total for entry in row] for row, total in zip(matrix.tolist(), sums, strict=True)]
    rows, columns = grid.size
    key_rows, key_columns = grid.keys_size

    def where(key: int) -> tuple[float, float]:
        row, column = divmod(key - grid.num_prefix, key_columns)
        return (row + 0.5) * rows / key_rows, (column + 0.5) * columns / key_columns

    distances = []
    for query in range(grid.num_prefix, grid.num_queries):
        row, column = divmod(query - grid.num_prefix, columns)
        own = (row + 0.5, column + 0.5)
        keys = range(grid.num_prefix, grid.num_keys)
        total = sum(weights[query][key] for key in keys)
        if not total:
            distances.append(0.0)
            continue
        share = {key: weights[query][key] / total for key in keys}
        distances.append(sum(share[key] * math.dist(where(key), own) for key in keys))
    each = {
        "entropy": [-sum(w * math.log(w) for w in row if w) for row in weights],
        "top_share": [sum(sorted(row)[-top:]) for row in weights],
        "attention_distance": distances,
        "negative_share": [sum(-e for e in row if e < 0) / s for row, s in zip(matrix.tolist(), sums, strict=True)],
    }
    return found | {name: sum(many) / len(many) for name, many in each.items()}


@pytest.mark.parametrize(
    "spec", [*token_mixers(), *(low_rank(name) for name in token_mixers() if len(low_rank(name)) > 1)], ids=str
)
def test_both_ways_give_the_numbers_of_the_dense_matrix(spec: Any) -> None:
    module = mechanism(spec, GRID)
    given = inputs(module, GRID, batch=1)
    matrix = attention_matrix(module, given.q, given.k, GRID, v=given.v, channel=None, **given.extra)
    got = attention_statistics(module, given.q, given.k, GRID, v=given.v, rtol=RTOL, top=3, **given.extra)
    for head in ((0, 0), (0, 2)):
        chosen = (*head, 4) if module.facts.channelwise else head
        want = naive(matrix[chosen], GRID, 3)
        assert got.keys() == want.keys()
        for tag, value in want.items():
            assert got[tag][chosen].item() == pytest.approx(value, rel=1e-6, abs=1e-9), tag


@pytest.mark.parametrize("name", ["hydra", "linear", "softmax"])
def test_fewer_keys_than_queries(name: str) -> None:
    grid = Grid((6, 6), (3, 2), num_prefix=1)
    module = mechanism(name, grid)
    given = inputs(module, grid, batch=1)
    got = attention_statistics(module, given.q, given.k, grid, channel=1, rtol=RTOL, top=3)
    matrix = attention_matrix(module, given.q, given.k, grid, channel=1)
    for tag, value in naive(matrix[0, 1], grid, 3).items():
        assert got[tag][0, 1].item() == pytest.approx(value, rel=1e-6, abs=1e-9), tag


@pytest.mark.parametrize("channel", [2, "mean"])
@pytest.mark.parametrize("name", ["hydra", "focused"])
def test_one_channel_of_factors_and_of_the_matrix(name: str, channel: Any) -> None:
    module = mechanism(name, GRID)
    given = inputs(module, GRID)
    whole = attention_matrix(module, given.q, given.k, GRID)
    want = whole.mean(2) if channel == "mean" else whole[:, :, channel]
    torch.testing.assert_close(attention_matrix(module, given.q, given.k, GRID, channel=channel), want)
    got = attention_statistics(module, given.q, given.k, GRID, channel=channel)
    assert got["rank"].shape == (2, 3)
    torch.testing.assert_close(got["spectral_norm"], torch.linalg.matrix_norm(want, 2), rtol=1e-9, atol=0)


class Given(Attention):
    """A matrix from outside, as it is or by factors."""

    def __init__(self, left: Tensor, right: Tensor, factored: bool) -> None:
        super().__init__(8, 1, Grid((4, 3)))
        self.left, self.right, self.factored = left, right, factored

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        return (self.left @ self.right.mT).expand(len(q), 1, 12, 12) @ v

    def factors(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor] | None:
        return (self.left[None, None], self.right[None, None]) if self.factored else None


@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e-160, 1e150, math.nan, math.inf])
def test_no_input_raises(factored: bool, scale: float) -> None:
    """Zero, rank 1 of tiny and huge entries, NaN and infinity."""
    left, right = torch.ones(12, 1).double(), torch.ones(12, 1).double()
    left[0] = scale if math.isfinite(scale) else 1
    module = Given(left * scale, right, factored)
    q = randn(1, 1, 12, 8)
    found = attention_statistics(module, q, q, Grid((4, 3)))
    if not math.isfinite(scale):
        assert all(value.isnan().all() for value in found.values())
    elif scale == 0:
        assert all(value == 0 for name, value in found.items() if "distance" not in name)
    else:
        assert found["rank"] == 1
        assert found["effective_rank"].item() == pytest.approx(1)
        assert found["stable_rank"].item() == pytest.approx(1)
        assert found["entropy"].item() == pytest.approx(math.log(12))


def test_rows_stand_for_all_alike_in_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    module = mechanism("linear", GRID)
    given = inputs(module, GRID)
    factored = attention_statistics(module, given.q, given.k, GRID, max_rows=7)
    monkeypatch.setattr(type(module), "factors", Attention.factors)
    probed = attention_statistics(module, given.q, given.k, GRID, max_rows=7)
    for name, value in factored.items():
        torch.testing.assert_close(value, probed[name], rtol=1e-6, atol=1e-12)
    assert attention_statistics(module, given.q, given.k, GRID, max_tokens=30) == {}
