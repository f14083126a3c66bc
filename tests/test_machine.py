"""Processors and memory, by themselves and as containers limit them."""

import subprocess
import sys

import pytest

from linvit import machine

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


def test_a_machine_without_limits(groups):
    groups("0::/\n", **{"cpu-max": "max 100000", "memory-max": "max", "memory-current": GIB})
    assert machine.cpus() == 16
    assert machine.memory() == (64 * GIB, 40 * GIB)


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


def test_loader_processes_need_more_files_than_may_be_open():
    """In a process of its own, which may open 64, or raise that to 128."""
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))\n"
        "from linvit.machine import let_open; let_open(128, '4 loader processes', 'lower --data.num_workers, or')\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    pytest.importorskip("resource")
    few, enough = (
        subprocess.run([sys.executable, "-c", code, most], capture_output=True, text=True) for most in ("64", "4096")
    )
    assert "may open 64 files at once, and 4 loader processes need up to 128: lower --data.num_workers" in few.stderr
    assert (enough.stdout, enough.returncode) == ("128\n", 0)
