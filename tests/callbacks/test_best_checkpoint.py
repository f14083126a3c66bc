"""Which epoch is kept as the best."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from linvit.callbacks import BestCheckpoint


class Scores(LightningModule):
    """A model with one weight whose epochs score as given."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores
        self.weight = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch, batch_idx):
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/score", self.scores[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return [torch.zeros(1)]

    val_dataloader = train_dataloader


def fit(task, tmp_path, callback, batches=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    Trainer(default_root_dir=tmp_path, callbacks=[callback], num_sanity_val_steps=0, **quiet, **options).fit(
        task, batches
    )


def kept_epoch(callback, scores, tmp_path):
    fit(Scores(scores), tmp_path, callback, max_epochs=len(scores))
    return torch.load(callback.best_model_path, weights_only=True)["epoch"]


@pytest.mark.parametrize(
    ("mode", "scores", "epoch"),
    [
        ("max", [0.5, 0.9, 0.9, 0.7], 2),
        ("max", [0.5, 0.9, 0.9, 0.95, 0.9], 3),
        ("min", [0.5, 0.1, 0.3, 0.1], 3),
        ("max", [0.9, 0.8, 0.7], 0),
        ("max", [0.9, float("nan"), 0.8], 0),
    ],
)
def test_the_last_of_the_best_epochs_is_kept(mode, scores, epoch, tmp_path):
    callback = BestCheckpoint(tmp_path, monitor="val/score", mode=mode, filename="best")
    assert kept_epoch(callback, scores, tmp_path) == epoch
    assert [path.name for path in tmp_path.glob("*.ckpt")] == [f"{callback.best_model_path.rpartition('/')[2]}"]


def test_weights_that_were_not_validated_get_no_score(tmp_path):
    """A run of `max_steps` ends within an epoch, and the score of the last validation is still there."""
    callback = BestCheckpoint(tmp_path, monitor="val/score", mode="max", filename="best")
    batches = torch.utils.data.DataLoader(torch.zeros(2))
    fit(Scores([0.5, 0.5]), tmp_path, callback, batches, max_steps=3)
    assert torch.load(callback.best_model_path, weights_only=True)["global_step"] == 2


def test_several_are_kept_as_lightning_keeps_them(tmp_path):
    callback = BestCheckpoint(tmp_path, monitor="val/score", mode="max", filename="{epoch}", save_top_k=2)
    assert kept_epoch(callback, [0.9, 0.9, 0.9], tmp_path) == 0
    assert len(list(tmp_path.glob("*.ckpt"))) == 2


def test_its_state_is_found_in_checkpoints_of_lightning_s_class():
    given = {"monitor": "val/score", "mode": "max"}
    assert BestCheckpoint(**given).state_key == ModelCheckpoint(**given).state_key
