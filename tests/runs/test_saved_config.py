"""The configuration of a run that the user named is data: what it names is not imported."""

import sys

import pytest
import yaml

from linvit import UserError
from linvit.cli import _prepare
from linvit.cli.options import read_options
from linvit.data import ClassificationData
from linvit.runs.options import read_config
from linvit.runs.run import Run
from linvit.runs.saved_config import saved_config
from tests.cli.runs import QUICKSTART, tiny
from tests.hostile import runs

REFUSED = [name for name in runs.CHANGES if name.startswith(("data", "model", "attention", "backbone", "kernel"))]


@pytest.fixture(scope="module")
def config():
    return Run(read_options("fit", [f"--config={QUICKSTART}", *tiny()])).config


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A run's folder, in which the process is, and in which modules are looked for."""
    path = tmp_path / "mine" / "version_0"
    path.mkdir(parents=True)
    runs.write_module(path, tmp_path / "mark")
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(path)
    yield path
    assert not (tmp_path / "mark").exists()
    assert runs.NAME not in sys.modules


def test_no_configuration_of_a_run_imports_what_it_names(config, folder):
    for name, text in runs.configurations(config):
        (folder / "config.yaml").write_text(text, encoding="utf-8")
        if name in REFUSED or name == "tag":
            with pytest.raises(UserError, match=r"may run code of the run's author|cannot be read"):
                saved_config(folder / "config.yaml")
        else:
            found = saved_config(folder / "config.yaml", trains=False)
            assert runs.NAME not in str(found), name
            assert found["data"] == config["data"], name


def test_what_is_left_is_the_run(config, folder):
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    run = Run.from_config(read_config(folder))
    assert run.config == {**config, "config": [str(folder / "config.yaml")]}
    assert isinstance(run.data, ClassificationData)


def test_options_that_are_left_out_are_named_to_who_trains(config, folder):
    changed = {**config, "trainer": {**config["trainer"], "logger": runs.CALL, "max_epochs": 7, "profiler": "a_file"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    with pytest.warns(UserWarning, match=r"left out: trainer.logger, trainer.profiler in .* give --config"):
        found = saved_config(folder / "config.yaml")
    assert found["trainer"]["max_epochs"] == 7
    assert "logger" not in found["trainer"]


class Own(ClassificationData):
    """Of this module, which the program has imported."""


def test_a_class_that_the_program_has_imported_is_taken(config, folder):
    changed = {**config, "data": {**config["data"], "class_path": f"{Own.__module__}.Own"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    assert isinstance(Run.from_config(read_config(folder), "test", quiet=True).data, Own)


@pytest.mark.parametrize(
    ("known", "command"),
    [
        (False, "evaluate RUN --sets clean=photos"),
        (False, "predict --model RUN photos"),
        (False, "linearize --teacher=RUN --model.attention=focused --trainer.max_epochs=3"),
        (False, "compare --report RUN"),
        (True, "fit --config quickstart"),
        (True, "analyze --ckpt_path RUN --config mine.yaml"),
        (True, "predict --model RUN photos --allow my_module:Mine"),
        (True, "linearize --teacher=RUN --model.attention={name:my_module:Mine}"),
        (True, "linearize --teacher=RUN --trainer.callbacks+=my_module.Mine"),
    ],
)
def test_modules_of_the_current_folder_are_known_to_commands_that_name_code(monkeypatch, known, command):
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    _prepare(command.split())
    assert ("" in sys.path) == known
