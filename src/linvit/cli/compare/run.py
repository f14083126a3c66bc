"""`linvit compare`: checks all runs, starts missing ones, and writes the table of these or of other runs."""

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.data.base import ImageData
from linvit.errors import UserError, check_choice, find_user_error
from linvit.experiments.compare import costs, tables
from linvit.experiments.compare import report as written
from linvit.experiments.compare.engines import run_here, run_on_ray, run_on_slurm, say_how_it_ended, slots
from linvit.experiments.compare.experiment import FILE, Experiment, SweepRun
from linvit.experiments.compare.grid import TUNING_SEED, Sweep
from linvit.experiments.compare.options import differing
from linvit.experiments.compare.results import (
    Results,
    check_comparable,
    group,
    with_published,
    with_teachers,
)
from linvit.io.files import check_writable
from linvit.io.plain_text import in_shell, shown
from linvit.io.signals import STOP
from linvit.io.signals import name as signal_name
from linvit.io.terminal import reflow, table
from linvit.runs import result
from linvit.runs.folder import TUNING, find
from linvit.runs.options import read_config, replace_options, stage_config
from linvit.runs.parser import Config, build_task
from linvit.runs.resolve import root_of
from linvit.runs.run import Run
from linvit.runs.train_teacher import train_teacher
from linvit.tasks import Teacher
from linvit.tasks.pretrained import skip_pretrained

GPU = ("auto", "gpu", "cuda")
BUDGET = 2.0  # seconds of timing per variant


def run(spec: Sweep, title: str, args: argparse.Namespace, command: str) -> int:
    """Runs an experiment in a folder named by the title; `command` resumes it. Returns the exit code."""
    grid = spec.grid()
    if len(grid.variants) == len(grid.all_seeds) == 1 and not grid.tune:
        raise UserError(
            "nothing differs between the runs: vary an option, such as --model.attention=softmax,linear, or "
            "several seeds, such as --seeds=3. linvit fit trains a single run"
        )
    configs = resolve(grid)
    own = None if args.name else _own_folder(args.grid)
    root = (own or root_of(next(iter(configs.values()))) / "compare" / title).absolute()
    check_writable(root)
    if args.dry_run:
        parts = [grid.all_trials(), grid] if grid.tune else [grid]
        runs = [(run, part.variants[run.variant]) for part in parts for run in Experiment(root, part).runs]
        print("\n".join(table([("run", "what differs"), *((f"  {run.name}", _words(given)) for run, given in runs)])))
        return 0
    with STOP.caught():
        teachers = [config["model"]["init_args"].get("teacher") for config in configs.values()]
        trained = [train_teacher(Teacher.of(teacher)) for teacher in teachers if teacher is not None]
        if any(trained):
            configs = resolve(grid)  # names its checkpoint
        if grid.tune:
            tuned = _tuned(grid, root / TUNING, args)
            if isinstance(tuned, Experiment):
                return _stopped(tuned, command)
            grid, configs = tuned, resolve(tuned)
        experiment = Experiment(root, grid)
        if not _complete(experiment, configs, args):
            return _stopped(experiment, command)
        return finish(experiment.results(), root, args, command)


def _own_folder(grid: str | None) -> Path | None:
    """Returns the folder of the experiment if its own grid file is given, which resumes it; None for other grids."""
    path = Path(grid or "")
    experiment = Experiment.of(path.parent) if path.name == FILE else None
    begun = experiment is not None and any(run.config.exists() for run in experiment.runs)
    return path.parent if begun else None


def _tuned(grid: Sweep, folder: Path, args: argparse.Namespace) -> Sweep | Experiment:
    """Returns the grid with the best values of the tuned options, or the experiment if a signal stopped the tuning."""
    trials = grid.all_trials()
    tuning = Experiment(folder, trials)
    if not _complete(tuning, _with_other_samples(resolve(trials)), args):
        return tuning
    results = tuning.results()
    scores = {variant.name: results.sign * results.summary(variant)[0] for variant in results.variants}
    return grid.tuned({name: score for name, score in scores.items() if not math.isnan(score)})


def _with_other_samples(configs: dict[str, Config]) -> dict[str, Config]:
    """Returns the configurations with other generated images, so that tuning uses none of the table's images."""
    for config in configs.values():
        data = config["data"]["init_args"]
        for options, name in ((data, "samples_seed"), (data.get("scenes") or {}, "seed")):
            if name in options:
                options[name] += TUNING_SEED
    return configs


def _complete(experiment: Experiment, configs: dict[str, Config], args: argparse.Namespace) -> bool:
    """Starts the missing runs of an experiment; returns True if all have been run."""
    experiment.prepare(configs)
    runs = experiment.runs
    waiting = [run for run in runs if run.state != "finished" and (args.retry or run.state != "failed")]
    done = f", {len(runs) - len(waiting)} of them are finished" if len(waiting) < len(runs) else ""
    rank_zero_info(f"{len(runs)} runs in {shown(experiment.root)}{done}")
    STOP.deferred = True  # the runs save first; before and after them a signal ends this process immediately
    try:
        for run in _run(waiting, configs, args) if waiting else ():
            say_how_it_ended(runs, run)
        return STOP.received is None
    finally:
        STOP.deferred = False


def _stopped(experiment: Experiment, command: str) -> int:
    assert STOP.received is not None
    runs = experiment.runs
    how = f"ended by {signal_name(STOP.received)}: {sum(run.state == 'finished' for run in runs)} of {len(runs)} runs"
    rank_zero_info(f"{how} are finished. Resume with\n  {command}")
    return STOP.exit_code(STOP.received)


def report(folders: Sequence[Path], args: argparse.Namespace) -> int:
    """Writes the table of the runs in folders; returns the exit code."""
    experiment = Experiment.of(folders[0]) if len(folders) == 1 else None
    if experiment is not None:
        root, results = folders[0], experiment.results()
    else:
        variants = group(find(folders))
        check_comparable(variants)
        keys = list(differing(result.portable(run.options()) for variant in variants for run in variant.runs.values()))
        root = Path("checkpoints", "compare", args.name or "report")
        results = with_teachers(Results(root.name, variants, "", None, keys))
    names = [variant.name for variant in results.variants]
    baseline = args.baseline or results.baseline
    check_choice("--baseline", baseline, names)
    results = replace(results, baseline=baseline, score=args.score or results.score)
    return finish(results, root, args, f"linvit compare {in_shell(root / FILE)}" if experiment else "")


def finish(results: Results, root: Path, args: argparse.Namespace, command: str) -> int:
    """Measures the models, writes the report, prints the table; returns 1 if runs are missing, else 0."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    troubled = [f"{name}, seed {seed}: {text}" for (name, seed), text in results.trouble.items()]
    if not (firsts := results.firsts):
        raise UserError("no run has begun to train, so there is nothing to compare:\n  " + "\n  ".join(troubled))
    if not args.skip_costs:
        measured = costs.measure(
            firsts, BUDGET * len(firsts), device, imports=not args.report, teachers=results.teachers
        )
        for variant in results.variants:
            found = measured.get(variant.name)
            if isinstance(found, str):
                rank_zero_warn(f"the costs of {variant.name} could not be measured: {found}")
            else:
                variant.costs = found
        results = results if results.source else with_published(results)
    page = written.write(results, root, device)
    written.write_summary(results, root, device)
    title, table, *notes = tables.markdown(results).split("\n\n")
    print("\n\n".join([f"\n{title}", table, *map(reflow, [*notes, written.controls(results)])]))
    for line in troubled:
        print(f"incomplete: {line}")
    if command and any(variant.trouble for variant in results.variants):  # a NaN score would occur again
        failed = " --retry" * any(text.startswith("it failed") for text in results.trouble.values())
        print(f"run the incomplete ones with\n  {command.removesuffix(failed)}{failed}")
    rank_zero_info(f"the report is {shown(page)}; the curves: tensorboard --logdir {in_shell(root)}")
    return 1 if troubled else 0


def _run(runs: Sequence[SweepRun], configs: dict[str, Config], args: argparse.Namespace) -> Iterator[SweepRun]:
    accelerators = {config["trainer"]["accelerator"] for config in configs.values()}
    if args.engine == "ray":
        gpus = args.gpus_per_run if accelerators & {*GPU} else 0
        return run_on_ray(runs, args.address, args.cpus_per_run, gpus)
    if args.engine == "slurm":
        gpus = args.gpus_per_run if accelerators != {"cpu"} else 0
        return run_on_slurm(
            runs, timeout_min=args.minutes, slurm_partition=args.partition, cpus_per_task=args.cpus_per_run,
            gpus_per_node=gpus or None, slurm_array_parallelism=args.jobs,
        )  # fmt: skip
    devices = _devices(configs, args.gpus_per_run)
    jobs = args.jobs or max(1, len(devices) // args.gpus_per_run)
    given = slots(jobs, devices, args.gpus_per_run)
    where = f"{len(devices)} GPUs" if devices else f"the CPU, threads of each: {given[0]['OMP_NUM_THREADS']}"
    rank_zero_info(f"parallel runs: {jobs}, on {where}")
    return run_here(runs, given)


def _devices(configs: dict[str, Config], per_run: int) -> list[str]:
    """Returns the CUDA devices that runs may use; [] if they train on another accelerator."""
    trainers = [config["trainer"] for config in configs.values()]
    if not torch.cuda.is_available() or any(trainer["accelerator"] not in GPU for trainer in trainers):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
    wanted = [trainer["devices"] for trainer in trainers if isinstance(trainer["devices"], int)]
    if max(wanted, default=1) > per_run:
        raise UserError(f"trainer.devices is {max(wanted)}: add --gpus_per_run={max(wanted)}")
    if per_run > len(devices):
        raise UserError(f"--gpus_per_run={per_run}, but this machine has {len(devices)} GPUs")
    return devices


def _words(settings: Any) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "nothing"


def resolve(grid: Sweep) -> dict[str, Config]:
    """Returns the complete configuration of each variant; builds each model, without memory for its weights."""
    base = replace_options(read_config(grid.config), grid.set)
    found: dict[str, Config] = {}
    made: dict[str, ImageData] = {}  # data modules by their configuration
    for name, settings in grid.variants.items():
        config = replace_options(base, settings)
        try:
            run = Run.from_config(config)
            for stage in config["stages"] or []:
                Run.from_config(stage_config(config, stage))
            key = repr(run.config["data"])
            run.data = made[key] = made.get(key) or run.data
            _build(run)
        except Exception as error:
            mistake = find_user_error(error)
            if mistake is None:
                raise
            raise UserError(f"the variant '{name}' ({_words(settings)}) cannot be run: {mistake}") from error
        complete = {key: value for key, value in run.config.items() if key != "config"}
        for other, before in found.items():
            if before == complete:
                raise UserError(f"the variants '{other}' and '{name}' are the same run. Remove one of them")
        found[name] = complete
    return found


def _build(run: Run) -> None:
    """Builds the task on the meta device, where no weights are stored; if that fails, on the CPU."""
    facts = run.facts
    with skip_pretrained():
        try:
            with torch.device("meta"):
                build_task(run.config["model"], **facts)
        except UserError:
            raise
        except Exception:
            build_task(run.config["model"], **facts)
