"""Restarts by torchrun: the ranks find one another, and not the processes that were there before."""

import importlib
import os
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store


def forget_the_processes_before() -> None:
    """Gives ranks that torchrun has restarted a part of its store of their own.

    Ranks find one another by addresses in the store that torchrun keeps over restarts. A rank that is first there
    after a restart finds those of the processes that were ended, and fails by "connection refused" (torch 2.15). All
    ranks of one machine have the same number of restarts; those of several machines need not, so they are left alone.
    """
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function of torch.distributed has its name
    create = rendezvous._create_c10d_store

    def create_anew(*args: Any, **kwargs: Any) -> Store:
        return PrefixStore(f"restart {restarts}", create(*args, **kwargs))

    rendezvous._create_c10d_store = create_anew  # type: ignore[attr-defined]
