"""What a configuration leaves to be found is a function from mapping to mapping."""

import copy

import pytest

from linvit import UserError
from linvit.runs.options import read_config, replace_options
from linvit.runs.resolve import check_epochs, find_checkpoint, find_pretrained, find_run, find_teacher


@pytest.fixture
def config(run):
    """That of a run, as `linvit fit --config quickstart` would have it again."""
    options = {"trainer.default_root_dir": str(run.root / "checkpoints"), "resume": "auto", "trainer.max_epochs": 9}
    return {**replace_options(read_config(run.config), options), "config": ["quickstart"]}


def test_nothing_is_found_where_nothing_is_named_and_no_argument_is_changed(config):
    before = copy.deepcopy(config)
    assert find_teacher(config) == find_pretrained(config) == before
    assert find_checkpoint(config, fits=True) == (before, None)
    find_run(config)
    assert config == before


def test_the_checkpoint_of_a_folder_is_the_last_to_resume_and_the_best_to_score(config, run):
    config = {**config, "ckpt_path": str(run.folder)}
    for fits, name in ((True, "last"), (False, "best")):
        found, checkpoint = find_checkpoint(config, fits)
        assert found == {**config, "ckpt_path": str(run.checkpoint(name))}
        assert str(checkpoint.path) == found["ckpt_path"]
        assert checkpoint.run == run.folder


def test_the_run_to_resume_is_the_newest_of_the_name_with_the_model(config, run):
    found, (folder, checkpoint, finished) = find_run(config)
    assert found == {**config, "resume": None, "ckpt_path": str(run.checkpoint("last"))}
    assert (folder, checkpoint.epochs, finished) == (run.folder, 2, False)
    other = replace_options(config, {"model.attention": "linear"})
    assert find_run(other) == ({**other, "resume": None}, (None, None, False))
    assert find_run(replace_options(config, {"trainer.max_epochs": 2}))[1][2]
    with pytest.raises(UserError, match="has done 2 epochs, more than 1"):
        check_epochs(replace_options(config, {"trainer.max_epochs": 1}), checkpoint)
