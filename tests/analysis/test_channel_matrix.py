"""What is said of a mechanism that mixes channels and no tokens: its matrix over channels, by that name."""

import math

import pytest
import torch

import linvit
from linvit import Grid, UserError
from linvit.analysis import Recorder, channel_matrix
from linvit.analysis.attention_matrix import CHANNELS
from linvit.analysis.attention_statistics import STATISTICS, channel_statistics, layer_statistics, per_head
from linvit.analysis.maps import Query, query_map, rollout
from tests.helpers import inputs, mechanism, randn

GRID = Grid((40, 40))  # more tokens than max_tokens: the matrix has d columns all the same


def test_statistics_are_those_of_the_matrix() -> None:
    module = mechanism("xca", GRID)
    given = inputs(module, GRID)
    matrix = channel_matrix(module, given.q, given.k, GRID)
    found = channel_statistics(matrix)
    assert found.keys() == set(STATISTICS)
    values = torch.linalg.svdvals(matrix[1, 2])
    assert found["rank"][1, 2] == 8
    assert found["spectral_norm"][1, 2].item() == pytest.approx(values[0].item())
    assert found["entropy"][1, 2].item() == pytest.approx(-(matrix[1, 2] * matrix[1, 2].log()).sum(1).mean().item())
    assert found["negative_share"].max() == 0
    assert found["attention_distance"].isnan().all()


def test_a_layer_has_statistics_of_its_channels_alone_and_no_map() -> None:
    model = linvit.create_backbone("deit_nano", attention="xca", num_classes=2, img_size=32).eval()
    with Recorder(model) as recorder:
        model(randn(1, 3, 32, 32, dtype=torch.float32))
    calls = recorder.calls
    call = next(iter(calls.values()))
    found = layer_statistics([call, call], channel=0, max_tokens=1)
    assert found.keys() == {CHANNELS}
    assert found[CHANNELS]["rank"].shape == (2, call.mechanism.num_heads)
    (first, *_) = per_head(found[CHANNELS])
    assert math.isnan(first[STATISTICS.index("attention_distance")])
    for look in (call.matrix, lambda: query_map(call, Query()), lambda: rollout(calls, Query())):
        with pytest.raises(UserError, match="mixes the channels of each token"):
            look()
