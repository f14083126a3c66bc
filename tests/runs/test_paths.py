"""Names and places of runs."""

from pathlib import Path
from unittest import mock

import pytest

import linvit
from linvit.io.files import check_writable
from linvit.registry.model_info import CONFIGS
from linvit.runs.folder import run_config, run_name, run_of_checkpoint
from linvit.runs.trainer import SaveRunConfig


@pytest.mark.parametrize(
    ("configs", "name"),
    [
        (["configs/quickstart.yaml"], "quickstart"),
        (["imagenet/swin_tiny"], "swin_tiny"),
        (["other.yaml", "/a/b/deit.linear.yaml"], "deit.linear"),
        (["mine.yaml", "base/strategy/fsdp"], "mine"),
        (["quickstart", "configs/base/strategy/ddp.yaml"], "quickstart"),
        (["base/imagenet/deit", "base/strategy/ddp"], "ddp"),
        (["checkpoints/quickstart/version_0/config.yaml"], "quickstart"),
        (["checkpoints/quickstart/version_12/config_from_step_9.yaml"], "quickstart"),
        ([Path("version_1.yaml")], "version_1"),
        ([], "unnamed"),
    ],
    ids=str,
)
def test_a_run_is_named_after_its_last_config_that_is_no_part_of_others(configs, name, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    assert run_name(configs) == name


def test_a_config_inside_its_run_folder_keeps_the_name(tmp_path, monkeypatch):
    folder = tmp_path / "mine" / "version_3"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert run_name(["config.yaml"]) == "mine"


@pytest.mark.parametrize(
    ("checkpoint", "folder"),
    [
        ("/runs/quickstart/version_0/checkpoints/last.ckpt", "/runs/quickstart/version_0"),
        ("/runs/quickstart/checkpoints/last.ckpt", None),
        ("/runs/version_0/last.ckpt", None),
        ("/runs/my_version_0/checkpoints/last.ckpt", None),
    ],
)
def test_the_run_of_a_checkpoint(checkpoint, folder):
    assert run_of_checkpoint(checkpoint) == (None if folder is None else Path(folder))


def test_the_last_configuration_of_a_run_is_that_of_the_last_step(tmp_path):
    """A copy of a run's folder has times of its own."""
    assert run_config(tmp_path) == tmp_path / "config.yaml"
    for name in ("config_from_step_10.yaml", "config_from_step_9.yaml", "config_of_mine.yaml", "config.yaml"):
        (tmp_path / name).write_text("a: 1\n")
    assert run_config(tmp_path) == tmp_path / "config_from_step_10.yaml"
    again = SaveRunConfig("a: 2\n", "config_from_step_9.yaml")  # resumed from an earlier checkpoint
    again.setup(mock.Mock(log_dir=str(tmp_path), is_global_zero=True, checkpoint_callbacks=[]), mock.Mock(), "fit")
    assert run_config(tmp_path).read_text() == "a: 2\n"


def test_a_folder_below_a_file_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(linvit.UserError) as error:
        check_writable(tmp_path / "file" / "runs")
    assert f"cannot write to the output folder '{tmp_path / 'file' / 'runs'}': '{tmp_path / 'file'}': Not a" in str(
        error.value
    )
    assert "--trainer.default_root_dir" in str(error.value)
