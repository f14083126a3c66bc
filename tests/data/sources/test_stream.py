"""Streaming: who reads which rows, in which order, and how many steps every rank does."""

import collections
import io
import tarfile
from functools import partial
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features

import linvit
from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import sample_seeds
from linvit.data.sources.images import SampleReader, Target, collate
from linvit.data.sources.labels import check_label
from linvit.data.sources.read import BadImages, ImageReader
from linvit.data.sources.stream import Shards, Stream, fingerprint, load_streams, worker_batches
from tests.data.images import image_folder, picture, png

FEATURES = Features({"image": datasets.Image(), "label": ClassLabel(names=["ant", "bee", "cow"])})
UNEVEN = [5, 1, 9, 4, 7]  # 26 rows
KINDS = ["parquet", "arrow"]


def rows(first, count):
    """A table whose labels and images follow from the number of the row."""
    images = [{"bytes": png(picture(first + row)), "path": f"{first + row}.png"} for row in range(count)]
    labels = [(first + row) % 3 for row in range(count)]
    return Dataset.from_dict({"image": images, "label": labels}, features=FEATURES)


def write(path, kind, counts):
    """Shards of the given lengths."""
    path.mkdir()
    firsts = np.cumsum([0, *counts])
    for index, count in enumerate(counts):
        table = rows(int(firsts[index]), count)
        file = path / f"train-{index:05}-of-{len(counts):05}.{kind}"
        if kind == "parquet":
            table.to_parquet(file)
        else:
            with datasets.arrow_writer.ArrowWriter(path=str(file), features=FEATURES) as writer:
                writer.write_table(table.data.table)
                writer.finalize()
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    return {kind: load_streams(str(write(root / kind, kind, UNEVEN)))["train"] for kind in KINDS}


def untold(shards):
    """The same without knowledge of the number of rows, as of tar or JSON files."""
    return Shards(shards.rows, None)


def rows_of(batch):
    """The rows in the whole set, which the paths of the images name."""
    return [int(Path(path).stem) for path in batch["id"]]


def plain(sample, seed):
    return sample | {"seed": seed}


def stream(shards, rank=0, world=1, workers=0, image="image", label="label", num_classes=3, **options):
    target = Target(label, partial(check_label, num_classes=num_classes, source="s"))
    reader = SampleReader(plain, image, {"label": target}, ImageReader())
    given = {"batch_size": 2, "source": "s"}
    bad = BadImages("skip", 0.5) if options.get("seed") is not None else BadImages("raise")
    return Stream(shards, reader, num_workers=workers, rank=rank, world_size=world, bad=bad, **{**given, **options})


def batches(shards, rank=0, world=1, workers=0, epoch=0, **options):
    """Rows of the batches of one rank, from real loader processes."""
    samples = stream(shards, rank, world, workers, **options)
    samples.set_epoch(epoch)
    loader = make_loader(samples, samples.topology.batch_size, workers, collate)
    return [rows_of(batch) for batch in loader]


def flat(lists):
    return [row for part in lists for row in part]


@pytest.mark.parametrize(
    ("kind", "world", "workers"), [("arrow", 1, 0), ("parquet", 2, 2), ("arrow", 3, 2), ("parquet", 13, 0)], ids=str
)
class TestShares:
    """Whole shards, or every n-th row where they are fewer than processes."""

    def test_evaluation_sees_every_row_once(self, shards, kind, world, workers):
        seen = flat(flat(batches(shards[kind], rank, world, workers) for rank in range(world)))
        assert sorted(seen) == list(range(26))

    def test_training_has_equal_steps_and_no_row_on_two_ranks(self, shards, kind, world, workers):
        ranks = [batches(shards[kind], r, world, workers, seed=1, buffer=4, batch_size=1) for r in range(world)]
        assert [[len(batch) for batch in rank] for rank in ranks] == [[1] * (26 // world)] * world
        parts = [set(flat(rank)) for rank in ranks]
        assert sum(map(len, parts)) == len(set.union(*parts))


class TestOrder:
    """A function of seed, epoch and layout."""

    def test_is_the_same_every_time_and_another_in_every_epoch_and_for_every_seed(self, shards):
        def order(**options):
            return batches(shards["parquet"], workers=2, buffer=8, **{"seed": 3, **options})

        torch.manual_seed(0)
        first = order(epoch=2)
        torch.manual_seed(1)
        np.random.seed(1)
        state = torch.get_rng_state()
        assert order(epoch=2) == first
        assert torch.equal(torch.get_rng_state(), state)
        assert order(epoch=3) != first
        assert order(epoch=2, seed=4) != first

    def test_a_larger_buffer_carries_rows_further(self, shards):
        def carried(buffer):
            order = flat(batches(shards["parquet"], seed=3, buffer=buffer))
            start = flat(batches(shards["parquet"], seed=3, buffer=1))
            return np.mean([abs(order.index(row) - start.index(row)) for row in order])

        assert carried(1) == 0
        assert 0 < carried(3) < carried(26)

    def test_the_augmentation_of_a_row_is_the_same_whoever_reads_it(self, shards):
        samples = stream(shards["arrow"], 1, 2, 2, seed=7)
        samples.set_epoch(4)
        found = [
            (row, seed)
            for batch in make_loader(samples, samples.topology.batch_size, 2, collate)
            for row, seed in zip(rows_of(batch), batch["seed"].tolist(), strict=True)
        ]
        assert len(found) == 12
        images = [fingerprint({"bytes": png(picture(row)), "path": f"{row}.png"}) for row, _ in found]
        assert [seed for _, seed in found] == sample_seeds(np.array(images), 7, 4).tolist()


class TestRowsAreUnknown:
    """Tar and JSON files."""

    def test_the_number_of_rows_must_be_told(self, shards):
        with pytest.raises(linvit.UserError, match=r"set --data\.streaming_rows"):
            stream(untold(shards["arrow"]), seed=1)

    def test_tar_files(self, tmp_path):
        for shard in range(2):
            with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
                for row in range(3):
                    for name, data in ((f"{row}.png", png(picture(row + 3 * shard))), (f"{row}.cls", b"%d" % row)):
                        member = tarfile.TarInfo(name)
                        member.size = len(data)
                        tar.addfile(member, io.BytesIO(data))
        shards = load_streams(str(tmp_path))["train"]
        assert (shards.total, shards.rows.num_shards) == (None, 2)
        samples = [sample for rank in range(2) for sample in stream(shards, rank, 2, image="png", label="cls")]
        assert sorted(sample["label"] for sample in samples) == [0, 0, 1, 1, 2, 2]
        assert len({sample["image"].numpy().tobytes() for sample in samples}) == 6
        with pytest.raises(linvit.UserError, match=r"label of 'of CRC-32 \w{8} \(.*1\.png\)' in 's' is 1"):
            list(stream(shards, 1, 2, image="png", label="cls", num_classes=1))


class TestBadRows:
    """A stream cannot draw another row; the next ones take the place."""

    @pytest.fixture
    def broken(self, tmp_path):
        images = [{"bytes": png(picture(row)), "path": f"{row}.png"} for row in range(12)]
        images[3]["bytes"] = images[7]["bytes"] = b"no image"
        table = Dataset.from_dict({"image": images, "label": [0] * 12}, features=FEATURES)
        table.to_parquet(tmp_path / "train.parquet", batch_size=4)
        return load_streams(str(tmp_path))["train"]

    def test_batches_stay_full(self, broken):
        found = batches(broken, workers=2, seed=1, batch_size=3)
        assert [len(batch) for batch in found] == [3] * 4
        assert not {3, 7} & set(flat(found))

    def test_evaluation_raises(self, broken):
        with pytest.raises(linvit.UserError, match=r"image of CRC-32 \w{8} \(3\.png\) cannot be decoded"):
            batches(broken)

    def test_rows_without_an_image_are_skipped(self, tmp_path):
        images = [{"bytes": png(picture(row)), "path": None} if row % 3 else None for row in range(12)]
        Dataset.from_dict({"image": images, "label": [0] * 12}, features=FEATURES).to_parquet(tmp_path / "x.parquet")
        shards = load_streams(str(tmp_path))["train"]
        assert len(flat(batches(shards, seed=1, batch_size=3))) == 12
        with pytest.raises(linvit.UserError, match=r"CRC-32 \w{8} \(stored in the table\) cannot be decoded: no image"):
            batches(shards)

    def test_nothing_but_bad_rows_does_not_go_on_for_ever(self, tmp_path):
        images = [{"bytes": b"no image", "path": None}] * 4
        Dataset.from_dict({"image": images, "label": [0] * 4}, features=FEATURES).to_parquet(tmp_path / "train.parquet")
        with pytest.raises(linvit.UserError, match="gave a loader process no image that can be used"):
            batches(load_streams(str(tmp_path))["train"], seed=1)


def test_a_label_outside_the_classes_is_named(shards):
    with pytest.raises(
        linvit.UserError,
        match=r"the label of 'of CRC-32 \w{8} \(2\.png\)' in 's' is 2, but there are 2 classes: 0 to 1",
    ):
        list(stream(shards["parquet"], num_classes=2))


def test_row_groups_count_as_shards_while_files_are_few(tmp_path):
    rows(0, 20).to_parquet(tmp_path / "train.parquet", batch_size=6)
    found = load_streams(str(tmp_path))["train"]
    assert (found.rows.num_shards, found.total) == (4, 20)


def test_a_truncated_file_is_told(tmp_path):
    rows(0, 20).to_parquet(tmp_path / "train.parquet")
    (tmp_path / "train.parquet").write_bytes((tmp_path / "train.parquet").read_bytes()[:-50])
    with pytest.raises(linvit.UserError, match=f"cannot read the data at '{tmp_path}'.* Is a file incomplete"):
        load_streams(str(tmp_path))


def test_images_in_folders_are_not_streamed(tmp_path):
    with pytest.raises(linvit.UserError, match=r"leave out --data\.streaming"):
        load_streams(str(image_folder(tmp_path / "data", ["train"])))


@pytest.mark.parametrize(("count", "workers"), [(0, 2), (5, 3), (6, 7)])
def test_processes_share_batches_as_the_loader_asks_for_them(count, workers):
    """The loader takes a batch from each in turn: earlier ones may have one more, and the last batch comes last."""
    shares = [worker_batches(count, worker, workers) for worker in range(workers)]
    assert [stop for _, stop in shares[:-1]] == [start for start, _ in shares[1:]]
    assert (shares[0][0], shares[-1][1]) == (0, count)
    sizes = collections.Counter(stop - start for start, stop in shares)
    assert max(sizes) - min(sizes) <= 1
