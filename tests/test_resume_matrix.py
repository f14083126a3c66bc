"""Interrupted runs equal those that are not, however they load, accumulate and validate, and on several ranks."""

import io
import random
import tarfile
from collections import Counter

import pytest

from linvit.data.sources.splits import load_splits
from tests.data.images import png
from tests.resuming import RANDOM, differences, part, ranks, read, run

pytestmark = pytest.mark.slow

STREAM = {"streaming": True, "shuffle_buffer": 50}
WHOLE = {"limit_train_batches": 1.0, "max_epochs": 2}  # epochs


@pytest.fixture(scope="module")
def tar(tmp_path_factory):
    """The digits as tar files, which do not contain their number of rows."""
    folder = tmp_path_factory.mktemp("tar")
    rows = load_splits("digits")["train"]
    for name, first, count in (*((f"train-{i}", 60 * i, 60) for i in range(8)), ("val-0", 480, 60)):
        with tarfile.open(folder / f"{name}.tar", "w") as file:
            for number in range(first, first + count):
                row = rows[number]
                for suffix, content in (("png", png(row["image"].convert("RGB"))), ("cls", b"%d" % row["label"])):
                    member = tarfile.TarInfo(f"{number}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
    return {"source": str(folder), "num_classes": 10, "label_column": "cls", "streaming_rows": 480, **STREAM}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs without interruption, each made once."""
    made = {}

    def make(loading, options):
        key = repr((loading, options))
        if key not in made:
            made[key] = run(tmp_path_factory.mktemp("whole") / "run", [], loading, **options)
        return made[key]

    return make


def stops(total, count, *seed):
    """Steps at random."""
    return sorted(random.Random(repr(seed)).sample(range(1, total), count))


@pytest.mark.parametrize("interruptions", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("workers", [0, 4])
@pytest.mark.parametrize("kind", ["map", "stream", "tar"])
def test_bit_equal(tmp_path, whole, tar, kind, workers, accumulate, interruptions):
    """Two epochs of 26 batches (tar: 10) with validation; dropout, drop path, moving average, mixup and CutMix."""
    loading = {"map": {}, "stream": STREAM, "tar": tar}[kind] | {"num_workers": workers, "batch_size": 48}
    options = WHOLE | {"accumulate_grad_batches": accumulate, "val_check_interval": 5}
    expected = whole(loading, options)
    total = expected["checkpoint"]["global_step"]
    found = run(tmp_path / "run", stops(total, interruptions, kind, workers, accumulate), loading, **options)
    assert differences(found, expected) == []


@pytest.mark.parametrize("model", [{"attention": "performer", "grad_checkpointing": True}, {"compile": True}], ids=str)
def test_other_ways_to_compute(tmp_path, model):
    """With validation after the second, fourth and sixth of seven batches."""
    options = {"model": {**RANDOM, **model}, "val_check_interval": 0.3}
    whole = run(tmp_path / "whole", [], {"num_workers": 2}, **options)
    assert differences(run(tmp_path / "parts", [2, 5, 10], {"num_workers": 2}, **options), whole) == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": -1, "max_steps": 19},
        {"check_val_every_n_epoch": 2},
        {"check_val_every_n_epoch": None, "val_check_interval": 9},
        {"limit_val_batches": 0},
        {"num_sanity_val_steps": 2, "reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("step", [3, 7, 9, 14])
def test_validation_and_ends_of_epochs_happen_once_wherever_the_run_goes_on(tmp_path, whole, options, step):
    """Epochs of seven steps."""
    options = {"max_epochs": 3} | options
    assert differences(run(tmp_path / "run", [step], {}, **options), whole({}, options)) == []


class TestRanks:
    """Two processes."""

    @pytest.mark.parametrize("loading", [{}, STREAM | {"num_workers": 2}], ids=["map", "stream"])
    def test_two_and_two_are_bit_equal(self, tmp_path, loading):
        results = []
        for name, steps in (("whole", [10**6]), ("parts", [3, 9, 10**6])):
            folder, last = tmp_path / name, None
            folder.mkdir()
            for seed, step in enumerate(steps):
                last = ranks(folder, 2, step, seed, loading, last)
            results.append(read(folder, last))
        assert len(results[0]["samples-1"]) == 14
        assert differences(*results) == []

    @pytest.mark.parametrize("layouts", [[2, 1], [1, 2, 1]], ids=str)
    def test_on_another_number_of_ranks_each_sample_is_counted_once(self, tmp_path, layouts):
        """An epoch of 1248 of the 1257 digits, in steps of 52, or of twice as many on two ranks."""
        last = None
        for number, world in enumerate(layouts):
            step = 5 * (number + 1) if number + 1 < len(layouts) else 10**6
            given = {"batch_size": 52}
            options = {"limit_train_batches": 1.0, "max_epochs": 1}
            if world == 1:
                last = part(tmp_path, step, number, given, last, **options)
            else:
                last = ranks(tmp_path, world, step, number, given, last, **options)
        found = read(tmp_path, last)
        counts = Counter(
            index for name, lines in found.items() if name.startswith("samples") for line in lines for index in line[2]
        )
        assert set(counts.values()) == {1}
        assert len(counts) == 1248
