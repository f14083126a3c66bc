"""The table of what keeping blocks costs."""

from lightning.pytorch.utilities import rank_zero_only

from linvit.experiments import keep
from linvit.experiments.keep import Measured, Measurements


def test_nothing_is_measured_twice_and_other_ranks_wait(tmp_path, monkeypatch):
    cost, asked = {1: 0.5, 2: 0.25, 4: 0.75}, []

    def measure(blocks):
        asked.append(blocks)
        return Measured(sum(cost[block] for block in blocks), 0.9, 0.001)

    def rank_0_works(_):
        with monkeypatch.context() as patch:
            patch.setattr(rank_zero_only, "rank", 0)
            assert table.order == [2, 1, 4]

    path = tmp_path / "runs" / "keep.csv"
    table = Measurements(path, measure)
    for block in cost:
        table([block])
    monkeypatch.setattr(keep.time, "sleep", rank_0_works)
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert Measurements(path)([4, 2]) == Measured(1.0, 0.9, 0.001)
    assert Measurements(path).order == [2, 1, 4]
    assert asked == [(1,), (2,), (4,), (1, 2), (2, 4), (1, 2, 4)]
