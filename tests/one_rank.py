"""One rank of a run whose others are not there: torch's fake process group exchanges nothing, and is counted.

`python -m tests.one_rank RANK WORLD FOLDER ARGUMENTS` is `linvit ARGUMENTS` as that rank, in a folder of its own. What
rank 0 tells the others is kept in a file, from which any other rank hears it.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from torch import Tensor, distributed
from torch.testing._internal.distributed.fake_pg import FakeProcessGroup, FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linvit.cli import main

HAS_RESULTS = hasattr(FakeProcessGroup.Options(), "simulate_uniform_ranks")
"""Whether torch's fake reductions have results, which DDP asks for; those of torch 2.11 have none."""


class Exchanged(TorchDispatchMode):
    """What is exchanged: lists of [operator, bytes] in `steps`, of each batch of training, and in `others`."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[list[list[Any]]] = []
        self.others: list[list[Any]] = []
        self._now = self.others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes an operator of torch.distributed."""
        if func.namespace in ("c10d", "_c10d_functional"):
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            self._now.append([func._schema.name.split("::")[1], sum(x.nbytes for x in tensors)])
        return func(*args, **(kwargs or {}))

    def in_step(self, advance: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does a batch of training, which is counted apart."""

        def counted(*args: Any) -> Any:
            self._now = []
            try:
                return advance(*args)
            finally:
                self.steps.append(self._now)
                self._now = self.others

        return counted


def join(rank: int, world: int, told: Path) -> None:
    """Makes this process one of many, for torch and Lightning."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID")
    values = (rank, rank, world, world, 0, "none")
    os.environ |= dict(zip(names, map(str, values), strict=True))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    options = FakeProcessGroup.Options()
    if HAS_RESULTS:
        options.simulate_uniform_ranks = True
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world, pg_options=options)
    new_group = distributed.new_group
    distributed.new_group = lambda backend: new_group(backend="fake")
    spoken = iter(pickle.loads(told.read_bytes()) if rank else [])
    said: list[Any] = []

    def broadcast_object_list(objects: list[Any], *_: Any, **__: Any) -> None:
        said.append(list(objects))
        if rank:
            objects[:] = next(spoken)
        else:
            told.write_bytes(pickle.dumps(said))

    def gather_object(own: Any, parts: list[Any] | None = None) -> None:
        if parts is not None:
            parts[:] = [own] * world

    distributed.broadcast_object_list = broadcast_object_list
    distributed.gather_object = gather_object


def run(rank: int, world: int, folder: Path, *arguments: str) -> int:
    """The run; `RANK-of-WORLD.json` in the folder says what was exchanged."""
    place = folder / f"{rank}-of-{world}"
    place.mkdir()
    join(rank, world, folder / "told")
    exchanged = Exchanged()
    _TrainingEpochLoop.advance = exchanged.in_step(_TrainingEpochLoop.advance)  # type: ignore[method-assign]
    os.chdir(place)
    torch.set_num_threads(1)
    with exchanged:
        code = main([*arguments, f"--trainer.devices={world}"])
    place.with_suffix(".json").write_text(json.dumps({"steps": exchanged.steps, "others": exchanged.others}))
    return code


if __name__ == "__main__":
    status = run(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]).resolve(), *sys.argv[4:])
    sys.stdout.flush()
    os._exit(status)  # a thread of autograd that still wants the interpreter while it ends would abort the process
