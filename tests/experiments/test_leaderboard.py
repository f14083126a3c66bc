"""Records of several machines: rows, fronts, what is left out, and that the same records are the same files."""

import copy
import csv
import json
import re

import pytest
import yaml

from linvit import UserError
from linvit.experiments.bench.builders import costs_record
from linvit.experiments.bench.costs import Cost
from linvit.experiments.bench.report import CostReport
from linvit.experiments.leaderboard import collect, write
from linvit.experiments.measure import Timing
from linvit.runs import result
from linvit.runs.folder import RunFolder, find
from tests.cli.runs import linvit
from tests.experiments.compare.runs import write_run
from tests.experiments.test_page import HOSTILE, Reader

WHERE = {"date": "2026-11-23 10:00 UTC", "device": "cpu", "threads": "1", "load": "0.1", "versions": "linvit 0.1.0"}
FINGERPRINT = {"name": "digits", "classes": 10, "fingerprint": "1234", "images": {"train": 8, "val": 4}}


@pytest.fixture
def folder(tmp_path):
    """The runs of two seeds and two attentions, and what two machines have measured of them."""
    runs = {}
    for attention, parameters in {"softmax": 1_000_000, "linear": 2_000_000}.items():
        for seed in (0, 1):
            run = write_run(
                tmp_path / f"runs/{attention}-seed{seed}/version_0", seed, (0.9, 0.5 + seed / 4), attention=attention
            )
            record = result.derive(RunFolder(run))
            record["costs"] |= {"parameters": parameters, "macs": 10}
            record |= {"data": FINGERPRINT, "conditions": WHERE | {"machine": "A"}}
            result.write(run / "result.json", record)
            runs[attention] = record["configuration"]
    for machine, latencies in {"A": (1e-3, 2e-3), "B": (4e-3, 3e-3)}.items():
        costs = {
            runs[name]: {"latency_seconds": x, "memory_bytes": 2**20} for name, x in zip(runs, latencies, strict=True)
        }
        (tmp_path / machine).mkdir()
        content = {"schema": 1, "conditions": WHERE | {"machine": machine}, "costs": costs}
        result.write(tmp_path / machine / "costs.json", content)
    return tmp_path


def record_of(folder, **changes):
    return json.loads((folder / "runs/linear-seed0/version_0/result.json").read_text()) | changes


def test_a_test_of_some_images_is_in_no_table(folder):
    path = folder / "runs/linear-seed0/version_0/result.json"
    for images, shown in {100: 0.5, 32: None}.items():
        test = {"split": "test", "images": images, "scores": {"test/score": 0.5}}
        data = FINGERPRINT | {"images": FINGERPRINT["images"] | {"test": 100}}
        for each in folder.rglob("result.json"):
            result.write(each, json.loads(each.read_text()) | {"data": data})
        result.write(path, record_of(folder, test=test))
        (section,) = collect([folder]).sections
        assert {row["configuration"]: row["test"] for row in section.rows} == {
            "deit_nano, softmax": None, "deit_nano, linear": shown,
        }  # fmt: skip


def test_means_of_fewer_seeds_than_the_score_are_named(folder):
    for path in sorted(folder.rglob("result.json")):
        tested = {"split": "test", "images": 100, "scores": {"test/score": 0.5}}
        changes = {"test": None if "linear-seed0" in str(path) else tested}
        changes["evaluation"] = {"v2": 0.25} if "softmax-seed1" in str(path) else {}
        result.write(path, json.loads(path.read_text()) | changes)
    (section,) = collect([folder]).sections
    words = (
        "means of fewer seeds than the score's: test of deit_nano, linear (1 of 2); top-1 on v2 of deit_nano, softmax"
    )
    assert f"Warning: {words} (1 of 2)" in section.facts


def test_two_machines_are_merged_and_their_latencies_never_in_one_front(folder):
    board = collect([folder])
    assert board.left_out == []
    assert {name: where.partition(" /")[0] for where, name in board.machines.items()} == {"M1": "A", "M2": "B"}
    (section,) = board.sections
    assert section.facts == "train 8 images, val 4 images, 10 classes, fingerprint 1234"
    rows = {row["configuration"]: row for row in section.rows}
    softmax, linear = rows["deit_nano, softmax"], rows["deit_nano, linear"]
    assert (linear["score"], linear["seeds"], linear["best"]) == (0.625, 2, 0.9)
    assert linear["±"] == pytest.approx(0.125 * 2**0.5)
    assert {board.short(axis): softmax[axis] for axis in section.axes} == {
        "parameters (M)": 1.0, "MACs (M)": 1e-5, "latency M1 (ms)": 1.0, "memory M1 (MiB)": 1.0,
        "latency M2 (ms)": 4.0, "memory M2 (MiB)": 1.0,
    }  # fmt: skip
    equal = ["MACs", "memory M1", "memory M2"]  # scores and costs, so both are on these fronts
    fronts = {name: {*board.short(row["on the front of"]).split("; ")} for name, row in rows.items()}
    assert fronts["deit_nano, softmax"] == {*equal, "parameters", "latency M1"}
    assert fronts["deit_nano, linear"] == {*equal, "latency M2"}
    assert board.measured == [f"{name}: measured {WHERE['date']}, load 0.1" for name in ("M1", "M2")]
    apart = collect([folder / "B", folder / "runs"])
    (latency,) = (axis for axis in apart.sections[0].axes if axis.startswith("latency"))
    assert [row[latency] for row in apart.sections[0].rows] == [3.0, 4.0]


def test_the_same_records_are_the_same_files_whatever_the_order_of_folders(folder):
    names = [
        "runs/linear-seed0",
        "B",
        "runs/linear-seed1",
        "A",
        "runs/softmax-seed1/version_0/result.json",
        "runs/softmax-seed0",
    ]
    for number, folders in enumerate([names, names[::-1], ["."]]):
        write(collect([folder / name for name in folders]), folder / f"out{number}")
    first, *others = ({p.name: p.read_bytes() for p in (folder / f"out{i}").iterdir()} for i in range(3))
    assert {*first} == {"leaderboard.md", "leaderboard.csv", "leaderboard.html"}
    assert others == [first, first]
    rows = list(csv.DictReader(first["leaderboard.csv"].decode().splitlines()))
    assert [row["latency B / cpu / 1 threads / linvit 0.1.0 (ms)"] for row in rows] == ["3.0", "4.0"]
    assert [row["seeds"] for row in rows] == ["2", "2"]


def test_costs_by_bench_are_those_of_rows_with_the_backbone_and_attention_at_each_size(folder):
    seconds, peak = {"forward": Timing((2.0,))}, {"training_step": 3 * 2**20}
    costs = [Cost("deit_nano", (size, size), "eager", seconds=seconds, peak=peak) for size in (32, 64)]
    known = WHERE | {"machine": "B", "settings": "backbones, attention linear, batch 4, float32, eager", "batch": "4"}
    (folder / "bench").mkdir()
    (text,) = costs_record(CostReport("Backbones", "pixels", costs, known, []), ["deit_nano"], "linear").values()
    (folder / "bench/costs.json").write_text(text)
    assert (
        result.model_hash(
            {"model.backbone.name": "deit_nano", "model.attention": "linear", "model.attention_kernel": "a"}
        )
        in text
    )
    board = collect([folder / "runs", folder / "bench"])
    assert board.left_out == []
    rows = {row["configuration"]: row for row in board.sections[0].rows}
    at = [f"{size}x{size}, batch 4, float32, eager" for size in (32, 64)]
    measured = {
        board.short(axis): (rows["deit_nano, linear"][axis], rows["deit_nano, softmax"][axis])
        for axis in board.sections[0].axes[2:]
    }
    assert measured == {
        f"{what} M1 {size} ({unit})": (number, None)
        for what, unit, number in (("latency", "ms", 500.0), ("memory", "MiB", 3.0)) for size in at
    }  # fmt: skip


def test_runs_scored_with_a_moving_average_beside_others_are_named_and_evaluations_are_columns(folder):
    path = folder / "runs/linear-seed0/version_0/result.json"
    assert "Warning" not in collect([folder]).sections[0].facts
    own = record_of(folder, evaluation={"v2": 0.25, "clean 64x64": 0.5})
    result.write(path, own)
    result.write(path.parents[2] / "linear-seed1/version_0/result.json", own | {"seed": 1, "evaluation": {"v2": 0.75}})
    row = next(row for row in collect([folder]).sections[0].rows if row["configuration"] == "deit_nano, linear")
    assert (row["top-1 on v2"], row["top-1 on clean 64x64"]) == (0.5, 0.5)
    for seed in (0, 1):
        path = folder / f"runs/linear-seed{seed}/version_0/result.json"
        result.write(path, own | {"seed": seed, "score": own["score"] | {"tag": "val/ema_score"}})
    facts = collect([folder]).sections[0].facts
    assert "Warning: the scores of deit_nano, linear are of a moving average of the weights" in facts


def test_published_scores_stand_apart_and_are_in_no_front(folder):
    path = folder / "runs/linear-seed0/version_0/result.json"
    told = {"metric": "top1", "score": 0.99, "source": "their README"}
    result.write(path, record_of(folder, published=told))
    (section,) = collect([folder]).sections
    best, *_ = section.rows
    assert (best["configuration"], best["score"], best["published"]) == (
        "deit_nano, linear (published)",
        0.99,
        "top1: their README",
    )
    assert best["on the front of"] == ""
    assert "latency B /" in next(row for row in section.rows if row["seeds"] == 2)["on the front of"]
    assert "| deit_nano, linear (published) | 1 | 0.9900 | - | - | - |" in write(collect([folder]), folder / "out")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("\udc80", "cannot be read"),
        ('{"schema": 2}', r"has schema 2, and this linvit reads 1"),
        ("[]", "has schema None"),
        ('{"schema": 1}', "its options is missing or of another type"),
    ],
)
def test_what_is_no_record_is_left_out_with_a_line(folder, text, reason):
    path = folder / "C" / "result.json"
    path.parent.mkdir()
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    (line,) = collect([folder]).left_out
    assert re.search(reason, line)
    assert str(path) in line
    path.rename(path.with_name("costs.json"))
    assert len(collect([folder]).left_out) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [("seed", True), ("score.final", float("nan")), ("score.final", "1"), ("data", None), ("costs.macs", 10**400),
     ("conditions.date", 3), ("scores", {"a": "b"}), ("data.images", [1]), ("test", {"split": "test"})],
)  # fmt: skip
def test_every_field_has_a_type(folder, field, value):
    record, path = copy.deepcopy(record_of(folder)), folder / "result.json"
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


def test_hostile_text_is_text(folder):
    record = record_of(folder)
    for name in ("run", "configuration"):
        record[name] = HOSTILE
    record["data"] |= {"name": HOSTILE, "fingerprint": HOSTILE, "images": {HOSTILE: 1}}
    record["options"] |= {"model.attention": HOSTILE, "model.class_path": HOSTILE}
    record["published"] = {"metric": HOSTILE, "score": 0.5, "source": HOSTILE}
    (folder / "C").mkdir()
    result.write(folder / "C/result.json", record)
    where = WHERE | {"machine": HOSTILE}
    result.write(
        folder / "C/costs.json", {"schema": 1, "conditions": where, "costs": {HOSTILE: {"latency_seconds": 1}}}
    )
    text = write(collect([folder]), folder / "out")
    page = Reader((folder / "out/leaderboard.html").read_text(encoding="utf-8"))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert "\x1b" not in text
    assert b"\x1b" not in (folder / "out/leaderboard.csv").read_bytes()


def test_an_unfinished_run_is_left_out_with_a_line(folder):
    run = folder / "runs/linear-seed0/version_0"
    for _ in ("it was finished, and continues", "it never was"):
        write_run(run, 0, (0.5,), epochs=2, attention="linear")
        (line,) = collect([folder]).left_out
        assert "is not finished: its last evaluation is that of epoch 1 of 2" in line
        assert "linvit fit --config" in line
        (run / "result.json").unlink(missing_ok=True)
    done = linvit("leaderboard", run, cwd=folder)
    assert done.code == 2
    assert "there is no finished run in" in done.err
    assert linvit("leaderboard", "nothing", cwd=folder).code == 2


def test_of_two_runs_with_one_seed_the_newer_one_counts(folder):
    newer = record_of(folder, conditions=WHERE | {"machine": "B", "date": "2026-11-24 10:00 UTC"}, run="x/version_1")
    newer["score"]["final"] = 0.1
    (folder / "C").mkdir()
    result.write(folder / "C/result.json", newer)
    board = collect([folder])
    assert board.left_out == ["linear-seed0/version_0: a newer run has its configuration, data and seed"]
    assert min(row["score"] for row in board.sections[0].rows) == pytest.approx((0.1 + 0.75) / 2)
    result.write(folder / "C/result.json", record_of(folder))  # a copy is the same run
    assert collect([folder]).left_out == []


def test_a_run_of_an_older_version_says_what_its_folder_tells(tmp_path):
    attention = {"name": "focused", "kernel": "x" * 100}
    write_run(tmp_path / "old/version_0", scores=(0.5, 0.0), attention=attention)
    board = collect([tmp_path])
    (row,) = board.sections[0].rows
    name = f"deit_nano, focused, kernel={'x' * 44}…"
    assert (row["configuration"], row["score"], board.sections[0].axes) == (name, 0.0, [])
    assert board.sections[0].facts.endswith("fingerprint unknown")
    done = linvit("leaderboard", "old", cwd=tmp_path)
    assert done.code == 0
    assert f"| {name} | 1 | 0.0000 | 1 | 0.5000 |" in done.out


def test_runs_that_tune_and_stages_before_the_last_are_no_rows_and_no_seeds(tmp_path):
    for name in ("tuning/a-seed1000", "stage_1/a-seed0", "a-seed0", "tuning"):
        write_run(tmp_path / f"x/{name}/version_0", scores=(0.5,), epochs=1)
    assert [str(one.folder.relative_to(tmp_path)) for one in find([tmp_path])] == [
        "x/a-seed0/version_0",
        "x/tuning/version_0",  # a run of this name
    ]
    assert [row["seeds"] for row in collect([tmp_path / "x/a-seed0", tmp_path / "x/stage_1"]).sections[0].rows] == [1]
    assert len(find([tmp_path / "x/tuning"])) == 2  # which is asked for by name
