"""TensorRunTensorBoardLogger and a table always; services by key, and none imported that is not asked for."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

import linvit as package
from linvit.runs import loggers as module
from linvit.runs.loggers import CsvLogger, RunTensorBoardLogger, check_loggers, run_loggers
from tests.cli.runs import QUICKSTART, events, flags, linvit, tiny

MISSING = {"wandb": "WandbLogger", "mlflow": "MLFlowLogger"}


@pytest.mark.parametrize("given", [None, True, "wandb", ["wandb"]])
def test_the_run_folder_is_tensorboards_and_the_tables(tmp_path, given, monkeypatch):
    made = []
    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", lambda **options: made.append(options) or "wandb")
    found = run_loggers(given, tmp_path / "quickstart", None, None)
    assert [type(logger) for logger in found[:2]] == [RunTensorBoardLogger, CsvLogger]
    assert found[1].file.parent == Path(found[0].log_dir) == tmp_path / "quickstart" / "version_0"
    if given in (None, True):
        assert len(found) == 2
    else:
        assert found[2:] == ["wandb"]
        assert made[0]["name"] == "quickstart/version_0"


def test_a_continued_run_goes_on_in_its_folder(tmp_path):
    board, table = run_loggers(None, tmp_path / "quickstart", "version_3", 70)
    assert Path(board.log_dir) == table.file.parent == tmp_path / "quickstart" / "version_3"
    assert table.purge_step == 70
    assert str(board.version) == table.version == "3"  # the bar shows different ones of all loggers side by side


def test_a_run_folder_may_have_been_renamed(tmp_path):
    board, table = run_loggers(None, tmp_path / "quickstart", "best_so_far", 70)
    assert Path(board.log_dir) == table.file.parent == tmp_path / "quickstart" / "best_so_far"


def test_loggers_that_are_given_take_the_place(tmp_path):
    mine = CSVLogger(tmp_path)
    assert run_loggers(mine, tmp_path, None, None) == [mine]
    assert run_loggers([mine], tmp_path, None, None) == [mine]


@pytest.mark.parametrize("key", MISSING)
@pytest.mark.parametrize("form", ["{}", "[{}]"])
def test_a_missing_package_is_told_before_anything_starts(tmp_path, key, form, monkeypatch):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    for value in (form.format(key), form.format(f"{{class_path: lightning.pytorch.loggers.{MISSING[key]}}}")):
        done = linvit("fit", f"--config={QUICKSTART}", *tiny(), *flags(trainer__logger=value), cwd=tmp_path)
        assert done.code == 2
        assert f"{MISSING[key]} needs the package '{key}': pip install {key}" in done.err
        assert not list(tmp_path.iterdir())


def test_an_unknown_key():
    with pytest.raises(package.UserError, match=r"must be one of wandb, mlflow, .* got 'wandbb'. Did you mean 'wandb'"):
        check_loggers("wandbb")


TRAP = """
import sys, pathlib
frame = sys._getframe(1)
while "importlib" in frame.f_code.co_filename:
    frame = frame.f_back
with pathlib.Path(__file__).with_name("importers").open("a") as file:
    print(__name__, frame.f_globals["__name__"], file=file)
"""


def test_what_is_not_asked_for_is_not_imported(tmp_path):
    """The services are installed here, as modules that tell who imports them. timm tries W&B when it is imported."""
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(TRAP)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "linvit", "fit", f"--config={QUICKSTART}", *tiny()]
    short = flags(trainer__max_epochs=1, trainer__limit_train_batches=1, trainer__limit_val_batches=1)
    done = subprocess.run([*command, *short], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    subprocess.run([sys.executable, "-c", "import wandb, mlflow"], env=environment, check=True)
    importers = (tmp_path / "importers").read_text().splitlines()
    assert set(importers) - {"wandb timm.utils.summary"} == {"wandb __main__", "mlflow __main__"}  # the second command


def test_tensorboard_shows_loss_and_score_first(run):
    """It sorts groups of curves by name: what stands before the first slash."""
    groups = sorted({tag.partition("/")[0] for tag in events(run.folder)})
    assert groups == ["train", "val", "watch"]
    assert sorted(tag for tag in events(run.folder) if tag.startswith("train/")) == ["train/loss"]


class TestARefusingDisk:
    """The run goes on, and later curves are written again."""

    def refuse(self, *_, **__):
        raise OSError(28, "No space left on device")

    def test_the_table(self, tmp_path, monkeypatch):
        table = CsvLogger(tmp_path)
        for step in range(4):
            with monkeypatch.context() as patch:
                if step == 3:  # the row of step 2 is written
                    patch.setattr(csv.DictWriter, "writerow", self.refuse)
                    with pytest.warns(UserWarning, match=r"metrics.csv' could not be written, .*: No space left"):
                        table.log_metrics({"loss": 0.5}, step)
                else:
                    table.log_metrics({"loss": 0.5}, step)
        table.finalize("success")
        assert [row["step"] for row in csv.DictReader(table.file.open(newline=""))] == ["0", "1", "3"]

    def test_tensorboard(self, tmp_path, monkeypatch):
        board = RunTensorBoardLogger(tmp_path / "quickstart")
        board.log_metrics({"train/loss": 0.5}, 0)
        board.experiment.flush()
        with monkeypatch.context() as patch:
            patch.setattr(type(board.experiment), "add_scalar", self.refuse)
            with pytest.warns(UserWarning, match="TensorBoard's curves could not be written to .*: No space left"):
                board.log_metrics({"train/loss": 0.5}, 1)
        board.log_metrics({"train/loss": 0.5}, 2)
        board.finalize("success")
        monkeypatch.setattr(module.time, "monotonic", lambda: 1e12)
        board.log_metrics({"train/loss": 0.5}, 3)
        board.finalize("success")
        assert [step for step, _ in events(Path(board.log_dir))["train/loss"]] == [0, 3]

    def test_other_mistakes_are_raised(self, tmp_path):
        with pytest.raises(ValueError, match="not supported"):
            RunTensorBoardLogger(tmp_path, "quickstart").log_metrics({"train/loss": "x"}, 0)
