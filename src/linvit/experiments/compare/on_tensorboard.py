"""The result of an experiment for TensorBoard, whose first screen then says which variant is ahead."""

import shutil
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from linvit.experiments.bench.conditions import conditions
from linvit.experiments.compare import tables
from linvit.experiments.compare.grid import LONGEST, UNSAFE
from linvit.experiments.compare.result_plots import mean_curve
from linvit.experiments.compare.results import Results
from linvit.experiments.plots import bar_plot

FOLDER = "summary"
GROUP = "compare"
"""TensorBoard sorts groups by name, and runs have none before it."""


def write_summary(results: Results, folder: Path, device: str) -> None:
    """Writes runs beside those of the runs: `summary/VARIANT` with the mean score over seeds, and the scores as bars.

    Args:
        results: Of the experiment.
        folder: Of the experiment; a summary that is there is replaced.
        device: What it was measured on.
    """
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    note = "{machine}; {date}".format(**conditions(device))
    bars = [(variant.name, *results.summary(variant)[:2]) for variant in results.variants]
    with SummaryWriter(str(folder / FOLDER)) as writer:
        figure = bar_plot(results.title, bars, f"{results.tag}, mean over seeds", note)
        writer.add_figure(f"{GROUP}/{results.tag}", figure, close=False)
        writer.add_text(GROUP, tables.markdown(results))
    for number, variant in enumerate(results.variants):
        name = UNSAFE.sub("-", variant.name).strip("-.")  # that of runs which exist may have paths in it, and no end
        name = name if len(name) <= LONGEST else f"{name[:LONGEST]}-{number}"
        with SummaryWriter(str(folder / FOLDER / name)) as writer:
            for step, score in mean_curve(variant, results, None):
                writer.add_scalar(f"{GROUP}/{results.tag}", score, int(step))
