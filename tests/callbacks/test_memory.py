"""Memory, as the system tells it."""

import torch

from linvit.callbacks import Memory
from linvit.callbacks.monitors import GIB
from tests import training
from tests.training import fit, tiny_task


def test_it_is_what_the_process_holds(tmp_path):
    ballast = torch.ones(GIB // 16)  # a quarter of a GiB that is there
    memory = training.Memory()
    fit(tiny_task(), tmp_path, 32, callbacks=[Memory()], logger=memory)
    values = [value for _, value in memory.values["memory/host"]]
    assert len(values) == 4
    assert values == sorted(values)
    with open("/proc/self/status") as status:
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    assert abs(values[-1] * GIB - peak) < 0.1 * peak
    assert values[-1] * GIB > ballast.nbytes
    assert "memory/device" not in memory.values


def test_where_the_system_does_not_say_nothing_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr("linvit.io.machine.resource", None)  # as on Windows
    memory = training.Memory()
    fit(tiny_task(), tmp_path, 16, callbacks=[Memory()], logger=memory)
    assert "memory/host" not in memory.values
