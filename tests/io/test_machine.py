"""Processors and memory, by themselves and as containers limit them."""

from types import SimpleNamespace

import pytest

from linvit import UserError
from linvit.io import machine

GIB = 2**30


@pytest.fixture
def groups(monkeypatch, tmp_path):
    """A machine of 64 GiB, 40 free, and 16 processors, whose control groups a test writes."""
    monkeypatch.setattr(machine, "GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(machine, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    total, free = 64 * GIB // 1024, 40 * GIB // 1024
    (tmp_path / "meminfo").write_text(f"MemTotal: {total} kB\nMemAvailable: {free} kB\n", encoding="utf-8")

    def write(own, **files):
        (tmp_path / "own").write_text(own, encoding="utf-8")
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/").replace("-", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n", encoding="utf-8")

    return write


def test_version_2_the_tightest_of_all_levels(groups):
    groups(
        "0::/job/step\n",
        **{"job__cpu-max": "150000 100000", "job__step__cpu-max": "max 100000"},
        **{"job__memory-max": 8 * GIB, "job__memory-current": 3 * GIB, "job__step__memory-max": "max"},
    )
    assert machine.cpus() == 1.5
    assert machine.memory() == (8 * GIB, 5 * GIB)


def test_another_system(groups, monkeypatch, tmp_path):
    (tmp_path / "meminfo").unlink()
    monkeypatch.delattr(machine.os, "sched_getaffinity")
    assert machine.memory() is None
    assert machine.cpus() == machine.os.cpu_count()


@pytest.fixture
def limits(monkeypatch):
    """Limits of open files, the soft one first, of a system that sets them up to its own maximum."""
    found = SimpleNamespace(RLIMIT_NOFILE=7, RLIM_INFINITY=-1, now=(64, 4096), maximum=2**20)

    def setrlimit(kind, given):
        if given[0] > found.maximum:
            raise ValueError("current limit exceeds maximum limit")
        found.now = given

    found.getrlimit, found.setrlimit = lambda kind: found.now, setrlimit
    monkeypatch.setattr(machine, "resource", found)
    return found


FILES = (128, "4 loader processes", "lower --data.num_workers, or")


@pytest.mark.parametrize(("most", "now"), [(128, 128), (4096, 4096), (100_000, 2**16), (-1, 2**16)])
def test_loader_processes_may_open_as_many_files_as_the_system_lets_them(limits, most, now):
    """A batch of detection is a list of tensors, each of which is an open file: how many is not known before."""
    limits.now = (64, most)
    machine.let_open(*FILES)
    assert limits.now == (now, most)


def test_a_limit_of_open_files_that_is_too_low_is_refused(limits):
    limits.now = (64, 64)
    with pytest.raises(UserError, match="may open 64 files at once, and 4 loader processes need up to 128: lower"):
        machine.let_open(*FILES)


def test_a_system_that_allows_fewer_open_files_than_it_says_gives_those_that_are_needed(limits):
    limits.now, limits.maximum = (64, -1), 10_240
    machine.let_open(*FILES)
    assert limits.now == (128, -1)
