"""Checkpoints are read without running what is in them, and what is wrong with one is said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import linvit
from linvit.runs.checkpoint import Checkpoint, check_same_model, read_checkpoint
from linvit.runs.options import read_config, replace_options
from linvit.runs.resolve import find_pretrained, find_teacher
from linvit.runs.run import Run
from tests.cli.runs import QUICKSTART, tiny
from tests.cli.runs import linvit as command

VERSION = {"pytorch-lightning_version": "2.6.6"}


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def error_of(path):
    with pytest.raises(linvit.UserError) as error:
        read_checkpoint(path)
    text = str(error.value)
    assert str(path) in text
    return text


def whole(path):
    """A checkpoint of one megabyte."""
    torch.save(
        VERSION | {"hyper_parameters": {"lr": 1.0}, "state_dict": {"w": torch.ones(2**18)}, "global_step": 3}, path
    )
    return path


def changed(run, folder, options):
    """The last checkpoint of a run with other options."""
    content = torch.load(run.checkpoint("last"), weights_only=True)
    content["hyper_parameters"] |= options
    torch.save(content, folder / "changed.ckpt")
    return folder / "changed.ckpt"


@pytest.mark.parametrize("share", [0.999, 0])
def test_a_truncated_one(tmp_path, share):
    path = whole(tmp_path / "x.ckpt")
    size = int(share * path.stat().st_size)
    path.write_bytes(path.read_bytes()[:size])
    text = error_of(path)
    assert f"is incomplete or not a checkpoint ({size} bytes)" in text
    assert f"look for other checkpoints in {tmp_path}" in text


@pytest.mark.parametrize("content", [b"no checkpoint at all\n", b"PK\x03\x04 no archive"], ids=["text", "zip"])
def test_a_file_of_another_kind(tmp_path, content):
    path = tmp_path / "x.ckpt"
    path.write_bytes(content)
    assert "not a checkpoint" in error_of(path)


@pytest.mark.parametrize(
    ("content", "holds"),
    [
        ({"model": {}, "optimizer": {}}, "it holds model, optimizer"),
        (torch.zeros(3), "it holds Tensor"),
    ],
    ids=["other keys", "tensor"],
)
def test_one_of_another_program(tmp_path, content, holds):
    path = tmp_path / "x.ckpt"
    torch.save(content, path)
    text = error_of(path)
    assert "is not a checkpoint of a linvit run" in text
    assert holds in text


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_nothing_in_it_is_run(tmp_path, old, hidden):
    path, mark = tmp_path / "x.ckpt", tmp_path / "mark"
    bomb = {"hyper_parameters": {"a": Bomb(mark)}, "state_dict": {}} if hidden else Bomb(mark)
    torch.save(bomb, path, _use_new_zipfile_serialization=not old)
    assert "is not opened" in error_of(path) or "not a checkpoint" in error_of(path)
    assert not mark.exists()
    torch.load(path, weights_only=False)
    assert mark.exists(), "the bomb is a dud, so this shows nothing"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (nn.Linear(2, 3, bias=False), "bias is missing"),
        (nn.Linear(2, 4), "weight is (4, 2), not (3, 2); bias is (4,), not (3,)"),
        (
            nn.BatchNorm1d(3),
            "running_mean is unknown; running_var is unknown; num_batches_tracked is unknown, and 1 more",
        ),
    ],
    ids=["missing", "shape", "unknown"],
)
def test_another_model_is_a_user_error(weights, message):
    with pytest.raises(linvit.UserError) as error:
        check_same_model("x.ckpt", weights.state_dict(), nn.Linear(2, 3), "backbone a", "backbone b")
    start = (
        "checkpoint 'x.ckpt' belongs to another model; it is of backbone a, and the configuration is of backbone b: "
    )
    assert str(error.value).startswith(start)
    assert message in str(error.value)


def test_one_that_cannot_be_resumed_says_what_it_lacks(run, tmp_path):
    missing = ["global_step", "loops"]
    path = tmp_path / "x.ckpt"
    content = torch.load(run.checkpoint("last"), weights_only=True)
    torch.save({name: value for name, value in content.items() if name not in missing}, path)
    with pytest.raises(linvit.UserError) as error:
        read_checkpoint(path, resumed=True)
    assert f"cannot be resumed: it has no {', '.join(missing)}" in str(error.value)
    assert f"--model.pretrained={path}" in str(error.value)


def test_classes_of_one_name_are_at_their_places(run):
    checkpoint = Checkpoint(run.checkpoint("best"), resumed=False)
    checkpoint._options = {"class_names": ["crane", "hen", "crane"]}  # a bird and a machine, as in ImageNet
    with pytest.warns(UserWarning, match="1 of 3 classes have other names in the data .* such as 'chicken' for 'hen'"):
        checkpoint._check_names(["crane", "chicken", "crane"], "")
    with pytest.raises(linvit.UserError, match="'crane' is number 2 of it, and 1 of the data"):
        checkpoint._check_names(["crane", "crane", "hen"], "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "x"}, "lr must be a number above 0; got 'x'"),
        ({"no_decay": [{}]}, "no_decay must be a list of parts of names"),
        ({"drop_path_rate": [1]}, "drop_path_rate must be a number at least 0"),
        ({"img_size": 10**20}, "build no model"),
        ({"backbone": {"name": "deit_nano", "depth": 3}}, "belongs to another model"),
    ],
    ids=str,
)
def test_options_of_other_kinds_are_refused_where_the_model_is_built(run, tmp_path, options, message):
    path = changed(run, tmp_path, options)
    with pytest.raises(linvit.UserError) as error:
        Run.from_config(read_config(run.config, {"ckpt_path": str(path)}), "predict").trained()
    assert message in str(error.value)
    assert "\n" not in str(error.value).partition("\nTo start")[0]


CALL = {"class_path": "os.system", "init_args": {"command": "touch PWNED"}}


class TestWhatAFileHoldsIsNotBuilt:
    """By construction: the door that refuses such options stands open here."""

    @pytest.fixture(params=[CALL, json.dumps(CALL)], ids=["mapping", "text"])
    def evil(self, run, tmp_path, monkeypatch, request):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("linvit.tasks.safe_loading.not_plain", lambda *_, **__: None)
        monkeypatch.setattr("linvit.runs.parser.not_plain", lambda *_, **__: None)
        return changed(run, tmp_path, {"backbone": {"name": "deit_nano", "depth": request.param}})

    def test_by_a_verb_that_takes_a_checkpoint(self, evil):
        done = command("fit", f"--config={QUICKSTART}", *tiny(), f"--ckpt_path={evil}", cwd=Path())
        assert done.code == 2
        assert "build no model: TypeError" in done.err
        assert not Path("PWNED").exists()

    def test_by_analyze(self, evil, run):
        with pytest.raises(linvit.UserError, match="build no model: TypeError"):
            Run.from_config(read_config(run.config, {"ckpt_path": str(evil)}), "predict").trained()
        assert not Path("PWNED").exists()


def test_a_configuration_builds_nothing_within_the_options_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    option = f"--model.backbone={json.dumps({'name': 'deit_nano', 'depth': CALL})}"
    done = command("fit", f"--config={QUICKSTART}", *tiny(), option, cwd=tmp_path)
    assert done.code == 2
    assert "--model.backbone holds a class_path or init_args" in done.err
    assert not Path("PWNED").exists()


def test_scoring_needs_the_weights_alone(run, tmp_path):
    content = torch.load(run.checkpoint("last"), weights_only=True)
    for name in ("optimizer_states", "loops", "lr_schedulers"):
        del content[name]
    torch.save(content, tmp_path / "x.ckpt")
    assert "loops" not in read_checkpoint(tmp_path / "x.ckpt")


def test_a_damaged_one_leads_to_the_others(run, tmp_path):
    path = tmp_path / "last.ckpt"
    content = bytearray(run.checkpoint("last").read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)
    text = error_of(path)
    assert f"'{path}' is damaged" in text
    assert f"look for other checkpoints in {tmp_path}\nTo start from" in text


@pytest.mark.parametrize(
    ("options", "name", "averaged"), [({}, "best.ckpt", False), ({"ema": True}, "best_ema.ckpt", True)], ids=str
)
def test_initial_weights_of_a_folder_are_those_of_the_best_checkpoint_of_its_run(
    run, tmp_path, options, name, averaged
):
    source = shutil.copytree(run.folder, tmp_path / "version_0")
    shutil.copy(run.checkpoint("best"), source / "checkpoints" / "best_ema.ckpt")
    pretrained = {"source": str(source), **options} if options else str(source)
    config = read_config("quickstart", {"model.pretrained": pretrained})
    found = find_pretrained(config)["model"]["init_args"]["pretrained"]
    assert config["model"]["init_args"]["pretrained"] == pretrained, "its argument is changed"
    assert found == {"source": str(source / "checkpoints" / name), "ema": averaged}


def test_the_teacher_of_a_folder_is_the_best_checkpoint_of_its_newest_run(run, tmp_path):
    names = ["runs/version_9", "runs/version_10"]
    for name in names:
        shutil.copytree(run.folder, tmp_path / name)
    source = tmp_path / names[-1].partition("/")[0]
    given = read_config("quickstart", {"model.attention": "linear", "model.teacher.source": str(source)})
    best = tmp_path / names[-1] / "checkpoints" / "best.ckpt"
    assert find_teacher(given)["model"]["init_args"]["teacher"] == {"source": str(best)}
    best.unlink()
    with pytest.raises(linvit.UserError, match=r"has no best.ckpt yet.*--model.teacher.source .*last"):
        find_teacher(given)


def test_how_to_evaluate_is_the_command_lines_unless_it_trains(tmp_path, caplog):
    config = read_config("segmentation_quickstart")
    options = config["model"]["init_args"]
    content = {"hyper_parameters": options, "state_dict": {"w": torch.ones(1)}, "ema_updates": 0}
    torch.save(VERSION | content, tmp_path / "x.ckpt")
    asked = {"model.lr": 7, "model.window": 32, "model.scales": [1, 2], "model.mirror": True}
    with caplog.at_level("INFO"):
        for fits, (window, scales) in ((False, (32, [1, 2])), (True, (None, [1.0]))):
            decided = Checkpoint(tmp_path / "x.ckpt").decide(replace_options(config, asked), fits)
            given = [decided["model"]["init_args"][name] for name in ("lr", "window", "scales", "mirror")]
            assert given == [options["lr"], window, scales, not fits]
    assert "evaluated with --model.window=32; the run had None" in caplog.text
