"""`linvit compare --report`: the table of runs that exist; and the end of `linvit compare`."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.errors import UserError, check_choice
from linvit.experiments.compare import costs, tables
from linvit.experiments.compare import report as written
from linvit.experiments.compare.experiment import FILE, Experiment
from linvit.experiments.compare.options import differing
from linvit.experiments.compare.results import Results, check_comparable, group, with_published
from linvit.runs.folder import find, shown
from linvit.terminal import reflow

BUDGET = 2.0  # seconds of timing for each variant


def report(folders: Sequence[Path], args: argparse.Namespace) -> int:
    """Makes the table of the runs in folders; returns the exit code.

    Raises:
        UserError: If there are no runs, or they cannot be compared.
    """
    experiment = Experiment.of(folders[0]) if len(folders) == 1 else None
    if experiment is not None:
        root, results = folders[0], experiment.results()
    else:
        variants = group(find(folders))
        check_comparable(variants)
        keys = list(differing(run.options() for variant in variants for run in variant.runs.values()))
        root = Path("checkpoints", "compare", args.name or "report")
        results = Results(root.name, variants, variants[0].name, None, keys)
    names = [variant.name for variant in results.variants]
    baseline = args.baseline or results.baseline
    check_choice("--baseline", baseline, names)
    results = Results(
        results.title, results.variants, baseline, args.score or results.score, results.keys, results.source
    )
    folder = shlex.quote(str(root / FILE))
    return finish(results, root, args, f"linvit compare {folder} --name {shlex.quote(root.name)}" if experiment else "")


def finish(results: Results, root: Path, args: argparse.Namespace, command: str) -> int:
    """Measures the models, writes the report, prints the table; returns 1 if runs are missing, else 0."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    firsts = {v.name: v.runs[min(v.runs)] for v in results.variants if v.runs}
    if not firsts:
        lines = [f"{v.name}, seed {seed}: {text}" for v in results.variants for seed, text in v.trouble.items()]
        raise UserError("no run has begun to train, so there is nothing to compare:\n  " + "\n  ".join(lines))
    if not args.skip_costs:
        measured = costs.measure(firsts, BUDGET * len(firsts), device, imports=not args.report)
        for variant in results.variants:
            variant.costs = measured.get(variant.name)
            if isinstance(variant.costs, str):
                rank_zero_warn(f"the costs of {variant.name} could not be measured: {variant.costs}")
        results = results if results.source else with_published(results)
    page = written.write(results, root, device)
    written.write_summary(results, root, device)
    table, *notes = tables.markdown(results).split("\n\n")
    print("\n\n".join([f"\n{table}", *map(reflow, [*notes, written.controls(results)])]))
    troubled = {f"{v.name}, seed {seed}": text for v in results.variants for seed, text in v.trouble.items()}
    for run, text in troubled.items():
        print(f"incomplete: {run}: {text}")
    if troubled and command:
        failed = " --retry" * any(text.startswith("it failed") for text in troubled.values())
        print(f"run what is incomplete with\n  {command.removesuffix(failed)}{failed}")
    rank_zero_info(f"the report is {shown(page)}; the curves: tensorboard --logdir {shown(root)}")
    return 1 if troubled else 0
