"""Commands that linvit prints: each is run as it is printed, in the folder where it was printed."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from linvit.errors import UserError
from linvit.experiments.compare.results import group
from linvit.io.files import LAST
from linvit.runs.folder import RunFolder, check_finished, find, how_to_resume
from tests.cli.runs import QUICKSTART, TINY, linvit

SHORT = {**TINY, "trainer.max_epochs": 1, "trainer.limit_train_batches": 2, "trainer.limit_val_batches": 1}
PRINTED = re.compile(r"(?<!`)\blinvit (?:fit|test|validate|export|evaluate) .*")


def fit(folder, **changed):
    """`linvit fit` of two steps."""
    options = {**SHORT, "trainer.callbacks": "null", **{name.replace("__", "."): one for name, one in changed.items()}}
    return linvit("fit", f"--config={QUICKSTART}", *(f"--{name}={one}" for name, one in options.items()), cwd=folder)


def follow(text, folder, more="2"):
    """Runs the commands in a text, MORE replaced; returns how each has ended."""
    commands = [shlex.split(found[0].replace("MORE", more)) for found in PRINTED.finditer(text)]
    assert commands
    return [linvit(*command[1:], cwd=folder) for command in commands]


def steps(run):
    return torch.load(run / "checkpoints" / LAST, weights_only=True)["global_step"]


def copy_of(run, folder, name="version_0"):
    """A copy of the finished run of 20 steps, in a folder whose name a shell would take apart."""
    own = folder / "it's mine" / "quickstart" / name
    shutil.copytree(run.folder, own)
    return own


def test_what_a_run_without_a_logger_prints_at_its_end(tmp_path):
    """It has a folder of its own, too."""
    done = fit(tmp_path, trainer__logger="false")
    assert done.code == 0, done.err
    run = tmp_path / "checkpoints/quickstart/version_0"
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}
    assert steps(run) == 2
    assert not any(run.glob("events*"))
    assert "tensorboard" not in done.log
    best = torch.load(run / "checkpoints/best.ckpt", weights_only=True)["callbacks"]["SaveCheckpoints"]["val/score"]
    tested, continued = follow(done.log, tmp_path)
    assert (tested.code, continued.code) == (0, 0), (tested.err, continued.err)
    assert steps(run) == 4
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert RunFolder(run).best_score("val/score").value >= best
    assert RunFolder(run).complete


STOP_AT_ONCE = (
    "[{class_path: lightning.pytorch.callbacks.EarlyStopping, "
    "init_args: {monitor: val/score, mode: max, patience: 0, min_delta: 2}}]"
)


def test_all_that_ended_a_run_is_to_be_changed(tmp_path):
    """With one of two limits raised, it would be finished already."""
    done = fit(tmp_path, **{"trainer.callbacks": STOP_AT_ONCE, "trainer.max_epochs": 2})
    assert done.code == 0, done.err
    run = tmp_path / "checkpoints/quickstart/version_0"
    before = steps(run)
    text = done.log.replace("WITHOUT_EARLY_STOPPING", "null")
    assert "--trainer.max_epochs=MORE --trainer.callbacks=WITHOUT_EARLY_STOPPING" in done.log
    _, continued = follow(text, tmp_path, more="8")
    assert continued.code == 0, continued.err
    assert steps(run) > before


def test_a_resumed_run_that_is_moved_is_continued_as_it_was_resumed(run, tmp_path, monkeypatch):
    """Its first row was not written yet, and is not written where the folder was."""
    from linvit.callbacks.monitors import ImageCount

    folder = copy_of(run, tmp_path)

    def once(callback, trainer, *args):
        monkeypatch.undo()
        moved(Path(trainer.log_dir))

    monkeypatch.setattr(ImageCount, "on_train_batch_end", once)
    more = ("--trainer.max_epochs=3", f"--trainer.default_root_dir={folder.parents[1]}")
    done = linvit("fit", "--config", folder / "config.yaml", "--resume=auto", *more, cwd=tmp_path)
    assert done.code == 2
    assert not folder.exists()
    folder.with_name("elsewhere").rename(folder)
    (continued,) = follow(done.err, tmp_path)
    assert continued.code == 0, continued.err
    assert steps(folder) == 30


def test_what_others_print_of_a_run_that_is_not_finished(run, tmp_path):
    """A run that was renamed is continued, too, and none is started in its place."""
    name = "7"
    folder = copy_of(run, tmp_path, name)
    (folder / "result.json").unlink()
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("max_epochs: 2", "max_epochs: 3").replace(str(run.root), "x"))
    with pytest.raises(UserError) as caught:
        check_finished(folder, "evaluate")
    assert "checkpoint to evaluate" in str(caught.value)
    (variant,) = group(find([tmp_path]))
    said = {PRINTED.search(text)[0] for text in (str(caught.value), variant.trouble[0], how_to_resume(folder))}
    (command,) = said
    (done,) = follow(command, tmp_path)
    assert done.code == 0, done.err
    assert steps(folder) == 30
    assert RunFolder(folder).complete
    assert [path.name for path in folder.parent.iterdir()] == [name]


def test_a_run_without_a_checkpoint_is_not_said_to_continue(run, tmp_path):
    folder = copy_of(run, tmp_path)
    assert how_to_resume(folder).startswith("resume with")
    assert how_to_resume(folder, "linvit linearize x").endswith(" with\n  linvit linearize x")
    shutil.rmtree(folder / "checkpoints")
    assert how_to_resume(folder).startswith("no checkpoint was saved; start again with")
    assert how_to_resume(tmp_path) == ""


def test_a_damaged_configuration_does_not_end_a_resume(run, tmp_path):
    folder = copy_of(run, tmp_path / "checkpoints")
    (folder / "config.yaml").write_text("seed_everything: 0\ntrainer: {max_ep")
    root = f"--trainer.default_root_dir={folder.parents[1]}"
    options = [f"--{name}={one}" for name, one in {**TINY, "trainer.max_epochs": 3}.items()]
    done = linvit("fit", f"--config={QUICKSTART}", *options, root, "--resume=auto", cwd=tmp_path)
    assert done.code == 0, done.err
    assert steps(folder) == 30
    assert RunFolder(folder).complete
    (again,) = follow(RunFolder(folder).command, tmp_path)
    assert "is finished already" in again.log


def moved(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))


def replaced(folder: Path) -> None:
    shutil.copytree(folder, folder.with_name("elsewhere"))
    shutil.rmtree(folder)
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/.lock").touch()


@pytest.mark.parametrize(
    ("change", "hook"),
    [(shutil.rmtree, "on_validation_batch_end"), (replaced, "on_train_batch_end")],
)
def test_a_folder_that_is_moved_while_a_run_trains_ends_it(change, hook, tmp_path, monkeypatch):
    """Nothing is made in its place; with its name again it is continued by what was printed."""
    from linvit.callbacks.monitors import ImageCount

    def once(callback, trainer, *args):
        if trainer.current_epoch == 1:
            monkeypatch.undo()
            change(Path(trainer.log_dir))

    monkeypatch.setattr(ImageCount, hook, once)
    done = fit(tmp_path, trainer__max_epochs=3)
    run = tmp_path / "checkpoints/quickstart/version_0"
    assert done.code == 2
    assert "was renamed, replaced or deleted" in done.err
    assert not (run / "result.json").exists()
    assert not (run / "config.yaml").exists()
    assert change is replaced or not run.exists()
    if change is not shutil.rmtree:
        shutil.rmtree(run, ignore_errors=True)
        run.with_name("elsewhere").rename(run)
        (continued,) = follow(done.err, tmp_path)
        assert continued.code == 0, continued.err
        assert steps(run) == 6
        assert RunFolder(run).complete
