"""Shared memory: what is said before it runs out, and when it has."""

from collections import namedtuple

import pytest

from linvit.data import ClassificationData
from linvit.data.loading import shared_memory
from linvit.data.loading.shared_memory import check_shared_memory, explain, needed

IMAGE = 3 * 224 * 224


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A container as docker makes it: 64 MiB, of which 60 are free."""
    usage = namedtuple("Usage", "total used free")(64 * 2**20, 4 * 2**20, 60 * 2**20)
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(shared_memory.shutil, "disk_usage", lambda path: usage)


def test_too_little_is_a_warning_with_sizes_and_settings(small):
    with pytest.warns(UserWarning, match="lack of shared memory") as told:
        check_shared_memory(256, IMAGE, 8)
    text = str(told[0].message)
    for part in ("has 64 MiB, 60 free", "8 processes x 3 batches of 36.8 MiB", "may take 882", "--data.num_workers"):
        assert part in text
    for part in ("--data.batch_size", "--shm-size=8g"):
        assert part in text


@pytest.mark.parametrize(("batch", "workers", "ranks"), [(256, 0, 1), (64, 2, 1), (8, 2, 4)])
def test_enough_is_not_mentioned(small, recwarn, batch, workers, ranks):
    check_shared_memory(batch, IMAGE, workers, ranks)
    assert not recwarn


def test_devices_share_it(small):
    assert needed(64, IMAGE, 2) < 60 * 2**20
    with pytest.warns(UserWarning, match="x 4 devices may take"):
        check_shared_memory(64, IMAGE, 2, 4)


def test_the_error_of_a_killed_process_is_explained(small):
    killed = RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.")
    explain(killed, 256, IMAGE, 8)
    assert "has 64 MiB" in killed.__notes__[0]
    ended = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")
    others = ((RuntimeError("CUDA out of memory"), 8), (ValueError("DataLoader worker"), 8), (killed, 0), (ended, 8))
    for error, workers in others:
        before = len(getattr(error, "__notes__", []))
        explain(error, 256, IMAGE, workers)
        assert len(getattr(error, "__notes__", [])) == before


def test_the_data_module_does_both(small):
    data = ClassificationData("digits", batch_size=256, num_workers=8)
    data.setup("fit")
    with pytest.warns(UserWarning, match="8 processes x 3 batches of 36.8 MiB"):
        data.train_dataloader()
    killed = RuntimeError("DataLoader worker (pid 7) exited unexpectedly")
    data.on_exception(killed)
    assert "8 processes x 3 batches of 36.8 MiB" in killed.__notes__[0]
