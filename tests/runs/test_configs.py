"""Configurations are found by path, or by the name of one that comes with linvit."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from linvit import UserError
from linvit.registry.model_info import CONFIGS
from linvit.runs.configs import config_file, find, heading, names, text
from tests.cli.runs import linvit

ROOT = Path(__file__).parents[2]


def test_the_names():
    assert {"quickstart", "imagenet/swin_tiny", "base/strategy/ddp"} <= set(names())
    assert not [name for name in names() if name.endswith(".yaml") or "\\" in name]


@pytest.mark.parametrize("name", ["imagenet/swin_tiny", "imagenet/swin_tiny.yaml"])
def test_a_name_is_found_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a folder is no configuration
    assert config_file(name) == CONFIGS / "imagenet" / "swin_tiny.yaml"
    assert config_file("quickstart") == CONFIGS / "quickstart.yaml"


def test_a_recipe_of_a_table_is_read_as_if_it_were_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "coco/pvt_large_mask_rcnn_1x"
    path = find(name)
    assert path == find(str(path)) == CONFIGS / f"{name}.yaml"  # which linvit compare hands on
    assert {**yaml.safe_load(text(path))["model"]["init_args"], "lr": 0} == {
        **{"backbone": "pvt_large", "drop_path_rate": 0, "published_batch_size": 8, "lr": 0, "warmup_lr": 1.4286e-7}
    }


def test_a_file_at_the_path_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart").touch()
    assert config_file("quickstart") == Path("quickstart")
    assert find("quickstart", tmp_path / "elsewhere") == CONFIGS / "quickstart.yaml"


@pytest.mark.parametrize(
    ("given", "name"),
    [("quikstart", "quickstart"), ("configs/quickstart.yaml", "quickstart"), ("imagenet/swin_tinny", "swin_tiny")],
)
def test_an_unknown_name(given, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        config_file(given)
    assert str(error.value).startswith(f"no configuration is called '{given}', and there is no such file. Did you mean")
    assert f"{name}'? linvit list configs names" in str(error.value)


def test_the_fields_of_a_heading():
    text = "# Paper:    Han 2023\n# Expected: not yet run; 81.2\n# words: go on\nmodel: {}\n# Command: no\n"
    assert heading(text) == {"Paper": "Han 2023", "Expected": "not yet run; 81.2", "words": "go on", "Command": "no"}


def test_a_run_by_name_in_an_empty_folder(tmp_path):
    done = linvit("fit", "--config", "quickstart", "--print_config", cwd=tmp_path)
    assert done.code == 0, done.err
    assert yaml.safe_load(done.out)["data"]["init_args"]["source"] == "digits"


def test_an_unknown_name_at_the_command(tmp_path):
    done = linvit("fit", "--config=quikstart", cwd=tmp_path)
    assert done.code == 2
    assert done.err.startswith("linvit: error: no configuration is called 'quikstart'")


@pytest.mark.slow
def test_a_wheel_brings_the_configurations(tmp_path):
    """Built from a source distribution, installed into an empty folder and asked from another one."""
    source = tmp_path / "source"
    for folder in ("src", "configs"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    build = "from setuptools import build_meta; print(build_meta.build_sdist('..'))"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", tmp_path / "installed", sdist], capture_output=True, text=True, check=True)
    (tmp_path / "empty").mkdir()
    for arguments in (["list", "configs"], ["fit", "--config", "coco/swin_tiny_mask_rcnn_1x", "--print_config"]):
        done = subprocess.run(
            [sys.executable, "-m", "linvit", *arguments],
            cwd=tmp_path / "empty",
            env={"PYTHONPATH": str(tmp_path / "installed"), "PATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["model"]["init_args"]["backbone"] == "swin_tiny"
    shipped = tmp_path / "installed" / "linvit" / "configs"
    assert {path.relative_to(shipped) for path in shipped.rglob("*.*")} == {
        path.relative_to(CONFIGS) for path in CONFIGS.rglob("*.*")
    }
