"""Runs and their processes, with short programs in the place of `linvit fit`."""

import os
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import yaml

from linvit import UserError
from linvit.experiments.compare import process, tables
from linvit.experiments.compare.engines import run_here, run_on_ray, run_on_slurm, slots
from linvit.experiments.compare.experiment import Experiment, SweepRun
from linvit.experiments.compare.grid import Sweep
from linvit.experiments.compare.process import ProcessJob
from linvit.io.signals import STOP
from linvit.runs.folder import TUNING
from tests.experiments.compare.runs import write_run

CONFIG = {"trainer": {"max_epochs": 2}, "model": {"class_path": "Task", "init_args": {"attention": "softmax"}}}
PROGRAM = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
with (folder / "starts").open("a") as file: file.write("x")
{0}
"""


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.setattr(STOP, "deferred", False)  # which tests set, as the command does
    draft = Sweep(config=["quickstart"], vary={"model.attention": ["softmax", "linear"]}, seeds=2)
    return Experiment(tmp_path / "x", draft.grid())


@pytest.fixture
def program(monkeypatch):
    """Sets what a run's process does."""

    def replace(**bodies):
        def command(self):
            return [sys.executable, "-S", "-c", PROGRAM.format(bodies.get(self.variant, "")), str(self.folder)]

        monkeypatch.setattr(SweepRun, "command", property(command))

    replace()
    return replace


def configs(**attention):
    return {name: {**CONFIG, "model": {"class_path": "Task", "init_args": {"attention": name}}} for name in attention}


BOTH = {"softmax": 1, "linear": 1}


def run(experiment, jobs=2):
    experiment.prepare(configs(**BOTH))
    with STOP.caught():
        STOP.deferred = True
        todo = [run for run in experiment.runs if run.state not in ("finished", "failed")]
        ended = {run.name: run.state for run in run_here(todo, slots(jobs, [], 1))}
        complete = STOP.received is None
    STOP.release()
    return complete, ended


def test_all_cells_are_run_and_none_again(experiment, program):
    assert run(experiment) == (True, dict.fromkeys([run.name for run in experiment.runs], "finished"))
    assert run(experiment) == (True, {})
    assert [run.name for run in experiment.runs[:2]] == ["softmax-seed0", "linear-seed0"]
    assert all((run.folder / "starts").read_text() == "x" for run in experiment.runs)


def test_a_cell_that_dies_keeps_its_log_and_stops_no_other(experiment, program):
    program(linear="print('linvit: error: the disk is full'); sys.exit(2)")
    complete, states = run(experiment)
    assert complete
    assert states == {
        "softmax-seed0": "finished",
        "softmax-seed1": "finished",
        "linear-seed0": "failed",
        "linear-seed1": "failed",
    }
    (linear,) = (variant for variant in experiment.results().variants if variant.name == "linear")
    assert linear.trouble[0] == f"it failed: the disk is full ({experiment.root / 'linear-seed0' / 'log.txt'})"
    experiment.runs[1].ended(-signal.SIGKILL, 0.0)
    assert experiment.runs[1].last_words() == "its process was ended by SIGKILL"


def test_a_folder_that_is_renamed_meanwhile_ends_the_comparison(experiment, program):
    """Nothing is made in its place; with its name again what is missing is run."""
    renamed = "folder.parent"
    program(softmax=f"{renamed}.rename({renamed}.with_name('elsewhere'))")
    place = experiment.root
    with pytest.raises(UserError, match="seed0' was renamed or deleted while linvit compare was running"):
        run(experiment, jobs=1)
    assert not place.exists()
    place.with_name("elsewhere").rename(place)
    program()
    assert run(experiment) == (True, dict.fromkeys([run.name for run in experiment.runs], "finished"))


def test_a_signal_ends_all_cells_and_the_next_start_runs_what_is_missing(experiment, program):
    program(linear="time.sleep(60)")
    threading.Thread(target=_signal_when, args=(experiment.root / "linear-seed1" / "starts",)).start()
    experiment_states = run(experiment, jobs=4)
    assert experiment_states == (False, {"softmax-seed0": "finished", "softmax-seed1": "finished"} | {
        "linear-seed0": "stopped", "linear-seed1": "stopped"
    })  # fmt: skip
    program()
    assert run(experiment) == (True, {"linear-seed0": "finished", "linear-seed1": "finished"})


def _signal_when(path):
    _wait_for(path)
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGTERM)


LEFT = """
import pathlib, sys, time
from linvit.io.files import lock
folder = pathlib.Path(sys.argv[1])
lock(folder / "checkpoints")
(folder / "begun").touch()
time.sleep(0.5)
(folder / "saved").touch()
"""


def test_a_run_that_a_killed_command_has_left_saves_before_it_is_started_again(experiment, program, capsys):
    experiment.prepare(configs(**BOTH))
    run_, *_ = experiment.runs
    folder = write_run(run_.folder / "version_0")
    left = subprocess.Popen([sys.executable, "-c", LEFT, str(folder)])
    _wait_for(folder / "begun")
    program(softmax="assert (folder / 'version_0/saved').exists()")
    with STOP.caught():
        assert [*run_here([run_], slots(1, [], 1))] == [run_]
    STOP.release()
    left.wait()
    assert run_.state == "finished"
    assert capsys.readouterr().out == "softmax-seed0 waits for the process that a killed command has left\n"


SAVES = """
import pathlib, sys, time
from linvit.runs.folder import TUNING
from linvit.io.signals import STOP
with STOP.caught():
    STOP.deferred = True
    pathlib.Path(sys.argv[1], "begun").touch()
    end = time.monotonic() + 30
    while STOP.received is None and time.monotonic() < end: time.sleep(0.01)
    pathlib.Path(sys.argv[1], f"saved {STOP.received}").touch()
"""
PARENT = """
import sys, time
from linvit.experiments.compare.process import start
process = start([sys.executable, "-c", sys.argv[2], sys.argv[1]], sys.argv[1] + "/log.txt", {})
time.sleep(60)
"""


def test_cells_save_and_end_when_their_parent_is_killed(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), SAVES])
    _wait_for(tmp_path / "begun")
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _wait_for(tmp_path / f"saved {signal.SIGTERM}")


def test_cells_save_under_windows_where_sigterm_kills(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "os", SimpleNamespace(name="nt", environ=os.environ))
    monkeypatch.setattr(subprocess.Popen, "send_signal", subprocess.Popen.kill)
    cell = process.start([sys.executable, "-c", SAVES, str(tmp_path)], str(tmp_path / "log.txt"), {})
    _wait_for(tmp_path / "begun")
    process.stop(cell)
    assert cell.wait(30) == 0
    assert (tmp_path / f"saved {signal.SIGTERM}").exists()


def _wait_for(path):
    until = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < until, f"{path.name} has not come about"
        time.sleep(0.01)


def test_a_cell_of_another_configuration_is_refused(experiment):
    experiment.prepare(configs(**BOTH))
    other = configs(**BOTH)
    other["linear"]["trainer"] = {"max_epochs": 3}
    with pytest.raises(UserError, match=r"linear-seed0' is a run of another configuration: its trainer.max_epochs"):
        experiment.prepare(other)


def test_a_student_of_a_run_in_its_folder_is_not_taken_for_the_run(experiment):
    experiment.prepare(configs(**BOTH))
    run = experiment.runs[0]
    teacher = write_run(run.folder / "version_0")
    assert run.newest.folder == teacher
    write_run(run.folder / "version_1", attention="linear", teacher={"source": f"{teacher}/checkpoints/best.ckpt"})
    assert run.newest.folder == teacher
    again = write_run(run.folder / "version_2")  # the run before it has not saved
    assert run.newest.folder == again


def test_a_run_that_ended_well_without_its_last_evaluation_is_run_again(experiment):
    experiment.prepare(configs(**BOTH))
    run = experiment.runs[0]
    folder = write_run(run.folder / "version_0", scores=(0.5, 0.0), epochs=3)
    assert run.ended(0, 1.0) == "finished"
    assert run.state == "stopped"
    softmax = experiment.results().variants[0]
    assert softmax.scores(None) == {}
    assert softmax.trouble[0] == "its last evaluation is that of epoch 2 of 3, step 20"
    write_run(folder, scores=(0.5, 0.0, 0.75), epochs=3)
    assert run.state == "finished"
    assert experiment.results().variants[0].scores(None) == {0: (0.75, 29, 3)}


def test_devices_and_threads_are_shared_out(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("linvit.io.machine.cpus", lambda: 8.5)  # as a container may grant
    assert [slot["OMP_NUM_THREADS"] for slot in slots(3, [], 1)] == ["2", "2", "2"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(3, ["0", "1"], 1)] == ["0", "1", "0"]
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots(2, ["4", "5", "6", "7"], 2)] == ["4,5", "6,7"]


def test_cells_that_run_at_a_time_see_their_own_devices(experiment, program):
    body = 'import os; (folder / "devices").write_text(os.environ["CUDA_VISIBLE_DEVICES"]); time.sleep(1)'
    program(softmax=body, linear=body)
    experiment.prepare(configs(**BOTH))
    with STOP.caught():
        assert len([*run_here(experiment.runs, slots(2, ["4", "5", "6", "7"], 2))]) == 4
    devices = [(run.folder / "devices").read_text() for run in experiment.runs]
    assert {*devices[:2]} == {*devices[2:]} == {"4,5", "6,7"}  # two at a time


def test_ray_that_is_not_installed_is_named(experiment, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs the package 'ray': pip install 'linvit\[ray\]'"):
        next(run_on_ray(experiment.runs, None, 1, 0))


@pytest.mark.slow
def test_cells_on_ray(experiment, program):
    pytest.importorskip("ray")
    program(linear="sys.exit(2)")
    experiment.prepare(configs(**BOTH))
    with STOP.caught():
        assert len([*run_on_ray(experiment.runs, None, 1, 0)]) == 4
    STOP.release()
    assert [run.state for run in experiment.runs] == ["finished", "failed"] * 2


def on_slurm(experiment, cluster):
    """Runs what is missing by one of submitit's executors that need no cluster."""
    experiment.prepare(configs(**BOTH))
    with STOP.caught():
        STOP.deferred = True
        todo = [run for run in experiment.runs if run.state not in ("finished", "failed")]
        for _ in run_on_slurm(todo, cluster, timeout_min=5) if todo else ():
            pass
        complete = STOP.received is None
    STOP.release()
    return complete, [run.state for run in experiment.runs]


def test_submitit_that_is_not_installed_is_named_and_so_is_a_machine_without_slurm(experiment, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match=r"SLURM does not take the jobs: .*srun"):
        run_on_slurm(experiment.runs)
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match=r"needs the package 'submitit': pip install 'linvit\[slurm\]'"):
        run_on_slurm(experiment.runs)


SBATCH = """#!/bin/sh
cp "$1" {folder}/submitted
echo "sbatch: error: invalid partition specified: gpu" >&2
exit 1
"""


def test_what_slurm_is_asked_for_and_what_it_refuses(experiment, tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    for name, text in (("sbatch", SBATCH.format(folder=tmp_path)), ("srun", "#!/bin/sh")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    experiment.prepare(configs(**BOTH))
    with pytest.raises(UserError, match=r"SLURM does not take the jobs: (.|\n)*invalid partition specified: gpu"):
        run_on_slurm(
            experiment.runs,
            cpus_per_task=4,
            timeout_min=90,
            slurm_partition="gpu",
            gpus_per_node=2,
            slurm_array_parallelism=3,
        )
    lines = (tmp_path / "submitted").read_text(encoding="utf-8").splitlines()
    asked = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")}
    assert asked >= {
        "array=0-3%3",
        "cpus-per-task=4",
        "gpus-per-node=2",
        "ntasks-per-node=1",
        "partition=gpu",
        "time=90",
    }
    assert asked >= {"job-name=linvit-x", "signal=USR1@120"}  # at which a run saves


@pytest.mark.slow
def test_cells_as_jobs(experiment, program):
    pytest.importorskip("submitit")
    program(linear="print('linvit: error: the disk is full'); sys.exit(2)")
    assert on_slurm(experiment, "local") == (True, ["finished", "failed"] * 2)
    assert experiment.runs[1].last_words() == "the disk is full"
    assert on_slurm(experiment, "local") == (True, ["finished", "failed"] * 2)
    assert all((run.folder / "starts").read_text() == "x" for run in experiment.runs)


@pytest.mark.slow
def test_a_signal_cancels_the_jobs_and_the_next_start_runs_what_is_missing(experiment, program):
    pytest.importorskip("submitit")
    program(linear="time.sleep(60)")
    threading.Thread(target=_signal_when, args=(experiment.root / "linear-seed1" / "starts",)).start()
    assert on_slurm(experiment, "local") == (False, ["finished", "stopped"] * 2)
    program()
    assert on_slurm(experiment, "local") == (True, ["finished"] * 4)


def test_a_job_whose_time_is_over_lets_its_cell_save_and_is_queued_again(tmp_path):
    helpers = pytest.importorskip("submitit.helpers")
    job, arguments = ProcessJob(), ([sys.executable, "-c", SAVES, str(tmp_path)], str(tmp_path / "log.txt"), {})
    thread = threading.Thread(target=job, args=arguments)
    thread.start()
    _wait_for(tmp_path / "begun")
    again = job.checkpoint(*arguments)
    assert (tmp_path / f"saved {signal.SIGTERM}").exists()
    assert isinstance(again, helpers.DelayedSubmission)
    assert (type(again.function), again.args) == (ProcessJob, arguments)
    thread.join()


def test_all_lines_of_an_error_are_its_last_words(experiment):
    run = experiment.runs[0]
    run.folder.mkdir(parents=True, exist_ok=True)
    run.log.write_text('begins\nlinvit: error: Parser key "model":\n  Problem:\n    No such option.\nSee --help\n')
    assert run.last_words() == 'Parser key "model": Problem: No such option.'


def test_values_whose_tuning_run_has_failed_are_named(tmp_path):
    draft = Sweep(
        config=["quickstart"], vary={"model.attention": ["softmax"]}, tune={"model.lr": [0.001, 0.002]}
    ).grid()
    tuning = Experiment(tmp_path / TUNING, draft.all_trials())
    tuning.root.mkdir()
    tuning.save()
    for run, failed in zip(tuning.runs, (False, True), strict=True):
        write_run(run.folder / "version_0")
        run.ended(int(failed), 1)
    found = Experiment(tmp_path, draft.tuned({tuning.runs[0].variant: 0.75})).results()
    assert found.unscored == [tuning.runs[1].variant]
    assert f"as these runs have no score: {tuning.runs[1].variant}." in tables.markdown(found)


def test_a_comparison_of_0_2_is_read(tmp_path):
    before = {"config": ["quickstart"], "variants": {"a": {}}, "search": "grid", "trials": 20, "budget": "cpu_time"}
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(before))
    assert list(Experiment.of(tmp_path).grid.variants) == ["a"]
