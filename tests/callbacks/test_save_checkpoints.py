"""What is kept of a run: its last state, and its best ones."""

import errno
import math
import os
import shutil

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

import linvit
from linvit.callbacks import SaveCheckpoints
from linvit.callbacks import save_checkpoints as module
from linvit.callbacks.exact_resume import ExactResume
from linvit.callbacks.save_checkpoints import AtomicCheckpointIO, Best
from linvit.io import files
from tests.training import Memory, fit, tiny_task, trainer


def run(folder, *callbacks, **options):
    return fit(tiny_task(), folder, callbacks=[*callbacks], enable_checkpointing=True, **options)


def read(path):
    return torch.load(path, weights_only=True)


def step_of(path):
    return read(path)["global_step"]


class Killed(BaseException):
    """Stands for SIGKILL."""


class Rows(Memory):
    """A logger that knows what it has written."""

    def __init__(self):
        super().__init__()
        self.saved = 0

    def save(self):
        self.saved = len(self.values.get("train/loss", ()))


def test_it_is_the_record_of_its_moment(tmp_path, monkeypatch):
    """Rows, then the names of the best, then last.ckpt; a run that is resumed after a kill in between does it again."""
    saves = SaveCheckpoints("train/loss", "max")
    monkeypatch.setattr(saves.best[0], "take", lambda value, epoch: Best.take(saves.best[0], 1.0, epoch))
    logger, folder = Rows(), tmp_path / "memory" / "version_0" / "checkpoints"
    moments = []

    def link(path, other):
        moments.append((path.name, other.name, logger.saved))
        if len(moments) == 2:
            raise Killed
        files.link(path, other)

    monkeypatch.setattr(module, "link", link)
    with pytest.raises(Killed):
        run(tmp_path, saves, max_epochs=3, logger=logger)
    assert moments == [("best.ckpt", "last.ckpt", 2), ("best.ckpt", "last.ckpt", 4)]
    assert read(folder / "last.ckpt")["callbacks"][saves.state_key] == {"train/loss": 1.0, "epochs": {"train/loss": 1}}
    assert {path.name: step_of(path) for path in folder.glob("*.ckpt")} == {"best.ckpt": 4, "last.ckpt": 2}


@pytest.mark.parametrize("state", [{}, {"val/score": 5}, {"val/score": {"../mine.ckpt": 1.0}}], ids=str)
def test_a_state_of_another_kind_is_left_out(state):
    saves = SaveCheckpoints()
    saves.load_state_dict(state)
    assert saves.best[0].value is None
    saves.load_state_dict({"val/score": 0.5})
    assert saves.best[0].value == 0.5


class Disk:
    """Counts the checkpoints that are written, and refuses some of them."""

    def __init__(self, monkeypatch, *refused):
        self.count, self.refused, self.save = 0, refused, AtomicCheckpointIO.save_checkpoint
        monkeypatch.setattr(AtomicCheckpointIO, "save_checkpoint", lambda *args, **_: self(*args))

    def __call__(self, plugin, checkpoint, path):
        self.count += 1
        if self.count in self.refused:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        self.save(plugin, checkpoint, path)


@pytest.mark.parametrize("monitor", [None, "train/loss"])
def test_a_checkpoint_that_cannot_be_saved_ends_the_run_and_the_one_before_is_as_it_was(tmp_path, monkeypatch, monitor):
    disk = Disk(monkeypatch, 2)
    with pytest.raises(
        linvit.UserError, match=r"(?s)step 4, since .*\.ckpt' could not be saved: No space left"
    ) as error:
        run(tmp_path, SaveCheckpoints(monitor, "max"), max_epochs=3)
    assert str(error.value).endswith(f"resume with\n  linvit fit --config {tmp_path}/config.yaml --resume=auto")
    assert disk.count == 2
    kept = tmp_path / "checkpoints"
    assert {path.name: step_of(path) for path in kept.glob("*.ckpt")}["last.ckpt"] == 2
    assert not list(kept.glob(".*.tmp"))


def test_what_a_killed_run_left_unfinished_is_gone(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".last.ckpt.77.tmp").write_bytes(bytes(100))
    run(tmp_path, SaveCheckpoints())
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [".lock", "last.ckpt"]


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


@pytest.mark.parametrize(
    ("mode", "scores", "epoch"),
    [
        ("max", [0.5, 0.9, 0.9, 0.7], 2),
        ("max", [0.5, 0.9, 0.9, 0.95, 0.9], 3),
        ("min", [0.5, 0.1, 0.3, 0.1], 3),
        ("max", [0.9, 0.8, 0.7], 0),
        ("max", [math.nan, 0.9, math.nan, 0.8, math.inf], 1),
    ],
)
def test_the_last_of_the_best_epochs_is_kept(mode, scores, epoch):
    best = Best("val/score", mode, "best.ckpt")
    taken = [i for i, score in enumerate(scores) if best.take(score, i)]
    assert taken[-1] == epoch
    assert best.value == scores[epoch]


def test_weights_that_were_not_validated_get_no_score(tmp_path):
    """A run of `max_steps` ends within an epoch, and the score of the last validation is still there."""
    options = {"callbacks": [SaveCheckpoints()], "enable_checkpointing": True, "max_steps": 3}
    trainer(tmp_path, **options).fit(Scores([0.5, 0.5]), torch.utils.data.DataLoader(torch.zeros(2)))
    assert step_of(tmp_path / "checkpoints" / "best.ckpt") == 2
    assert step_of(tmp_path / "checkpoints" / "last.ckpt") == 3


def test_what_was_trained_is_kept_when_a_validation_fails(tmp_path):
    """It continues with the validation that is missing."""

    def fit(scores, last=None):
        task = Scores(scores)
        fitter = trainer(
            tmp_path, callbacks=[SaveCheckpoints(), ExactResume()], enable_checkpointing=True, max_epochs=3
        )
        fitter.fit(task, ckpt_path=last)
        return fitter.callback_metrics["val/score"], task.weight.item()

    last = tmp_path / "checkpoints" / "last.ckpt"
    with pytest.raises(ValueError, match="unreadable"):
        fit([0.5, "unreadable"])
    assert step_of(last) == 2
    assert fit([None, 0.9, 0.5], last) == (0.5, pytest.approx(0.7))
    assert step_of(tmp_path / "checkpoints" / "best.ckpt") == 2


def scored(folder, scores, last=None, *callbacks):
    """State of the last checkpoint, and of best.ckpt, after epochs that score as given."""
    options = {"callbacks": [SaveCheckpoints(), ExactResume(), *callbacks], "enable_checkpointing": True}
    trainer(folder, max_epochs=len(scores), **options).fit(Scores(scores), ckpt_path=last)
    states = [
        read(folder / "checkpoints" / name)["callbacks"]["SaveCheckpoints"] for name in ("last.ckpt", "best.ckpt")
    ]
    return [(state["val/score"], state["epochs"]["val/score"]) for state in states]


def test_a_best_whose_file_is_damaged_is_not_the_best(tmp_path):
    scored(tmp_path, [0.875, 0.5])
    os.truncate(tmp_path / "checkpoints/best.ckpt", 1000)
    with pytest.warns(UserWarning, match=r"the best val/score was 0\.875 of epoch 1, but .* is missing or damaged"):
        found = scored(tmp_path, [None, None, 0.25, 0.125], tmp_path / "checkpoints/last.ckpt")
    assert found == [(0.25, 3), (0.25, 3)]
    assert step_of(tmp_path / "checkpoints/best.ckpt") == 3


class Deletes(Callback):
    """Deletes best.ckpt before the second epoch."""

    def on_train_epoch_start(self, trainer, *args):
        if trainer.current_epoch == 1:
            os.remove(f"{trainer.checkpoint_callback.dirpath}/best.ckpt")


def test_a_best_whose_file_is_deleted_while_the_run_trains_is_not_the_best(tmp_path):
    with pytest.warns(UserWarning, match=r"the best val/score was 0\.875 of epoch 1, but .* is missing or damaged"):
        assert scored(tmp_path, [0.875, 0.5, 0.25], None, Deletes()) == [(0.5, 2), (0.5, 2)]


def test_a_best_of_epochs_that_a_resumed_run_does_not_have_is_not_its_best(tmp_path):
    scored(tmp_path, [0.5])
    early = shutil.copy(tmp_path / "checkpoints/last.ckpt", tmp_path / "early.ckpt")
    scored(tmp_path, [None, 0.875], early)
    with pytest.warns(UserWarning, match=r"was 0\.5 of epoch 1, but .* is that of epoch 2, 0\.875"):
        assert scored(tmp_path, [None, 0.25, 0.125], early) == [(0.25, 2), (0.25, 2)]


def test_a_best_whose_other_name_could_not_be_written_is_found_again(tmp_path, monkeypatch):
    """best.ckpt was replaced, and last.ckpt was not."""

    written = iter([True, False])

    def link(path, other):
        if not next(written):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(other))
        files.link(path, other)

    with monkeypatch.context() as patch:
        patch.setattr(module, "link", link)
        with pytest.raises(linvit.UserError, match=r"last\.ckpt' could not be saved"):
            scored(tmp_path, [0.5, 0.875, 0.25])
    with pytest.warns(UserWarning, match=r"was 0\.5 of epoch 1, but .* is that of epoch 2, 0\.875"):
        found = scored(tmp_path, [None, 0.875, 0.25], tmp_path / "checkpoints/last.ckpt")
    assert found == [(0.875, 2), (0.875, 2)]


def test_a_metric_that_nobody_logs_is_a_user_error(tmp_path):
    with pytest.raises(linvit.UserError, match=r"checkpoint.monitor must be one of val/score; got 'val/scores'"):
        trainer(tmp_path, callbacks=[SaveCheckpoints("val/scores")], enable_checkpointing=True, max_epochs=1).fit(
            Scores([0.5])
        )
