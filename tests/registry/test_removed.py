"""Removed options in configurations and checkpoints: left out where they did nothing, else answered in one line."""

import re

import pytest
import torch
import yaml

from linvit import UserError
from linvit.cli.options import read_options
from linvit.registry.removed import CONFIGS, OPTIONS, Removed, without_removed
from linvit.runs.configs import names
from linvit.runs.options import read_config
from linvit.tasks.safe_loading import check_content
from tests.cli.runs import QUICKSTART, linvit, tiny

OURS = "linvit.data.DiagnosticData"


@pytest.fixture(scope="module")
def config():
    """The configuration of a run of 0.2: every option is in it."""
    found = {**read_config("diagnostics/recall")}
    del found["config"]
    found["data"]["init_args"] |= {"distractors": 0, "distance": 1}
    return found


@pytest.fixture
def folder(config, tmp_path):
    def write(**changes):
        path = tmp_path / "recall" / "version_0"
        path.mkdir(parents=True)
        options = {**config["data"]["init_args"], **changes}
        content = {**config, "data": {**config["data"], "init_args": options}}
        (path / "config.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        return path

    return write


def test_a_run_of_before_is_read(folder, config):
    kept = {key: value for key, value in config["data"]["init_args"].items() if not key.startswith("dist")}
    assert read_config(folder())["data"]["init_args"] == kept


@pytest.mark.parametrize("change", [{"distractors": 96}, {"distance": 4}, {"source": "counting"}], ids=str)
def test_what_made_a_difference_is_answered_in_one_line(change, folder):
    run = folder(**change)
    ((key, value),) = change.items()
    with pytest.raises(UserError, match=rf"config.yaml': data\.{key}={value!r}\. .* was removed\. Use ") as error:
        read_config(run / "config.yaml")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options", [["--data.distractors=96"], ["--config", "{data: {init_args: {distractors: 0}}}"]])
def test_the_command_line_and_parts_of_configurations_are_answered(options, tmp_path):
    if options[0] == "--config":
        (tmp_path / "part.yaml").write_text(options[1], encoding="utf-8")
        options = ["--config", str(tmp_path / "part.yaml")]
    with pytest.raises(UserError, match=r"^--data\.distractors was removed\. Use data\.pairs[^\n]*\nSee"):
        read_options("fit", ["--config=diagnostics/recall", *options], see="\nSee")
    assert (
        "distance was removed"
        not in linvit("fit", f"--config={QUICKSTART}", *tiny(), "--data.distance=3", cwd=tmp_path).err
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_a_removed_configuration_is_answered(name, tmp_path):
    for command in (["fit", "--config", name], ["compare", name], ["compare", f"configs/{name}.yaml"]):
        assert f"It was removed. {CONFIGS[name]}." in linvit(*command, cwd=tmp_path).err
    assert name not in names()


def test_rows_name_what_to_use():
    for text in (*CONFIGS.values(), *(row.instead for row in OPTIONS.values())):
        assert re.fullmatch(r"Use [^\n]{10,200}[^.\n]", text)


ROWS = {
    "model.old": Removed(None, "Use new", "ClassificationTask"),
    "trainer.callbacks.every": Removed(1, "Use new", "Callback"),
    "checkpoint.tries": Removed(3, "Use new"),
}


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({"data": {"class_path": OURS, "init_args": {"distance": 1, "pairs": 2}}}, {"init_args": {"pairs": 2}}),
        ({"data": {"class_path": "DiagnosticData", "init_args": {"distance": 1}}}, {"init_args": {}}),
        ({"data": {"class_path": "theirs.DiagnosticData", "init_args": {"distance": 1}}}, None),
        ({"data": {"class_path": "linvit.data.ClassificationData", "init_args": {"source": "copy"}}}, None),
        ({"data": {"init_args": {"distance": 1}}}, None),
        ({"trainer": {"callbacks": [{"class_path": "linvit.x.Callback", "init_args": {"every": 1}}]}}, {}),
        ({"checkpoint": {"tries": 3}}, {}),
    ],
)
def test_rows_are_of_a_class(config, kept, monkeypatch):
    for key, row in ROWS.items():
        monkeypatch.setitem(OPTIONS, key, row)
    found = without_removed(config, "'a file'")
    if "data" in config:
        config = {"data": {**config["data"], **(kept or {})}}
    elif "trainer" in config:
        config["trainer"]["callbacks"][0]["init_args"] = kept
    else:
        config = {"checkpoint": kept}
    assert found == config


@pytest.mark.parametrize(
    "config",
    [{"checkpoint": {"tries": 4}}, {"trainer": {"callbacks": [{"class_path": "Callback", "init_args": {"every": 2}}]}}],
)
def test_other_values_are_refused(config, monkeypatch):
    for key, row in ROWS.items():
        monkeypatch.setitem(OPTIONS, key, row)
    with pytest.raises(UserError, match=r"^'a file': [\w.]+=\d\. [\w.]+ was removed\. Use new$"):
        without_removed(config, "'a file'")


def test_a_checkpoint_of_before_is_opened(monkeypatch):
    monkeypatch.setitem(OPTIONS, "model.old", Removed(None, "Use new"))
    content = {"state_dict": {"a": torch.zeros(1)}, "pytorch-lightning_version": "2.5.0"}
    found = check_content({**content, "hyper_parameters": {"old": None, "lr": 1.0}}, "mine.ckpt")
    assert found == {**content, "hyper_parameters": {"lr": 1.0}}
    with pytest.raises(UserError, match=r"^'mine.ckpt': model\.old=2\. model\.old was removed\. Use new$"):
        check_content({**content, "hyper_parameters": {"old": 2}}, "mine.ckpt")
