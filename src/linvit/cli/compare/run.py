"""`linvit compare`: checks all runs, starts those that are missing, and writes the report."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from linvit.cli.compare.report import finish
from linvit.cli.compare.resolve import resolve
from linvit.errors import UserError
from linvit.experiments.compare.engines import Demands, run_here, run_on_ray, run_on_slurm, slots
from linvit.experiments.compare.experiment import Experiment, SweepRun
from linvit.experiments.compare.grid import SweepSpec
from linvit.experiments.compare.progress import Progress
from linvit.runs.folder import check_writable, shown
from linvit.signals import STOP, name
from linvit.terminal import table

GPU = ("auto", "gpu", "cuda")


def run(spec: SweepSpec, title: str, args: argparse.Namespace, command: str) -> int:
    """Runs an experiment.

    Args:
        spec: Its grid.
        title: Names its folder.
        args: Options of the command line.
        command: The command line, to say how to resume.

    Returns:
        The exit code.

    Raises:
        UserError: If a run cannot be started, or there is only one.
    """
    grid = spec.grid()
    if len(grid.variants) == len(grid.seeds) == 1:
        raise UserError(
            "nothing differs between the runs: vary an option, such as --model.attention=softmax,linear, or "
            "several seeds, such as --seeds=3. linvit fit trains a single run"
        )
    configs = resolve(grid)
    root = Path(next(iter(configs.values()))["trainer"].get("default_root_dir") or "checkpoints") / "compare" / title
    check_writable(root)
    experiment = Experiment(root.absolute(), grid)
    if args.dry_run:
        rows = [(f"  {run.name}", _words(grid.variants[run.variant])) for run in experiment.runs]
        print("\n".join(table([("run", "what differs"), *rows])))
        return 0
    with STOP.caught():
        STOP.deferred = True
        experiment.prepare(configs)
        runs = experiment.runs
        waiting = [run for run in runs if run.state != "finished" and (args.retry or run.state != "failed")]
        done = f", {len(runs) - len(waiting)} of them are done" if len(waiting) < len(runs) else ""
        rank_zero_info(f"{len(runs)} runs in {shown(root)}{done}")
        progress = Progress(runs)
        try:
            complete = not waiting or _run(waiting, configs, args, progress)
        finally:
            progress.close()
        if not complete:
            assert STOP.received is not None
            finished = sum(run.state == "finished" for run in runs)
            rank_zero_info(
                f"ended by {name(STOP.received)}: {finished} of {len(runs)} runs are finished. Resume with\n  {command}"
            )
            return STOP.exit_code(STOP.received)
        STOP.deferred = False
        return finish(experiment.results(), root, args, command)


def _run(
    runs: Sequence[SweepRun], configs: dict[str, dict[str, Any]], args: argparse.Namespace, progress: Progress
) -> bool:
    """Starts runs by the engine that was asked for; returns whether all have been run."""
    accelerators = {config["trainer"]["accelerator"] for config in configs.values()}
    if args.engine == "ray":
        gpus = args.gpus_per_run if accelerators & {*GPU} else 0
        return run_on_ray(runs, args.address, args.cpus_per_run, gpus, progress)
    if args.engine == "slurm":
        gpus = args.gpus_per_run if accelerators != {"cpu"} else 0
        demands = Demands(args.minutes, args.partition, args.cpus_per_run, gpus, args.jobs)
        return run_on_slurm(runs, demands, progress)
    devices = _devices(configs, args.gpus_per_run)
    jobs = args.jobs or max(1, len(devices) // args.gpus_per_run)
    given = slots(jobs, devices, args.gpus_per_run)
    where = f"{len(devices)} GPUs" if devices else f"the CPU, threads of each: {given[0]['OMP_NUM_THREADS']}"
    rank_zero_info(f"runs at a time: {jobs}, on {where}")
    return run_here(runs, given, progress)


def _devices(configs: dict[str, dict[str, Any]], per_run: int) -> list[str]:
    """The CUDA devices that runs may use; none if they train on another accelerator."""
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
