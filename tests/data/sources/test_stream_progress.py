"""Streams that continue in the middle of an epoch."""

import itertools

import pytest
from datasets import Dataset

from linvit.data.loading.loader import make_loader
from linvit.data.sources.images import collate
from linvit.data.sources.stream import load_streams
from tests.data.images import picture, png
from tests.data.sources.test_stream import FEATURES, stream, untold, write

COUNT = 48


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """48 rows in six shards, of files that contain their number and of files that do not."""
    root = tmp_path_factory.mktemp("shards")
    found = {kind: load_streams(str(write(root / kind, kind, [8, 4, 12, 8, 8, 8])))["train"] for kind in ("parquet",)}
    arrow = load_streams(str(write(root / "arrow", "arrow", [8] * 6)))["train"]
    return found | {"arrow": arrow, "untold": untold(arrow)}


class Epoch:
    """An epoch of a stream in several parts."""

    def __init__(self, shards):
        self.shards, self.state, self.rows = shards, None, []

    def phase(self, ranks, workers, batch_size, batches=None):
        """Trains for some batches, or to the end of the epoch; returns the batches of each rank."""
        shares, states = [], []
        for rank in range(ranks):
            samples = stream(
                self.shards, rank, ranks, workers, seed=1, buffer=5, batch_size=batch_size, given_total=COUNT
            )
            loader = make_loader(samples, batch_size, workers, collate, training=True)
            if self.state is not None:
                loader.load_state_dict(self.state)
            loader.sampler.set_epoch(2)
            planned = len(loader) - loader.batches_done
            share = [batch["id"] for batch in itertools.islice(loader, batches or planned)]
            shares.append(share)
            states.append(loader.state_dict())
            if batches is None:
                assert len(share) == planned
        assert all(state == states[0] for state in states)
        self.state = states[0]
        self.rows += [row for share in shares for batch in share for row in batch]
        return shares


@pytest.mark.parametrize(("kind", "workers"), [("parquet", 3), ("arrow", 0), ("untold", 3)])
def test_a_resumed_epoch_is_the_rest_of_the_whole_one(kinds, kind, workers):
    whole = Epoch(kinds[kind]).phase(1, workers, 4)
    epoch = Epoch(kinds[kind])
    parts = [batch for batches in (1, 4, 2, None) for batch in epoch.phase(1, workers, 4, batches)[0]]
    assert parts == whole[0]


@pytest.mark.parametrize("ranks_workers_batch", [(2, 2, 4), (1, 2, 6)], ids=str)
def test_another_topology_starts_the_epoch_again_and_says_so(kinds, ranks_workers_batch):
    epoch = Epoch(kinds["parquet"])
    epoch.phase(1, 2, 4, 2)
    with pytest.warns(UserWarning, match="starts again, since its order has changed: .* was . and is"):
        found = epoch.phase(*ranks_workers_batch)
    epoch.state = None
    assert found == epoch.phase(*ranks_workers_batch)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_bad_row_s_place_is_taken_by_the_next_wherever_the_epoch_goes_on(tmp_path, hidden):
    images = [{"bytes": png(picture(row)), "path": f"{row}.png"} for row in range(COUNT)]
    for bad in (0, 11, 12, 13, 30, 47):
        images[bad]["bytes"] = b"no image"
    table = Dataset.from_dict({"image": images, "label": [0] * COUNT}, features=FEATURES)
    table.to_parquet(tmp_path / "train.parquet", batch_size=8)
    shards = load_streams(str(tmp_path))["train"]
    shards = untold(shards) if hidden else shards
    whole = Epoch(shards).phase(1, 0, 4)[0]
    assert len(whole) == 12
    for first in (1, 4, 11):
        epoch = Epoch(shards)
        assert epoch.phase(1, 0, 4, first)[0] + epoch.phase(1, 0, 4)[0] == whole


def test_another_version_of_datasets_starts_the_epoch_again_and_says_so(kinds, monkeypatch):
    """The order of rows is that library's, which has changed it before."""
    epoch = Epoch(kinds["parquet"])
    epoch.phase(1, 0, 4, 2)
    monkeypatch.setattr("datasets.__version__", "99.0.0")
    with pytest.warns(
        UserWarning, match=r"starts again, since its order has changed: datasets was \S+ and is 99\.0\.0"
    ):
        assert len(epoch.phase(1, 0, 4)[0]) == 12
