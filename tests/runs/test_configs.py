"""Configurations are found by path, or by the name of one that comes with linvit."""

from pathlib import Path

import pytest
import yaml

from linvit import UserError
from linvit.registry.model_info import CONFIGS
from linvit.runs.configs import config_file, find, heading, text


def test_a_name_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # a folder is no configuration
    assert config_file("imagenet/swin_tiny.yaml") == CONFIGS / "imagenet" / "swin_tiny.yaml"
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
    assert str(error.value).startswith(f"configuration '{given}' is neither a name nor an existing file. Did you mean")
    assert f"{name}'? Run linvit list configs" in str(error.value)


def test_the_fields_of_a_heading():
    text = "# Paper:    Han 2023\n# Expected: not yet run; 81.2\n# words: go on\nmodel: {}\n# Command: no\n"
    assert heading(text) == {"Paper": "Han 2023", "Expected": "not yet run; 81.2", "words": "go on", "Command": "no"}
