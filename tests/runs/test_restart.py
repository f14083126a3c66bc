"""Ranks that torchrun has restarted."""

import importlib

import pytest
from torch.distributed import HashStore

from linvit.runs.restart import forget_the_processes_before

rendezvous = importlib.import_module("torch.distributed.rendezvous")


@pytest.mark.parametrize(("restarts", "machines", "found"), [("0", "1", True), ("1", "1", False), ("1", "2", True)])
def test_what_processes_before_a_restart_have_stored(monkeypatch, restarts, machines, found):
    store = HashStore()
    store.set("address", "of a process that was ended")
    monkeypatch.setattr(rendezvous, "_create_c10d_store", lambda *args, **kwargs: store)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    forget_the_processes_before()
    assert rendezvous._create_c10d_store("host", 1).check(["address"]) == found


def test_without_torchrun_nothing_is_changed(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    before = rendezvous._create_c10d_store
    forget_the_processes_before()
    assert rendezvous._create_c10d_store is before
