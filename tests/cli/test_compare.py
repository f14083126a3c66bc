"""`linvit compare`: both forms of a grid, its checks before the first cell, and reports of runs that exist."""

import csv
import shlex
import signal

import pytest
import yaml

from linvit import UserError
from linvit.cli import compare
from linvit.cli.compare.run import resolve
from linvit.experiments.compare.experiment import Experiment
from linvit.experiments.compare.grid import Sweep
from linvit.io.plain_text import in_shell
from linvit.io.signals import STOP
from linvit.registry import attentions
from tests.cli.runs import linvit
from tests.experiments.compare.runs import write_run

GRID = """
config: quickstart
vary:
  model.attention: [softmax, {name: focused, focusing_factor: 4}, [linear, linear, softmax, softmax]]
set: {trainer.max_epochs: 2}
seeds: [0, 3]
baseline: softmax
"""
FLAGS = [
    *("--config", "quickstart", "--seeds", "0,3", "--trainer.max_epochs=2", "--baseline=softmax"),
    "--model.attention=softmax,{name: focused, focusing_factor: 4}",
    "--model.attention=[linear, linear, softmax, softmax]",
]


@pytest.fixture
def parsed(monkeypatch):
    """Reads a command line up to its grid."""

    def grid(*argv):
        found = []
        monkeypatch.setattr("linvit.cli.compare.run.run", lambda spec, *rest: found.append((spec.grid(), rest)) or 0)
        compare.main(list(argv))
        return found[0]

    return grid


def test_file_and_command_line_make_the_same_grid(parsed, tmp_path):
    (tmp_path / "mine.yaml").write_text(GRID)
    of_file, (name, *_) = parsed(str(tmp_path / "mine.yaml"))
    of_flags, (flags_name, *_) = parsed(*FLAGS)
    assert of_file.variants == of_flags.variants
    assert list(of_file.variants) == ["softmax", "focused-focusing_factor4", "2linear-2softmax"]
    assert (of_file.set, of_file.seeds) == (of_flags.set, of_flags.seeds)
    assert (name, flags_name) == ("mine", "quickstart-attention")


def test_a_configuration_takes_the_place_of_the_files_and_a_part_is_added(parsed, tmp_path):
    (tmp_path / "mine.yaml").write_text(GRID)
    mine = str(tmp_path / "mine.yaml")
    assert parsed(mine, "--config", "imagenet/deit_tiny")[0].config == ["imagenet/deit_tiny"]
    own, part = parsed(mine, "--config", "base/strategy/ddp")[0].config
    assert own == "quickstart"
    assert part == "base/strategy/ddp"


def test_a_pattern_stands_for_registered_names(parsed):
    grid, _ = parsed("--config=quickstart", "--model.attention=*linear*")
    assert list(grid.variants) == attentions.names("*linear*")


def test_attentions_without_their_convolutions_have_a_folder_of_their_own(parsed):
    grid, (name, *_) = parsed("quickstart", "--model.attention=softmax,focused", "--without_convolution")
    assert grid.variants == {
        "softmax": {"model.attention": "softmax"},
        "focused-dwc-false": {"model.attention": {"name": "focused", "dwc": False}},
    }
    assert name == "quickstart-attention-without_convolution"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "needs a grid or a configuration"),
        (["--config=quickstart", "--seeds=a"], "--seeds must be a number"),
        (["--config=quickstart", "--seed_everything=1"], "use --seeds instead"),
        (["--config=quickstart", "--model.lr"], "--model.lr has no value"),
        (["--config=quickstart", "--partition=gpu"], "add --engine=slurm"),
        (["--config=quickstart", "--model.attention=linear"], "nothing differs between the runs: .*--seeds=3"),
        (["quickstart", "--without_convolution"], "add --model.attention=NAME,NAME"),
        (["quickstart", "--tune", "model.lr"], "--tune takes an option and its values, .*got 'model.lr'"),
        (["--report", "x", "--model.lr=1"], "--report takes folders only"),
    ],
)
def test_what_makes_no_sense_is_refused(argv, message):
    with pytest.raises(UserError, match=message):
        compare.main(argv)


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        ({"model.attention": ["softmax", "linaer"]}, r"the variant 'linaer' .*Did you mean 'linear'"),
        ({"model.attention": [{"name": "focused", "focusing": 2}]}, r"'focused-focusing2' .*'focusing_factor'"),
        ({"model.atention": ["softmax"]}, r"the variant 'softmax' \(model.atention=softmax\) cannot be run"),
        ({"model.lr": ["fast"]}, r"the variant 'fast' (.|\n)*Expected a float"),
        ({"model.lr": [0.001, "1e-3"]}, "the variants 'lr0.001' and '1e-3' are the same run"),
    ],
)
def test_a_wrong_cell_is_named_before_the_first_starts(vary, message):
    with pytest.raises(UserError, match=message):
        resolve(Sweep(config=["quickstart"], vary=vary).grid())


def test_complete_configurations_differ_only_in_the_keys_of_the_grid():
    spec = Sweep(
        config=["quickstart"], set={"model.backbone.depth": 1}, vary={"model.attention.focusing_factor": [2, 3]}
    )
    two, three = resolve(spec.grid()).values()
    assert two["model"]["init_args"].pop("attention") == {"name": "focused", "focusing_factor": 2}
    assert three["model"]["init_args"].pop("attention") == {"name": "focused", "focusing_factor": 3}
    assert two == three
    assert two["model"]["init_args"]["backbone"] == {"name": "deit_nano", "depth": 1}
    assert two["trainer"]["max_epochs"] == 57  # the defaults and the configuration's own are there


def test_stages_are_trained_by_linearize_and_checked_before(tmp_path):
    stages = [{"trainer.max_epochs": 1, "model.lr": 0.1}, {"model.teacher.feature_weight": 1}]
    options = {"vary": {"model.lr": [0.001, 0.002]}, "set": {"stages": stages}}
    grid = Sweep(config=["linearize/quickstart"], **options).grid()
    configs = resolve(grid)
    assert [config["stages"][0] for config in configs.values()] == [{"trainer.max_epochs": 1}] * 2  # lr is that of grid
    experiment = Experiment(tmp_path, grid)
    experiment.prepare(configs)
    assert all(run.command[2:6] == ["linvit", "linearize", "--no_page", "--config"] for run in experiment.runs)
    stages[1] = {"model.teacher.features": 1}
    with pytest.raises(UserError, match=r"the variant 'lr0\.001' .*got 'features'\. Did you mean 'feature_weight'"):
        resolve(Sweep(config=["linearize/quickstart"], **options).grid())


def test_a_dry_run_lists_the_cells_and_writes_nothing(tmp_path):
    done = linvit("compare", "--config=quickstart", "--model.attention=softmax,linear", "--dry_run", cwd=tmp_path)
    assert done.code == 0, done.err
    cells = [line.split() for line in done.out.splitlines()[1:]]
    assert cells == [["softmax-seed0", "model.attention=softmax"], ["linear-seed0", "model.attention=linear"]]
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tuned(tmp_path, monkeypatch):
    """Runs a comparison that tunes in place of training: a score by learning rate, and a signal before the fourth."""
    started = []

    def make(score, *options):
        def train(waiting, configs, args):
            assert STOP.deferred
            for run in waiting:
                if len(started) == 3:
                    STOP.received = signal.SIGTERM
                    started.append("stopped")
                    return
                started.append(run.name)
                tunes = run.seed == 1000
                assert configs[run.variant]["data"]["init_args"]["samples_seed"] == (1003 if tunes else 3)
                model = configs[run.variant]["model"]["init_args"]
                attention, lr = model["attention"], model["lr"]
                scores = (0.1, score(attention, lr))
                write_run(run.folder / "version_0", run.seed, scores, attention=attention, lr=lr)
                run.ended(0, 1.0)
                yield run

        monkeypatch.setattr("linvit.cli.compare.run._run", train)
        command = ["compare", "quickstart", "--model.attention=softmax,linear", "--seeds=2", "--skip_costs", *options]
        assert linvit(*command, cwd=tmp_path).code == 143
        done = linvit(*command, cwd=tmp_path)
        assert done.code == 0, done.err
        again = linvit(
            "compare", "--report", "checkpoints/compare/quickstart-attention-tuned", "--skip_costs", cwd=tmp_path
        )
        tables = [[line for line in one.out.splitlines() if "|" in line] for one in (done, again)]
        assert tables[0] == tables[1]
        before = [*started]
        (run,) = (tmp_path / "checkpoints").rglob("linear-lr*-seed1/version_0")
        (run / "result.json").unlink()
        told = linvit("compare", "--report", run.parents[1], "--skip_costs", cwd=tmp_path)
        printed = told.out.partition("run the incomplete ones with\n  linvit ")[2].splitlines()[0]
        assert linvit(*shlex.split(printed), "--skip_costs", cwd=tmp_path).code == 0
        assert started[len(before) :] == [run.parent.name]  # tuning is done, and its values are those of before
        return done.out, before

    def settings(grid):
        assert not STOP.deferred  # while many variants are checked a signal ends the command at once
        given = {
            name: {key.partition(".")[2]: value for key, value in own.items()} for name, own in grid.variants.items()
        }
        return {
            name: {
                "trainer": {"default_root_dir": None},
                "data": {"init_args": {"samples_seed": 3}},
                "model": {"init_args": {"lr": 0.1, **own}},
            }
            for name, own in given.items()
        }

    monkeypatch.setattr("linvit.cli.compare.run.resolve", settings)
    return make


def test_tuning_is_resumed_and_the_best_value_is_run_with_the_seeds(tuned):
    best = {"softmax": 0.002, "linear": 0.004}
    out, started = tuned(
        lambda attention, lr: 0.5 + 0.1 * (lr == best[attention]), "--tune", "model.lr=0.001,0.002,0.004"
    )
    assert "| linear | 0.004 | 0.6000 ± 0.0000 |" in out
    assert "beyond which a better value may lie: linear." in " ".join(out.split())
    tuning = [f"{name}-lr{lr}-seed1000" for name in best for lr in (0.001, 0.002, 0.004)]
    found = [f"{name}-lr{lr}-seed{seed}" for seed in (0, 1) for name, lr in best.items()]  # other values are other runs
    assert started == [*tuning[:3], "stopped", *tuning[3:], *found]


def test_a_report_prints_how_its_experiment_continues_where_it_lies(tmp_path, monkeypatch):
    """Also from another folder, and with a configuration that was named relative to the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: quickstart\n")
    root = tmp_path / "checkpoints/compare/mine-lr"
    command = ["compare", "--config=mine.yaml", "--model.lr=0.001,0.002", "--skip_costs"]
    monkeypatch.setattr("linvit.cli.compare.run._run", lambda *args: [])
    assert "no run has begun to train" in linvit(*command, cwd=tmp_path).err
    write_run(root / "lr0.001-seed0/version_0")
    there = tmp_path / "-x/it's mine"
    there.parent.mkdir(parents=True, exist_ok=True)
    root.rename(there)
    done = linvit("compare", "--report", there, "--skip_costs", cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    other = linvit("compare", "--report", there, "--skip_costs", cwd=elsewhere)
    for told, cwd in (done, tmp_path), (other, elsewhere):
        assert told.code == 1, told.err
        assert f"tensorboard --logdir {in_shell(there)}" in told.log or cwd == elsewhere
        printed = told.out.partition("run the incomplete ones with\n  linvit ")[2]
        again = linvit(*shlex.split(printed.splitlines()[0]), "--skip_costs", cwd=cwd)
        assert again.code == 1, again.err
        assert "2 runs in" in again.log
    found = {path.parent for path in tmp_path.rglob("compare.yaml")}
    assert found == {there}
    assert not (elsewhere / "checkpoints").exists()


def test_a_grid_of_0_2_says_what_is_removed(tmp_path):
    path, before = tmp_path / "grid.yaml", "config: quickstart\nvary: {model.lr: [1, 2]}\nsearch: grid\ntrials: 20\n"
    path.write_text(before + "budget: epochs\n")
    assert linvit("compare", path, "--dry_run", cwd=tmp_path).code == 0
    path.write_text(before + "budget: macs\n")
    done = linvit("compare", path, "--dry_run", cwd=tmp_path)
    assert (done.code, "compare.budget was removed. Use equal epochs" in done.err) == (2, True)


def test_a_report_of_a_run_that_exists(run, tmp_path):
    done = linvit("compare", "--report", run.root / "checkpoints", cwd=tmp_path)
    assert done.code == 0, done.err
    rows = [line.split("|")[1:-1] for line in done.out.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    titles, _, values = ([cell.strip() for cell in row] for row in rows)
    measured = dict(zip(titles, values, strict=True))
    assert measured["seeds"] == "1"
    assert measured["parameters"].endswith("k")
    assert float(measured["latency (ms)"].split()[0]) > 0
    page = tmp_path / "checkpoints" / "compare" / "report" / "report.html"

    assert "deit_nano" not in page.read_text(encoding="utf-8")  # nothing differs, so nothing is named


def test_a_report_merges_runs_of_several_folders(tmp_path):
    """As of two machines, where the data lies elsewhere and has other loader processes."""
    places = {"here": ["softmax-0", "linear-0"], "there": ["linear-1", "softmax-1"], "copy": ["softmax-1"]}
    for number, (place, runs) in enumerate(places.items()):
        for run in runs:
            attention, seed = run.split("-")
            folder = tmp_path / place / f"{attention}-seed{seed}/version_0"
            config = yaml.safe_load((write_run(folder, int(seed), attention=attention) / "config.yaml").read_text())
            config["data"] = {"init_args": {"source": f"/home/{place}/digits", "num_workers": number, "batch_size": 4}}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
    merged = linvit("compare", "--report", "here", "there", "--name=merged", "--skip_costs", cwd=tmp_path)
    assert merged.code == 0, merged.err
    table = csv.DictReader((tmp_path / "checkpoints/compare/merged/table.csv").read_text().splitlines())
    assert [(row["variant"], row["seeds"]) for row in table] == [("linear", "2"), ("softmax", "2")]
    with pytest.warns(UserWarning, match="there/softmax-seed1/version_0 have one configuration and seed"):
        assert linvit("compare", "--report", "here", "there", "copy", "--skip_costs", cwd=tmp_path).code == 0


def test_a_configuration_stands_for_its_grid_and_its_teacher_is_trained_before_the_runs(parsed, tmp_path, monkeypatch):
    given = ["linearize/quickstart", "--model.attention=linear,focused"]
    grid, (name, *_) = parsed(*given)
    assert (grid.config, name) == (["linearize/quickstart"], "quickstart-attention")
    monkeypatch.undo()
    found = []

    def train(teacher):
        found.append(teacher.config)
        raise UserError("it is trained now")

    monkeypatch.setattr("linvit.cli.compare.run.train_teacher", train)
    assert linvit("compare", *given, "--dry_run", cwd=tmp_path).code == 0
    assert not found
    assert "it is trained now" in linvit("compare", *given, cwd=tmp_path).err
    assert found == ["linearize/teacher"]
    assert not (tmp_path / "checkpoints").exists()
