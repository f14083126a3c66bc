"""How much memory training takes."""

import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

GIB = 2**30


class Memory(Callback):
    """Logs the most memory that the first process has used so far, in GiB.

    `memory/host` is the largest resident set of the process itself, without its loader processes: a curve that never
    stops rising is a leak. It is not known on Windows. `memory/device` is what torch has allocated on the CUDA device.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Asks the system, in steps that are logged (`trainer.log_every_n_steps`)."""
        if trainer.global_step % trainer.log_every_n_steps:  # type: ignore[attr-defined]
            return
        unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
        if resource is not None:
            pl_module.log("memory/host", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB)
        if pl_module.device.type == "cuda":
            pl_module.log("memory/device", torch.cuda.max_memory_allocated(pl_module.device) / GIB)
