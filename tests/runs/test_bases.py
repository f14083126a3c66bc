"""Configurations that start from others."""

from pathlib import Path

import pytest

from linvit import UserError
from linvit.cli.options import configs, with_bases
from linvit.io.plain_text import in_shell
from linvit.registry.model_info import CONFIGS
from tests.cli.runs import linvit


@pytest.fixture
def write(tmp_path):
    """Writes a configuration; returns its path."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return str(path)

    return write


def test_bases_come_first_each_once_in_order(write):
    low, high = write("base/low.yaml", "seed_everything: 1"), write("base/high.yaml", "base: low.yaml")
    other = write("other.yaml", "trainer: {}")
    own = write("run.yaml", "base: [base/high.yaml, other.yaml]")
    assert with_bases(["fit", "--config", own, "--data.img_size=8"]) == [
        *("fit", "--config", low, "--config", high, "--config", other, "--config", own, "--data.img_size=8"),
        "--base=null",
    ]
    assert with_bases([f"--config={high}"]) == ["--config", low, "--config", high, "--base=null"]


@pytest.mark.parametrize("name", ["-mine", "run:mine"])
def test_a_path_is_no_option_and_no_saved_configuration(write, name, monkeypatch):
    file = write(f"{name}.yaml", "trainer: {max_epochs: 3}")
    monkeypatch.chdir(Path(file).parent)
    assert in_shell(Path(file)) == f"./{name}.yaml"
    assert with_bases(["--config", f"./{name}.yaml"]) == ["--config", f"./{name}.yaml"]


def test_the_files_that_were_named(write):
    assert configs(["fit", "--config", "a.yaml", "--model.lr=1", "--config", "b.yaml"]) == ["a.yaml", "b.yaml"]
    assert configs(["fit", "--config", "a.yaml", "--config=b.yaml"]) == ["a.yaml", "b.yaml"]
    assert configs(["fit", "--config=a.yaml", "--config", "b.yaml"]) == ["a.yaml", "b.yaml"]
    assert configs(["fit", "-c", "a.yaml"]) == ["a.yaml"]


def test_names_become_files(write):
    own = write("run.yaml", "base: base/imagenet/deit")
    assert with_bases(["-c", "base/strategy/ddp"]) == ["--config", str(CONFIGS / "base/strategy/ddp.yaml")]
    deit, ddp = str(CONFIGS / "base/imagenet/deit.yaml"), str(CONFIGS / "base/strategy/ddp.yaml")
    assert with_bases([f"--config={own}", "--config", "base/strategy/ddp"]) == [
        *("--config", deit, "--config", own, "--config", ddp, "--base=null")
    ]


def test_a_missing_base_is_named(write):
    own = write("run.yaml", "base: ../nowhere.yaml")
    with pytest.raises(UserError, match=r"run.yaml' starts from .*nowhere.yaml', which does not exist"):
        with_bases(["--config", own])


def test_a_file_that_is_its_own_base_is_read_once(write):
    first, second = write("first.yaml", "base: second.yaml"), write("second.yaml", "base: first.yaml")
    assert with_bases(["--config", first]) == ["--config", second, "--config", first, "--base=null"]


def test_a_base_of_several_files_is_read_once(write):
    """Twice at each of 25 levels would be 2^25 readings."""
    names = [write("level_0.yaml", "seed_everything: 1")]
    for level in range(1, 26):
        for side in "ab":
            bases = names[-1:] if level == 1 else [f"level_{level - 1}{other}.yaml" for other in "ab"]
            names.append(write(f"level_{level}{side}.yaml", f"base: [{', '.join(bases)}]"))
    top = write("top.yaml", "base: [level_25a.yaml, level_25b.yaml]")
    read = with_bases(["--config", top])
    assert read[1:-1:2] == [*names, top]


@pytest.mark.parametrize("named", ["3", "[1, 2]"])
def test_a_base_that_is_no_file_name_is_refused(write, named):
    with pytest.raises(UserError, match="must be a file or a list of files"):
        with_bases(["--config", write("run.yaml", f"base: {named}")])


@pytest.mark.parametrize("text", ["a: [", "just words"])
def test_what_is_no_configuration_is_left_to_the_parser(write, text):
    own = write("run.yaml", text)
    assert with_bases(["--config", own]) == ["--config", own]


def test_what_a_file_says_wins_key_by_key_and_the_saved_configuration_stands_alone(write, tmp_path):
    write(
        "base.yaml",
        "trainer: {max_epochs: 1, limit_train_batches: 1, limit_val_batches: 1}\n"
        "data: {class_path: linvit.data.ClassificationData, init_args: {img_size: 32, num_workers: 0, "
        "augmentation: {hflip: 0.25}}}\n"
        "model: {class_path: linvit.tasks.ClassificationTask, "
        "init_args: {backbone: deit_nano, lr: 0.25, min_lr: 0.125}}",
    )
    own = write(
        "own.yaml", "base: base.yaml\nmodel: {init_args: {lr: 0.5}}\ndata: {init_args: {augmentation: {zoom: 0.125}}}"
    )
    done = linvit("fit", "--config", own, "--trainer.default_root_dir=runs", cwd=tmp_path)
    assert done.code == 0, done.err
    saved = (tmp_path / "runs/own/version_0/config.yaml").read_text()
    for line in ("lr: 0.5", "min_lr: 0.125", "hflip: 0.25", "zoom: 0.125", "base: null"):
        assert line in saved
    again = linvit("validate", "--config", "runs/own/version_0/config.yaml", "--untrained", cwd=tmp_path)
    assert again.code == 0, again.err
