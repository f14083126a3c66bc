"""`--resume=auto`: one command fits every case."""

import json
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import yaml

from linvit.callbacks.save_checkpoints import AtomicCheckpointIO
from linvit.callbacks.stop_on_signal import StopOnSignal
from linvit.errors import UserError
from linvit.experiments.compare.results import group
from linvit.runs import result
from linvit.runs.checkpoint import SameCheckpoint, differs, find, run_to_resume, whole_checkpoints
from linvit.runs.folder import RunFolder, claim_version
from linvit.runs.folder import find as find_runs
from linvit.runs.resolve import check_epochs
from linvit.tasks import ClassificationTask
from tests.cli.forked import Ranks
from tests.cli.runs import QUICKSTART, files, flags, linvit, tiny

AUTO = "--resume=auto"


@pytest.fixture
def folder(run, tmp_path):
    """A copy of a finished run of 2 epochs of 10 steps: last.ckpt of step 20."""
    return shutil.copytree(run.folder, tmp_path / "checkpoints" / "quickstart" / "version_0")


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def fit(cwd, *arguments, **options):
    short = flags(trainer__limit_val_batches=1, trainer__limit_train_batches=2)
    return linvit("fit", f"--config={QUICKSTART}", *tiny(), *short, *flags(**options), *arguments, cwd=cwd)


def settings(configs, max_epochs=5, max_steps=-1, seed=0, callbacks=None, **model):
    """What a command line amounts to."""
    return {
        "config": configs,
        "seed_everything": seed,
        "trainer": {"max_epochs": max_epochs, "max_steps": max_steps, "callbacks": callbacks},
        "model": {"class_path": "linvit.tasks.ClassificationTask", "init_args": model},
        "data": {"init_args": {}},
    }


def step_of(path):
    return torch.load(path, weights_only=True)["global_step"]


def test_it_starts_goes_on_and_is_finished(tmp_path, monkeypatch):
    runs = tmp_path / "out" / "quickstart"
    options = {"trainer__default_root_dir": "out"}
    done = fit(tmp_path, AUTO, **options, trainer__max_epochs=1)
    assert done.code == 0, done.err
    assert "there is no matching run of 'quickstart' in out; starting one" in done.log
    done = fit(tmp_path, AUTO, **options, trainer__max_epochs=2)
    assert done.code == 0, done.err
    assert "out/quickstart/version_0 resumes from last.ckpt, step 2" in done.log
    record = runs / "version_0" / "result.json"
    told = json.loads(record.read_text(encoding="utf-8"))
    record.unlink()  # as after a kill behind the last checkpoint
    done = fit(tmp_path, AUTO, **options, trainer__max_epochs=2)
    assert done.code == 0
    assert json.loads(record.read_text(encoding="utf-8"))["score"] == told["score"]
    assert "is finished already, at step 4, 2 epochs" in done.log
    assert [path.name for path in runs.iterdir()] == ["version_0"]
    assert step_of(runs / "version_0" / "checkpoints" / "last.ckpt") == 4
    assert RunFolder(runs / "version_0").complete
    monkeypatch.setattr(ClassificationTask, "training_loss", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, AUTO, **options, trainer__max_epochs=3)
    assert not RunFolder(runs / "version_0").complete  # it was resumed, and has not ended


def test_a_run_without_validation_has_a_record(tmp_path):
    done = fit(tmp_path, trainer__max_epochs=1, trainer__limit_val_batches=0, checkpoint__monitor="null")
    assert done.code == 0, done.err
    folder = tmp_path / "checkpoints/quickstart/version_0"
    score = result.read(folder / "result.json")["score"]
    assert score == {"tag": "val/score", "final": None, "final_epoch": 1, "best": None, "best_epoch": 1}
    (variant,) = group(find_runs([folder]))
    assert variant.without_score(None) == {0: "its last evaluation has no val/score"}


def test_a_run_that_was_ended_before_its_last_validation_repeats_the_steps_before_it(tmp_path, monkeypatch):
    """`max_steps` has no step left after the checkpoint, so the validation follows upon those of an earlier one."""
    options = {"trainer__max_epochs": -1, "trainer__max_steps": 4}
    runs = {name: tmp_path / name / "checkpoints/quickstart/version_0" for name in ("whole", "ended")}
    for name in runs:
        (tmp_path / name).mkdir()
    assert fit(tmp_path / "whole", AUTO, **options).code == 0
    with monkeypatch.context() as signals:
        signals.setattr(StopOnSignal, "_asked", lambda self: signal.SIGTERM if self._step == 4 else 0)
        assert fit(tmp_path / "ended", AUTO, **options).code == 143
    assert step_of(runs["ended"] / "checkpoints/last.ckpt") == 4
    assert not RunFolder(runs["ended"]).complete
    with pytest.warns(UserWarning, match="was trained to its end, but its last validation is missing"):
        done = fit(tmp_path / "ended", AUTO, **options)
    assert done.code == 0, done.err
    assert "resumes from best.ckpt, step 2" in done.log
    found, wanted = (result.read(run / "result.json") for run in (runs["ended"], runs["whole"]))
    assert (found["scores"], found["score"]) == (wanted["scores"], wanted["score"])


def test_without_its_last_validation_and_an_earlier_checkpoint_the_way_to_score_it_is_said(folder):
    checkpoints, configs = folder / "checkpoints", [str(folder / "config.yaml")]
    content = torch.load(checkpoints / "last.ckpt", weights_only=True)
    validation = content["loops"]["fit_loop"]["epoch_loop.val_loop.batch_progress"]["current"]
    validation |= {"started": 1, "processed": 0, "completed": 0}
    content["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"] = 1
    for path in checkpoints.glob("*.ckpt"):
        path.unlink()
    AtomicCheckpointIO().save_checkpoint(content, checkpoints / "last.ckpt")
    with pytest.raises(UserError, match=r"(?s)its last validation is missing.*linvit validate --config"):
        find(settings(configs, 2, 20), folder.parent.parent)
    assert not find(settings(configs, 2), folder.parent.parent)[2]  # the epoch ends with its validation
    for limits in ((1, -1), (2, 19)):  # which ask for no such validation
        assert find(settings(configs, *limits), folder.parent.parent)[2]


def test_a_run_that_has_no_checkpoint_yet_starts_anew_in_its_folder(tmp_path):
    run = tmp_path / "checkpoints" / "quickstart" / "version_0"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("killed: early\n", encoding="utf-8")
    done = fit(tmp_path, AUTO, trainer__max_epochs=1)
    assert done.code == 0, done.err
    assert "checkpoints/quickstart/version_0: it has no checkpoint yet" in done.log
    assert [path.name for path in run.parent.iterdir()] == ["version_0"]
    assert "killed" not in (run / "config.yaml").read_text(encoding="utf-8")
    assert step_of(run / "checkpoints" / "last.ckpt") == 2


def test_a_damaged_file_is_passed_over_with_the_reason(folder):
    damage(folder / "checkpoints" / "last.ckpt")
    with pytest.warns(UserWarning, match=r"skips .*last.ckpt: .* is damaged"):
        found = next(whole_checkpoints(folder), None)
    best = folder / "checkpoints" / "best.ckpt"
    assert found.step == step_of(best)
    damage(best)
    with pytest.warns(UserWarning, match=r"skips .*best.ckpt: .* is damaged"):
        assert next(whole_checkpoints(folder), None) is None
    with pytest.warns(UserWarning, match="all of its checkpoints are damaged, so a new run starts"):
        assert find(settings(["quickstart"]), folder.parents[1]) == (None, None, False)


def test_a_configuration_in_a_run_folder_means_that_run(tmp_path):
    root = tmp_path / "checkpoints"
    for number in (0, 1, 9, 10):
        (root / "quickstart" / f"version_{number}").mkdir(parents=True)
    (root / "quickstart" / "version_11").touch()
    assert run_to_resume(settings(["quickstart"]), root).name == "version_10"
    assert run_to_resume(settings([str(root / "quickstart" / "version_1" / "config.yaml")]), root).name == "version_1"
    assert run_to_resume(settings(["other"]), root) is None


def test_a_run_of_another_model_or_seed_is_passed_over(folder):
    saved = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))["model"]["init_args"]
    configs, root = ["quickstart"], folder.parents[1]
    teacher = {"source": "checkpoints/other"}
    for same in (
        {},
        {"lr": saved["lr"], "backbone": saved["backbone"]},
        {"compile": "max-autotune"},
        {"teacher": None},
    ):
        assert run_to_resume(settings(configs, **same), root) == folder
    for name, other in (
        *(("model.lr", {"lr": 7.0}), ("model.attention", {"attention": "hydra"}), ("seed_", {"seed": 3})),
        ("model.teacher", {"teacher": teacher}),  # its students may lie beside it
    ):
        assert run_to_resume(settings(configs, **other), root) is None
        (words,) = differs(folder, settings(configs, **other))
        assert words.startswith(name)
        assert run_to_resume(settings([str(folder / "config.yaml")], **other), root) == folder


@pytest.mark.parametrize(
    ("limits", "finished"), [((2, -1), True), ((3, -1), False), ((3, 20), True), ((-1, 21), False)]
)
def test_when_a_run_is_finished(folder, limits, finished, capsys):
    configs, root = [str(folder / "config.yaml")], folder.parents[1]
    assert find(settings(configs, *limits), root)[2] is finished
    if not finished:
        assert find(settings(configs, *limits), root)[1].step == 20


def test_a_run_that_has_done_more_epochs_than_are_asked_for_is_refused(folder):
    asked = settings([str(folder / "config.yaml")], 3)
    checkpoint = find(asked, folder.parents[1])[1]
    with pytest.raises(UserError, match="has done 2 epochs, more than 1"):
        check_epochs(settings([], 1), checkpoint)


def test_early_stopping_has_finished_a_run_as_long_as_it_is_asked_for(folder, caplog):
    path = folder / "checkpoints" / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["callbacks"]["EarlyStopping{'monitor': 'val/score', 'mode': 'max'}"] = {"stopped_epoch": 1}
    AtomicCheckpointIO().save_checkpoint(content, path)
    caplog.set_level("INFO", logger="lightning.pytorch.utilities.rank_zero")
    configs, early = [str(folder / "config.yaml")], [{"class_path": "EarlyStopping"}]
    assert find(settings(configs, 100, callbacks=early), folder.parents[1])[2]
    assert "To train it for longer, remove EarlyStopping from --trainer.callbacks" in caplog.text
    assert not find(settings(configs, 100), folder.parents[1])[2]


def test_a_start_that_failed_does_not_hide_the_run_before_it(folder):
    """Its folder has no configuration; it is taken where there is nothing to resume."""
    (folder.parent / "version_1").mkdir()
    configs, root = [f"elsewhere/{folder.parent.name}.yaml"], folder.parents[1]
    assert find(settings(configs, 100), root)[0] == folder
    assert find(settings(configs, 100, seed=7), root)[0] == folder.parent / "version_1"


def test_a_run_on_other_data_is_named(folder, recwarn):
    configs, root = [str(folder / "config.yaml")], folder.parents[1]
    for source, warned in {"digits": False, "mine": True}.items():
        asked = settings(configs, 100) | {"data": {"init_args": {"source": source, "batch_size": 7}}}
        find(asked, root)
        assert any("has data.source=digits and not mine. If" in str(told.message) for told in recwarn) is warned
    (folder / "config.yaml").write_text("{data: 3, trainer: {}}")  # which says nothing of it
    assert find(asked, root)[1].step == 20


def test_no_two_starts_take_the_same_folder(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        numbers = list(pool.map(lambda _: claim_version(tmp_path / "quickstart"), range(64)))
    assert sorted(numbers) == list(range(64))


def test_the_command_at_the_end_goes_on(tmp_path):
    """What is printed is run: after an end, and with the configuration that the run went on with."""
    done = fit(tmp_path, trainer__max_epochs=1)
    printed = next(line for line in done.log.splitlines() if "--resume=auto" in line).partition("linvit fit ")[2]
    again = linvit("fit", *printed.replace("MORE", "2").split(), cwd=tmp_path)
    assert again.code == 0, again.err
    assert "resumes from last.ckpt, step 2" in again.log
    printed = next(line for line in again.log.splitlines() if "MORE" in line).partition("linvit fit ")[2]
    assert "config_from_step_2.yaml" in printed
    counted = linvit("fit", *printed.replace("MORE", "9").split(), "--trainer.max_steps=5", cwd=tmp_path)
    assert "--trainer.max_steps=MORE" in counted.log


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "lightning"])
def test_all_ranks_go_on_from_the_same_file(tmp_path, launcher):
    command = ["fit", f"--config={QUICKSTART}", *tiny(trainer__limit_train_batches=2, data__batch_size=2), AUTO]
    for epochs, changed in ((1, True), (2, True), (2, False)):  # starts, goes on, is finished
        before = files(tmp_path)
        ranks = Ranks([*command, f"--trainer.max_epochs={epochs}"], tmp_path, number=2, launcher=launcher)
        assert set(ranks.wait()) == {0}, ranks.text()
        assert not ranks.left()
        (run,) = (tmp_path / "checkpoints" / "quickstart").iterdir()
        assert step_of(run / "checkpoints" / "last.ckpt") == 2 * epochs
        assert result.read(run / "result.json")["score"]["final_epoch"] == epochs
        written = {name for name in set(files(tmp_path)) - set(before) if name.startswith("checkpoints")}
        assert bool(written) is changed


def test_ranks_that_have_found_other_files_say_so(tmp_path):
    found = SameCheckpoint((tmp_path / "version_0", None, False))
    strategy = SimpleNamespace(broadcast=lambda own: ("other", None, None))
    with pytest.raises(UserError, match=r"on rank 1, and \('other', None, None\) on rank 0"):
        found.setup(SimpleNamespace(strategy=strategy, global_rank=1), None, "fit")
    strategy.broadcast = lambda own: own
    found.setup(SimpleNamespace(strategy=strategy, global_rank=1), None, "fit")
