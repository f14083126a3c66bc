"""Writes what an experiment amounts to: tables, plots, one self-contained page, and a summary for TensorBoard."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from linvit.callbacks.attention import maps, rank
from linvit.callbacks.attention.heat_map import heat_map
from linvit.experiments.bench.conditions import conditions
from linvit.experiments.compare import tables
from linvit.experiments.compare.grid import LONGEST, UNSAFE
from linvit.experiments.compare.options import option_text, outermost
from linvit.experiments.compare.result_plots import costs_plots, curve_plots, mean_curve
from linvit.experiments.compare.results import Results, Variant
from linvit.experiments.page import Page
from linvit.experiments.plots import bar_plot
from linvit.files import replacing
from linvit.runs.folder import RunFolder

MOST_MAPS = 12  # pictures of a run
PAGE, RANKS = "report.html", "ranks.png"
SUMMARY = "summary"
GROUP = "compare"
"""TensorBoard sorts groups by name, and runs have none before it."""


def write(results: Results, folder: Path, device: str) -> Path:
    """Writes tables (`table.md`, `.csv`, `.tex`), plots, and `report.html`; returns the path of the last.

    Args:
        results: Of the experiment.
        folder: Where they go; it is made if need be.
        device: What costs were measured on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = conditions(device)
    where = "{machine}; {date}".format(**known)
    plots = {**costs_plots(results, where), **curve_plots(results, where)}
    texts = {
        "table.md": tables.markdown(results),
        "table.csv": tables.csv_text(results),
        "table.tex": tables.latex(results),
        **{f"{name}.svg": plot for name, plot in plots.items()},
    }
    for name, text in texts.items():
        with replacing(folder / name) as file:
            file.write(text.encode())
    page = Page(results.title)
    page.paragraph("; ".join(f"{name}: {value}" for name, value in known.items()))
    _controls(page, results)
    page.heading("Scores and costs")
    page.table(tables.titles(results), tables.rows(results))
    for note in tables.notes(results):
        page.paragraph(note)
    page.pictures([(plot, name.replace("_", " ")) for name, plot in plots.items()], width=560)
    _ranks(page, results, folder, where)
    _pictures(page, results)
    _trouble(page, results)
    page.write(folder / PAGE)
    return folder / PAGE


def controls(results: Results) -> str:
    """Says whether the runs differ only in what the experiment varies."""
    own, others = results.controls()
    runs = sum(len(variant.runs) for variant in results.variants)
    if not others:
        return f"Controlled: the complete configurations of {runs} runs differ only in {_list(own)}, and in their seed."
    return (
        f"NOT controlled: the complete configurations of {runs} runs differ in {_list(own)}, "
        f"and in {_list(others)}, which is not what is compared."
    )


def _controls(page: Page, results: Results) -> None:
    page.heading("Controls")
    page.paragraph(controls(results))
    own, others = results.controls()
    names = outermost([*own, *others])
    rows = []
    for variant in results.variants:
        options = [run.options() for run in variant.runs.values()]
        values = [" or ".join(dict.fromkeys(option_text(one, name) for one in options)) for name in names]
        seeds = ", ".join(map(str, sorted(variant.runs)))
        rows.append([variant.name, seeds, *values])
    page.table(["variant", "seeds", *names], rows)


def _ranks(page: Page, results: Results, folder: Path, where: str) -> None:
    """Each layer's rank at the end, and the pictures of layers over time that `AttentionRank` wrote into the runs."""
    last = {variant.name: variant.ranks() for variant in results.variants}
    layers = list(dict.fromkeys(layer for ranks in last.values() for layer in ranks))
    if not layers:
        return
    values = np.array([[ranks.get(layer, np.nan) for layer in layers] for ranks in last.values()])
    heat_map(values, list(last), layers, "rank of each layer's attention, mean over heads and seeds", where).save(
        folder / RANKS
    )
    page.heading("Ranks")
    page.pictures([(folder / RANKS, "The rank of each layer's attention when it was last measured.")])
    runs = {variant.name: _first(variant) for variant in results.variants}
    pictures = {name: run.folder / rank.PICTURE for name, run in runs.items() if run is not None}
    if found := [(path, f"rank of {name}") for name, path in pictures.items() if path.exists()]:
        page.paragraph("The same while it trained, of the first seed of each variant.")
        page.pictures(found)


def _pictures(page: Page, results: Results) -> None:
    """The pictures in the first run of each variant: of the last validation, and of `AttentionMaps`."""
    runs = {variant.name: run.folder for variant in results.variants if (run := _first(variant)) is not None}
    validation = {name: sorted(folder.glob("val_*.png")) for name, folder in runs.items()}
    of_maps = {name: sorted((folder / maps.FOLDER).rglob("*.png"))[-MOST_MAPS:] for name, folder in runs.items()}
    for heading, pictures in (("Validation", validation), ("Attention maps", of_maps)):
        found = {name: paths for name, paths in pictures.items() if paths}
        if found:
            page.heading(heading)
        for name, paths in found.items():
            with page.folded(name, opened=len(found) < 4):
                page.pictures([(path, path.stem) for path in paths])


def _trouble(page: Page, results: Results) -> None:
    troubled = [variant for variant in results.variants if variant.trouble]
    if troubled:
        page.heading("Incomplete runs, whose scores are left out")
        rows = [[v.name, str(seed), text] for v in troubled for seed, text in sorted(v.trouble.items())]
        page.table(["variant", "seed", "why"], rows)


def _first(variant: Variant) -> RunFolder | None:
    return variant.runs[min(variant.runs)] if variant.runs else None


def _list(names: Iterable[str]) -> str:
    return ", ".join(outermost(names)) or "nothing"


def write_summary(results: Results, folder: Path, device: str) -> None:
    """Writes runs beside those of the runs: `summary/VARIANT` with the mean score over seeds, and the scores as bars.

    Args:
        results: Of the experiment.
        folder: Of the experiment; a summary that is there is replaced.
        device: What it was measured on.
    """
    shutil.rmtree(folder / SUMMARY, ignore_errors=True)
    note = "{machine}; {date}".format(**conditions(device))
    bars = [(variant.name, *results.summary(variant)[:2]) for variant in results.variants]
    with SummaryWriter(str(folder / SUMMARY)) as writer:
        figure = bar_plot(results.title, bars, f"{results.tag}, mean over seeds", note)
        writer.add_figure(f"{GROUP}/{results.tag}", figure, close=False)
        writer.add_text(GROUP, tables.markdown(results))
    for number, variant in enumerate(results.variants):
        name = UNSAFE.sub("-", variant.name).strip("-.")  # that of runs which exist may have paths in it, and no end
        name = name if len(name) <= LONGEST else f"{name[:LONGEST]}-{number}"
        with SummaryWriter(str(folder / SUMMARY / name)) as writer:
            for step, score in mean_curve(variant, results, None):
                writer.add_scalar(f"{GROUP}/{results.tag}", score, int(step))
