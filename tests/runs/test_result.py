"""The record of a run: what a finished one writes, its fields, and what the fingerprint of data depends on."""

import json
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from linvit.data import ClassificationData, DiagnosticData
from linvit.errors import UserError
from linvit.experiments.compare.results import Results, group
from linvit.experiments.linearize import scores
from linvit.runs import result
from linvit.runs.folder import RunFolder, find
from linvit.runs.run import Run
from linvit.tasks import ClassificationTask
from tests.cli.runs import linvit
from tests.data.images import image_folder
from tests.experiments.compare.runs import write_run

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "result.md").read_text(encoding="utf-8")


def test_a_finished_run_has_a_record(run):
    record = result.read(run.folder / "result.json")
    assert record["schema"] == 1
    assert record["run"] == "quickstart/version_0"
    assert record["command"].startswith("linvit fit --config=")
    assert record["options"]["model.attention"] == "focused"
    assert not [name for name in record["options"] if name.startswith(("seed", "data.source", "trainer.default_root"))]
    assert record["data"]["images"] == {"train": 1257, "val": 180, "test": 360}
    assert record["score"]["final_epoch"] == 2
    assert record["score"]["best"] >= record["score"]["final"] == record["scores"]["val/score"]
    assert record["costs"]["parameters"] > record["costs"]["image_size"][0] == 32
    assert record["costs"]["macs"] > 0
    assert record["costs"]["images_per_second"] > 0
    assert record["conditions"]["device"] == "cpu"
    own = {"rank/blocks.0.attn", "entropy/blocks.0.attn"}
    assert own <= record["diagnostics"].keys()
    assert json.loads(json.dumps(result.derive(RunFolder(run.folder))))["score"] == record["score"]


def test_of_equal_epochs_the_last_is_the_best_as_in_its_checkpoint(tmp_path):
    folder = write_run(tmp_path / "softmax-seed0/version_0", scores=(0.5, 0.75, 0.75, 0.7), epochs=4)
    score = result.derive(RunFolder(folder))["score"]
    assert (score["best"], score["best_epoch"], score["final_epoch"]) == (0.75, 3, 4)
    results = Results("x", group(find([tmp_path])), "softmax", None, [])
    assert results.best(results.variants[0]) == (0.75, 3)
    assert list(scores([RunFolder(folder)])) == ["student after epoch 4, the last", "student after epoch 3, the best"]


def test_what_is_not_finite_is_no_earlier_value(tmp_path):
    folder = write_run(tmp_path / "softmax-seed0/version_0", scores=(0.5, 0.75, "nan"), epochs=3)
    run = RunFolder(folder)
    assert run.complete
    score, best = run.score("val/score"), run.best_score("val/score")
    assert (math.isnan(score.value), score.epoch, best.value, best.epoch) == (True, 3, 0.75, 2)
    result.write(folder / "result.json", result.derive(run))
    record = result.read(folder / "result.json")
    assert record["score"] == {"tag": "val/score", "final": None, "final_epoch": 3, "best": 0.75, "best_epoch": 2}
    assert record["scores"] == {}
    assert list(scores([run])) == ["student after epoch 3, the last", "student after epoch 2, the best"]


def test_the_best_score_is_that_of_the_checkpoint(tmp_path):
    folder = write_run(tmp_path / "softmax-seed0/version_0", scores=(0.5, 0.75, 0.7), epochs=3)
    saved = result.kept_scores({"val/score": 0.875, "epochs": {"val/score": 1, "other": 2, "val/loss": None}})
    result.write(folder / "result.json", result.derive(RunFolder(folder), saved))
    assert result.read(folder / "result.json")["score"]["best"] == 0.875
    assert RunFolder(folder).best_score("val/score") == (0.875, 9, 1)
    assert result.kept_scores({"val/score": 0.875}) == result.kept_scores(None) == {}  # of older versions


def test_of_a_checkpoint_that_another_metric_has_chosen_the_score_is_recorded(tmp_path):
    folder = write_run(tmp_path / "softmax-seed0/version_0", scores=(0.5, 0.75, 0.7), epochs=3)
    state = {"val/loss": 1.25, "epochs": {"val/loss": 1}}
    record = result.derive(RunFolder(folder), result.kept_scores(state))
    assert (record["score"]["best"], record["score"]["best_epoch"]) == (0.5, 1)
    unknown = result.derive(RunFolder(folder), {"val/loss": (1.0, 7)})
    assert (unknown["score"]["best"], unknown["score"]["best_epoch"]) == (None, 7)


def test_a_run_without_its_rows_records_the_score_of_its_checkpoint(run, tmp_path):
    shutil.copytree(run.root, tmp_path / "copy")
    folder = tmp_path / "copy" / run.folder.relative_to(run.root)
    (folder / "metrics.csv").write_text("")
    best, last = folder / "checkpoints/best.ckpt", folder / "checkpoints/last.ckpt"
    state = torch.load(best, weights_only=True)["callbacks"]["SaveCheckpoints"]
    score = json.loads((folder / "result.json").read_text())["score"]
    assert (state["val/score"], state["epochs"]["val/score"]) == (score["best"], score["best_epoch"])
    for path in (best, last):
        content = torch.load(path, weights_only=True)
        content["callbacks"]["SaveCheckpoints"]["val/score"] = 0.99  # which no later epoch reaches
        path.unlink()  # perhaps a link to the other
        torch.save(content, path)
    options = ("--config", folder / "config.yaml", "--resume=auto", "--trainer.max_epochs=3")
    with pytest.warns(UserWarning, match="20 of the 20 rows that .* are missing"):
        done = linvit("fit", *options, cwd=tmp_path)
    assert done.code == 0, done.err
    score = result.read(folder / "result.json")["score"]
    assert (score["best"], score["best_epoch"], score["final_epoch"]) == (0.99, state["epochs"]["val/score"], 3)


def test_the_page_has_every_field(run):
    table = dict(re.findall(r"^\| `([\w.]+)` \| ([\w ]+) \|", PAGE, re.MULTILINE))
    words = {dict: "mapping", list: "list", str: "text", int: "integer", float: "number", dict[str, float]: "numbers"}
    words |= {kind | None: f"{word} or null" for kind, word in words.items() if kind in (dict, list, str, int, float)}
    assert table == {name: words[kind] for kind, names in result.FIELDS.items() for name in names.split()}
    assert json.loads((run.folder / "result.json").read_text()).keys() == {
        "schema", *(name for name in table if "." not in name)
    }  # fmt: skip


def test_a_test_is_added_if_the_data_is_that_of_the_run(run, tmp_path):
    shutil.copytree(run.root, tmp_path / "copy")
    folder = tmp_path / "copy" / run.folder.relative_to(run.root)
    moved = run._replace(root=tmp_path / "copy")
    assert moved.then("test", "--trainer.limit_test_batches=2").code == 0
    record = result.read(folder / "result.json")
    assert record["test"]["split"] == "test"
    assert record["test"]["images"] == 32
    assert "test/top1" in record["test"]["scores"]
    image_folder(tmp_path / "other", ["train", "val", "test"], count=4, classes=[str(i) for i in range(10)])
    done = moved.then("test", f"--data.source={tmp_path / 'other'}")
    assert done.code == 0, done.err
    assert "other data" in done.log
    assert result.read(folder / "result.json") == record


def test_a_test_of_another_checkpoint_or_size_is_not_that_of_the_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ClassificationTask, "evaluation_options", ("label_smoothing",))  # as segmentation has windows
    shutil.copytree(run.root, tmp_path / "copy")
    moved = run._replace(root=tmp_path / "copy")
    folder = tmp_path / "copy" / run.folder.relative_to(run.root)
    before = result.read(folder / "result.json")
    for option, said in (
        (f"--ckpt_path={folder / 'checkpoints' / 'last.ckpt'}", "which belongs to best.ckpt"),
        ("--model.label_smoothing=0.3", "whose run has another model.label_smoothing"),
    ):
        done = moved.then("test", "--trainer.limit_test_batches=1", option)
        assert done.code == 0, done.err
        assert said in done.log
        assert result.read(folder / "result.json") == before


def test_the_fingerprint_is_of_the_content(tmp_path):
    image_folder(tmp_path / "a", ["train", "val"])
    shutil.copytree(tmp_path / "a", tmp_path / "b" / "a")
    here, there = (result.data_facts(ClassificationData(str(tmp_path / name))) for name in ("a", "b/a"))
    assert here == there
    first = min((tmp_path / "b/a/val").rglob("*.*"))
    first.write_bytes(first.read_bytes() + b"0")
    assert result.data_facts(ClassificationData(str(tmp_path / "b/a"))) != there
    held_out = [
        result.data_facts(ClassificationData("digits", val_fraction=x, img_size=y)) for x, y in ((0.1, 8), (0.5, 32))
    ]
    assert held_out[0] == held_out[1]  # it has a validation split of its own
    pairs = [result.data_facts(DiagnosticData("recall", pairs=n, train=4, val=2, test=2)) for n in (4, 4, 8)]
    assert pairs[0] == pairs[1] != pairs[2]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ('{"schema": 2}', r"has schema 2, and this linvit reads 1"),
        ("[]", "has schema None"),
        ('{"schema": 1}', "its options is missing or of another type"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path, text, reason):
    path = tmp_path / "result.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=reason) as raised:
        result.read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", True), ("score.final", float("nan")), ("score.final", "1"), ("data", None), ("costs.macs", 10**400),
     ("conditions.date", 3), ("scores", {"a": "b"}), ("data.images", [1]), ("test", {"split": "test"})],
)  # fmt: skip
def test_every_field_has_a_type(tmp_path, field, value):
    known = dict.fromkeys(("date", "machine", "device", "threads", "load", "versions"), "x")
    record = result.derive(RunFolder(write_run(tmp_path / "a/version_0"))) | {"conditions": known}
    path = tmp_path / "result.json"
    result.write(path, record)
    assert result.read(path) == record
    parent, _, name = field.rpartition(".")
    (record[parent] if parent else record)[name] = value
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=rf"its {field}[\w.]* is missing or of another type"):
        result.read(path)


def test_the_same_run_on_another_machine_has_the_same_configuration(tmp_path):
    for name in ("a", "b"):
        config = yaml.safe_load((write_run(tmp_path / name / "version_0") / "config.yaml").read_text())
        config["trainer"]["logger"] = {"class_path": "WandbLogger", "init_args": {"project": name}}
        config["data"] = {"init_args": {"source": f"/home/{name}/digits", "num_workers": len(name), "batch_size": 4}}
        (tmp_path / name / "version_0/config.yaml").write_text(yaml.safe_dump(config))
    a, b = (result.configuration(RunFolder(tmp_path / name / "version_0")) for name in ("a", "b"))
    assert a == b
    assert a["options"]["data.batch_size"] == 4


def test_runs_that_tune_and_stages_before_the_last_are_not_found_beside_others(tmp_path):
    for name in ("tuning/a-seed1000", "stage_1/a-seed0", "a-seed0", "tuning"):
        write_run(tmp_path / f"x/{name}/version_0", scores=(0.5,), epochs=1)
    assert [str(one.folder.relative_to(tmp_path)) for one in find([tmp_path])] == [
        "x/a-seed0/version_0",
        "x/tuning/version_0",  # a run of this name
    ]
    assert len(find([tmp_path / "x/tuning"])) == 2  # which is asked for by name


def test_the_record_of_a_run_that_was_renamed_at_its_end_is_missed(tmp_path):
    run = SimpleNamespace(trainer=SimpleNamespace(is_global_zero=True))
    with pytest.raises(UserError, match=r"deleted before its result\.json was written.*\n  linvit fit --con"):
        Run._record(run, tmp_path / "version_0")
    assert not any(tmp_path.iterdir())
