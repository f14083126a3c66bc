"""Two processes, with a share of the weights each or with copies: what they write is complete, or it is not there."""

import errno
import os
import signal
import socket
import time
import warnings
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing import start_processes

from linvit import checksum
from linvit.callbacks import SaveCheckpoints, checkpoint_io
from linvit.errors import UserError
from linvit.runs.checkpoint import read_checkpoint

WORLD = 2


class Net(LightningModule):
    """Two layers, each of them sharded."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"lr": 1.0})
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))

    def configure_model(self):
        if self.device_mesh is None:
            return  # each rank has a copy
        for layer in (*self.net, self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(8, 64), 2)  # 4 steps, or 2 for each of the ranks of DDP


def rank_of(rank, port, folder, epochs, ckpt_path, fault, strategy):
    """One rank: trains for some epochs; a fault hits the second checkpoint that the last rank which writes does."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    names = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD}
    os.environ |= {name: str(value) for name, value in names.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}
    write, count = FileSystemWriter.write_data, 0

    def faulty(self, *args):
        nonlocal count
        count += 1
        if rank == 1 and count == 2 and fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if rank == 1 and count == 2 and fault == "killed":
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(60)
        return write(self, *args)

    FileSystemWriter.write_data = faulty

    save = checkpoint_io.AtomicCheckpointIO.save_checkpoint

    def refuse(*args, **options):
        nonlocal count
        count += 1
        if count == 2 and fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(*args, **options)

    checkpoint_io.AtomicCheckpointIO.save_checkpoint = refuse
    last = SaveCheckpoints()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = strategy(process_group_backend="gloo")
    trainer = Trainer(
        accelerator="cpu", devices=WORLD, strategy=strategy, default_root_dir=folder, max_epochs=epochs,
        callbacks=[last], **quiet,
    )  # fmt: skip
    trainer.fit(Net(), ckpt_path=ckpt_path)
    Path(folder, f"said-{rank}").write_text(f"{trainer.global_step} {last.failure}", encoding="utf-8")


def train(folder, epochs, ckpt_path=None, fault=None, join=True, strategy=ModelParallelStrategy):
    """Both ranks; returns what each says at its end, or, if it shall not wait for it, the processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    args = (port, str(folder), epochs, ckpt_path and str(ckpt_path), fault, strategy)
    started = start_processes(rank_of, args, WORLD, join=False, start_method="fork")
    if not join:
        return started
    while not started.join():
        pass
    return [(folder / f"said-{rank}").read_text(encoding="utf-8") for rank in range(WORLD)]


def step_of(folder):
    checksum.verify(folder)
    return read_checkpoint(folder, resumed=True)["global_step"]


@pytest.mark.slow
class TestTwoRanks:
    """The same guarantees as a file has."""

    def test_a_folder_is_written_and_resumed(self, tmp_path):
        kept = tmp_path / "checkpoints"
        assert train(tmp_path, 2) == ["8 None", "8 None"]
        assert [step_of(kept / name) for name in ("last.ckpt", "previous.ckpt")] == [8, 4]
        assert {"sha256sums.txt", ".metadata", "meta.pt"} < {path.name for path in (kept / "last.ckpt").iterdir()}
        content = read_checkpoint(kept / "last.ckpt", resumed=True)
        assert content["state_dict"]["net.0.weight"].shape == (64, 64)
        assert train(tmp_path, 3, ckpt_path=kept / "last.ckpt") == ["12 None", "12 None"]
        assert sorted(path.name for path in kept.iterdir()) == [".lock", "last.ckpt", "previous.ckpt"]

    @pytest.mark.parametrize(("strategy", "steps"), [(ModelParallelStrategy, 4), (DDPStrategy, 2)])
    def test_a_disk_that_refuses_one_rank(self, tmp_path, strategy, steps):
        kept = tmp_path / "checkpoints"
        assert train(tmp_path, 3, fault="full", strategy=strategy) == [f"{3 * steps} None"] * WORLD
        assert [step_of(kept / name) for name in ("last.ckpt", "previous.ckpt")] == [3 * steps, steps]
        assert not list(kept.glob(".*.tmp"))

    def test_a_kill_in_the_middle_of_it(self, tmp_path):
        kept, caught = tmp_path / "checkpoints", []
        before = signal.signal(signal.SIGUSR1, lambda *_: caught.append(1))
        try:
            started = train(tmp_path, 3, fault="killed", join=False)
            while not caught:
                time.sleep(0.01)
        finally:
            signal.signal(signal.SIGUSR1, before)
            for process in started.processes:
                process.kill()
                process.join()
        assert len(list(kept.glob(".*.tmp"))) == 1
        assert step_of(kept / "last.ckpt") == 4
        assert train(tmp_path, 3, ckpt_path=kept / "last.ckpt") == ["12 None", "12 None"]
        assert not list(kept.glob(".*.tmp"))


def test_a_folder_that_is_damaged(tmp_path):
    folder = tmp_path / "last.ckpt"
    folder.mkdir()
    for name in (".metadata", "__0_0.distcp", "meta.pt"):
        (folder / name).write_bytes(bytes(1000))
    checksum.verify(folder)
    checksum.write_list(folder)
    checksum.verify(folder)
    (folder / "meta.pt").write_bytes(bytes(999) + b"1")
    with pytest.raises(UserError, match=r"meta\.pt' is missing or damaged"):
        checksum.verify(folder)
    (folder / "meta.pt").unlink()
    with pytest.raises(UserError, match=r"meta\.pt' is missing or damaged"):
        read_checkpoint(folder)
