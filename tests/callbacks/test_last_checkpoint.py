"""What is kept to go on from."""

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from linvit.callbacks import LastCheckpoint
from tests.training import fit, tiny_task


class SavesAt(Callback):
    """Saves in the middle of an epoch, as a signal or a guard does."""

    def __init__(self, last, step):
        self.last, self.step = last, step
        self.kept = None

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.last.save(trainer)
            self.kept = torch.load(self.last.best_model_path, weights_only=True)


def run(folder, *callbacks, **options):
    return fit(tiny_task(), folder, callbacks=[*callbacks], enable_checkpointing=True, **options)


def test_it_is_written_after_every_epoch(tmp_path):
    run(tmp_path, LastCheckpoint(), max_epochs=3)
    assert torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["global_step"] == 6


def test_it_is_written_whenever_somebody_asks(tmp_path):
    last = LastCheckpoint()
    asks = SavesAt(last, step=3)
    run(tmp_path, last, asks, max_epochs=2)
    assert last.best_model_path == str(tmp_path / "checkpoints" / "last.ckpt")
    assert asks.kept["global_step"] == 3
    assert torch.load(last.best_model_path, weights_only=True)["global_step"] == 4


def test_fast_dev_run_leaves_nothing(tmp_path):
    last = LastCheckpoint()
    run(tmp_path, last, fast_dev_run=True)
    last.save(run(tmp_path, last, fast_dev_run=True))
    assert not list(tmp_path.rglob("*.ckpt"))


def test_its_state_is_found_in_checkpoints_of_lightning_s_class():
    assert LastCheckpoint().state_key == ModelCheckpoint(filename="last").state_key
