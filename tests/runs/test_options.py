"""Configurations as mappings: read by name, varied by options, and what runs make of them."""

import copy

import pytest

from linvit import UserError
from linvit.cli.options import read_options
from linvit.runs.options import read_config, replace_options, stage_config
from linvit.runs.run import Run

NESTED = {
    "model": {"class_path": "Task", "init_args": {"backbone": "deit_nano", "attention": None, "teacher": "x.ckpt"}}
}


def test_an_option_of_a_part_that_is_given_by_its_name_makes_it_a_mapping():
    options = {"model.backbone.depth": 2, "model.attention.name": "hydra", "model.teacher.copied": "mlp"}
    before = copy.deepcopy(NESTED)
    found = replace_options(NESTED, {**options, "trainer.max_epochs": 3, "trainer.logger.offline": True})
    assert found["model"]["init_args"] == {
        "backbone": {"name": "deit_nano", "depth": 2},
        "attention": {"name": "hydra"},
        "teacher": {"source": "x.ckpt", "copied": "mlp"},
    }
    assert found["trainer"] == {"max_epochs": 3, "logger": {"offline": True}}
    assert before == NESTED, "its argument is changed"


def test_an_option_of_a_class_that_is_given_by_its_path_makes_it_a_mapping():
    found = replace_options({"data": "Own", "trainer": {"logger": "Csv"}}, {"data.size": 3, "trainer.logger.name": "x"})
    assert found["data"] == {"class_path": "Own", "init_args": {"size": 3}}
    assert found["trainer"]["logger"] == {"class_path": "Csv", "init_args": {"name": "x"}}


def test_a_plus_adds_to_a_list_as_on_the_command_line_of_fit():
    config = {"trainer": {"callbacks": [{"class_path": "A"}], "plugins": None}}
    config = replace_options(config, {"trainer.callbacks+": "B", "trainer.plugins+": "E"})
    config = replace_options(config, {"trainer.callbacks+": ["C", "D"]})
    assert config == {"trainer": {"callbacks": [{"class_path": "A"}, "B", "C", "D"], "plugins": ["E"]}}


def test_no_stage_has_an_option_of_its_own_that_is_replaced():
    stages = [{"model.lr": 1, "model.teacher.copied": "mlp"}, {"model.teacher": "y", "trainer.max_epochs": 2}]
    found = replace_options({**NESTED, "stages": stages}, {"model.lr": 3, "model.teacher": "z"})
    assert found["stages"] == [{}, {"trainer.max_epochs": 2}]
    own = stage_config({**NESTED, "stages": stages}, stages[1])
    assert (own["stages"], own["trainer"], own["model"]["init_args"]["teacher"]) == (None, {"max_epochs": 2}, "y")


def test_a_mapping_is_read_as_a_command_line_is():
    flags = [
        "--model.attention=focused",
        "--model.backbone.name=deit_tiny",
        "--trainer.max_epochs=3",
        "--data.mean=null",
    ]
    options = {
        "model.attention": "focused",
        "model.backbone.name": "deit_tiny",
        "trainer.max_epochs": 3,
        "data.mean": None,
    }
    config = read_config("quickstart", options)
    assert config == read_options("fit", ["--config=quickstart", *flags])
    assert config["config"] == ["quickstart"]
    assert Run.from_config(config).config == config


def test_of_several_configurations_the_last_wins(tmp_path):
    (tmp_path / "own.yaml").write_text("base: quickstart\ntrainer: {max_epochs: 4}\n", encoding="utf-8")
    part = {"trainer": {"max_epochs": 7}}
    config = read_config([tmp_path / "own.yaml", "base/strategy/ddp", part])
    assert (config["trainer"]["max_epochs"], config["base"]) == (7, None)
    assert config["config"] == [str(tmp_path / "own.yaml"), "base/strategy/ddp"]
    again = read_config(config)
    assert again == config


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model.atention", "linear", r"'atention' is not accepted\. Did you mean .*model\.attention\?"),
        ("trainer.max_epoch", 3, r"'max_epoch'\. Did you mean .*trainer\.max_epochs\?"),
        ("trainer.max_epochs", "three", r'"trainer.max_epochs":\s+Expected a int'),
        ("epochs", 3, r"'epochs' is not accepted\. Did you mean .*trainer\.max_epochs\?"),
        ("seed_everything", -1, "seed_everything must"),
    ],
)
def test_a_wrong_option_is_named(option, value, message):
    with pytest.raises(UserError, match=message):
        read_config("quickstart", {option: value})
