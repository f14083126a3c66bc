"""TensorBoard and a table always, others beside them."""

import csv
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from linvit.runs.loggers import CsvLogger, RunTensorBoardLogger, run_loggers
from tests.cli.runs import QUICKSTART, events, linvit, tiny


@pytest.mark.parametrize("form", ["none", "list"])
def test_the_run_folder_is_tensorboards_and_the_tables(tmp_path, form):
    mine = CSVLogger(tmp_path)
    found = run_loggers({"none": [], "list": [mine]}[form], tmp_path / "quickstart", None, None)
    assert [type(logger) for logger in found[:2]] == [RunTensorBoardLogger, CsvLogger]
    assert found[1].file.parent == Path(found[0].log_dir) == tmp_path / "quickstart" / "version_0"
    assert found[2:] == [mine] * (form != "none")


def test_a_folder_whose_name_is_like_a_variable_is_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HERE", "elsewhere")
    board, table = run_loggers([], tmp_path / "$HERE", None, None)
    board.log_metrics({"loss": 1.0}, 0)
    assert Path(board.log_dir) == table.file.parent == tmp_path / "$HERE" / "version_0"
    assert [path.name for path in tmp_path.iterdir()] == ["$HERE"]


def test_a_continued_run_goes_on_in_its_folder(tmp_path):
    board, table = run_loggers([], tmp_path / "quickstart", "version_3", 70)
    assert Path(board.log_dir) == table.file.parent == tmp_path / "quickstart" / "version_3"
    assert table.purge_step == 70
    assert str(board.version) == table.version == "3"  # the bar shows different ones of all loggers side by side


def test_tensorboard_shows_curves_by_the_names_of_the_table(run):
    with (run.folder / "metrics.csv").open(newline="") as file:
        columns = {*csv.DictReader(file).fieldnames} - {"step"}
    tags = {*events(run.folder)}
    assert tags - {"hp_metric"} == columns
    assert {tag for tag in tags if tag.startswith("train/")} == {"train/loss"}


def test_a_disk_that_refuses_the_logs_ends_the_run_and_leaves_its_checkpoint(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", refuse)
    done = linvit("fit", f"--config={QUICKSTART}", *tiny(), cwd=tmp_path)
    assert done.code == 2
    assert "a file could not be written: [Errno 28] No space left on device" in done.err


def test_a_folder_that_was_renamed_is_not_made_again(tmp_path):
    """Neither by a table whose first row comes later, nor by a new file of events."""
    board, table = run_loggers(None, tmp_path / "quickstart", None, None)
    folder = Path(board.log_dir)
    folder.rename(tmp_path / "elsewhere")
    table.log_metrics({"train/loss": 1.0}, 0)
    with pytest.raises(FileNotFoundError):
        table.save()
    with pytest.raises(ValueError, match="not supported") as error:  # as Lightning calls any error
        board.log_metrics({"train/loss": 1.0}, 0)
    assert isinstance(error.value.__cause__, FileNotFoundError)
    assert not folder.exists()
