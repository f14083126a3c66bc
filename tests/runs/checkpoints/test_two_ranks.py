"""Two processes: what they write is complete, or it is not there; strategies that write folders are refused."""

import errno
import os
import socket
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.multiprocessing import start_processes

from linvit import UserError
from linvit.callbacks import SaveCheckpoints, save_checkpoints
from linvit.runs.checkpoint import read_checkpoint
from linvit.weights import torch_file
from tests.cli.runs import QUICKSTART, linvit

WORLD = 2


class Net(LightningModule):
    """Two layers."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"lr": 1.0})
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 64), 2)  # 2 steps for each of the ranks


def rank_of(rank, port, folder):
    """One rank: trains for three epochs; the disk is full at the second checkpoint."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    save, count = save_checkpoints.AtomicCheckpointIO.save_checkpoint, 0

    def refuse(*args, **options):
        nonlocal count
        count += 1
        if count == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*args, **options)

    save_checkpoints.AtomicCheckpointIO.save_checkpoint = refuse
    last = SaveCheckpoints()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = DDPStrategy(process_group_backend="gloo")
    given = {"accelerator": "cpu", "devices": WORLD, "strategy": strategy, "default_root_dir": folder}
    trainer = Trainer(**given, max_epochs=3, callbacks=[last], **quiet)
    try:
        trainer.fit(Net())
    except UserError as error:
        Path(folder, f"said-{rank}").write_text(str(error), encoding="utf-8")


def step_of(path):
    torch_file.check_archive(path)
    return read_checkpoint(path, resumed=True)["global_step"]


@pytest.mark.slow
def test_a_disk_that_refuses_one_rank_ends_both(tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = start_processes(rank_of, (port, str(tmp_path)), WORLD, join=False, start_method="fork")
    while not started.join():
        pass
    for rank in range(WORLD):
        assert "ended at step 4, since" in (tmp_path / f"said-{rank}").read_text(encoding="utf-8")
    kept = tmp_path / "checkpoints"
    assert step_of(kept / "last.ckpt") == 2
    assert not list(kept.glob(".*.tmp"))


@pytest.mark.parametrize(
    "strategy",
    ["deepspeed", "ModelParallelStrategy", "{class_path: FSDPStrategy, init_args: {state_dict_type: sharded}}"],
)
def test_strategies_that_write_folders_are_refused_before_anything_starts(tmp_path, strategy):
    done = linvit("fit", f"--config={QUICKSTART}", f"--trainer.strategy={strategy}", cwd=tmp_path)
    assert done.code == 2
    assert "are folders, which linvit does not read" in done.err
    assert not list(tmp_path.iterdir())
