"""Writes the results of an experiment: tables, plots, one self-contained page, and a summary for TensorBoard."""

import math
import shutil
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from linvit.callbacks.attention import maps
from linvit.callbacks.report import write_table
from linvit.experiments.compare import tables
from linvit.experiments.compare.grid import LONGEST, UNSAFE
from linvit.experiments.compare.options import differing, option_text, outermost
from linvit.experiments.compare.results import Results, Variant, is_rank
from linvit.experiments.compare.statistics import spread as deviation
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, bar_plot, heat_map, line_plot, small_multiples, svg
from linvit.io.files import rewriting, write_text
from linvit.io.plain_text import read_csv
from linvit.runs.conditions import conditions

MOST_MAPS = 12  # pictures of a run
MOST_POINTS = 60  # of a curve; more are averaged
PAGE, RANKS = "report.html", "ranks.png"
SUMMARY = "summary"
GROUP = "compare"  # TensorBoard sorts groups by name, and runs have none before it


def write(results: Results, folder: Path, device: str) -> Path:
    """Writes tables (`table.md`, `.csv`), plots, and `report.html`, whose path it returns."""
    folder.mkdir(parents=True, exist_ok=True)
    known = conditions(device)
    where = "{machine}; {date}".format(**known)
    plots = difficulty_plots(results, where) | costs_plots(results, where) | curve_plots(results, where)
    texts = {"table.md": tables.markdown(results)}
    texts |= {f"{name}.svg": plot for name, plot in plots.items()}
    for name, text in texts.items():
        write_text(folder / name, text)
    write_table(folder / "table.csv", tables.numbers(results))
    page = Page(results.title)
    page.paragraph("; ".join(f"{name}: {value}" for name, value in known.items()))
    _controls(page, results)
    page.heading(f"Scores and costs: {results.title}")
    titles, *rows = tables.rows(results)
    page.table(titles, rows)
    for note in tables.notes(results):
        page.paragraph(note)
    page.pictures([(plot, name.replace("_", " ")) for name, plot in plots.items()], width=560)
    _ranks(page, results, folder, where)
    _pictures(page, results)
    if results.trouble:
        page.heading("Incomplete runs, whose scores are left out")
        page.table(["variant", "seed", "why"], [[*run, text] for run, text in results.trouble.items()])
    page.write(folder / PAGE)
    return folder / PAGE


def difficulty_plots(results: Results, where: str) -> dict[str, str]:
    """Plots the score over the only numeric option that differs between runs, if others differ as well; best first.

    In diagnostic tasks chance, that of the most frequent class, and ceiling are drawn.
    """
    runs = results.firsts
    options = {name: run.options() for name, run in runs.items()}
    keys = outermost(differing(options.values()))
    numbers = [key for key in keys if all(type(one.get(key)) in (int, float) for one in options.values())]
    if len(numbers) != 1 or len(keys) == 1:
        return {}
    curves: dict[str, list[tuple[float, float, float]]] = {}
    chance: dict[float, float] = {}
    for variant in (one for one in results.variants if one.name in runs):
        own, (mean, spread, _) = options[variant.name], results.summary(variant)
        x = float(own[numbers[0]])
        name = ", ".join(option_text(own, key) for key in keys if key != numbers[0])
        if not math.isnan(mean):
            curves.setdefault(name, []).append((x, mean, spread))
        classes = runs[variant.name].folder / "val_classes.csv"
        if runs[variant.name].model.get("score") == "aAcc" and results.score is None and classes.is_file():
            counts = read_csv(classes, "pixels", lambda row: int(row["pixels"]))
            if sum(counts):
                chance[x] = max(counts) / sum(counts)
    if not curves:
        return {}
    series = [
        Series(name, tuple((x, y) for x, y, _ in sorted(points)), tuple(spread for *_, spread in sorted(points)))
        for name, points in curves.items()
    ]
    series.sort(key=lambda one: statistics.fmean(mean for _, mean in one.points), reverse=True)
    levels = [Series("chance", tuple(sorted(chance.items()))), Series("ceiling", tuple((x, 1.0) for x in chance))]
    ticks = tuple(sorted({x for one in series for x, _ in one.points}))
    axis = Axis(numbers[0].rpartition(".")[2], log=min(ticks) > 0 and _wide(series, 3), ticks=ticks)
    title = f"{results.title}: {results.tag} over {axis.label}"
    drawing = small_multiples(title, series, axis, Axis(results.tag), where, levels if chance else ())
    return {f"score_over_{axis.label}": drawing}


def costs_plots(results: Results, where: str) -> dict[str, str]:
    """Returns score over latency and over MACs, with the Pareto front."""
    measured = [(variant, variant.costs) for variant in results.variants if variant.costs is not None]
    axes = {
        "score_over_latency": ("latency (ms)", "latency_seconds", 1e3),
        "score_over_MACs": ("multiply-accumulates of one image (millions)", "macs", 1e-6),
    }
    plots = {}
    for name, (label, number, unit) in axes.items():
        series = []
        for variant, costs in measured:
            mean, spread, _ = results.summary(variant)
            if not math.isnan(mean):
                series.append(Series(variant.name, ((costs.numbers[number] * unit, mean),), (spread,), (variant.name,)))
        if series:
            title = f"{results.title}: {name.replace('_', ' ')}"
            note = f"grey: the Pareto front; bars: one standard deviation over seeds\n{where}"
            plots[name] = line_plot(title, series, Axis(label, log=_wide(series)), Axis(results.tag), note, front=True)
    return plots


def _wide(series: Sequence[Series], factor: float = 10) -> bool:
    """True if costs differ so much that a logarithmic axis shows them better."""
    values = [x for one in series for x, _ in one.points]
    return max(values) > factor * min(values)


def curve_plots(results: Results, where: str) -> dict[str, str]:
    """Returns score, loss and rank over the steps, mean over seeds."""
    plots = {}
    labels = {"score": (None, results.tag), "loss": ("train/loss", "train/loss")}
    for name, (tag, label) in (labels | {"rank": ("rank", "rank of the attention, mean over layers")}).items():
        series = [_series(variant, results, tag) for variant in results.variants]
        steps = [step for one in series for step, _ in one.points]
        if steps:
            if tag is None:  # a teacher's score is a line
                scores = {variant.name: results.summary(variant)[0] for variant in results.variants if variant.known}
                ends = {name: ((min(steps), score), (max(steps), score)) for name, score in scores.items()}
                series = [Series(one.name, ends[one.name]) if one.name in ends else one for one in series]
            note = f"mean over seeds{', bars: one standard deviation' * any(one.spread for one in series)}\n{where}"
            plots[f"{name}_curves"] = line_plot(f"{results.title}: {name}", series, Axis("step"), Axis(label), note)
    return plots


def _series(variant: Variant, results: Results, tag: str | None) -> Series:
    """Returns a curve with bars for the spread of scores over several seeds."""
    curve = mean_curve(variant, results, tag)
    spreads = tuple(spread for *_, spread in curve)
    bars = spreads if tag is None and not any(map(math.isnan, spreads)) else ()
    return Series(variant.name, tuple((step, mean) for step, mean, _ in curve), bars)


def mean_curve(variant: Variant, results: Results, tag: str | None) -> tuple[tuple[float, float, float], ...]:
    """Returns at most `MOST_POINTS` steps, means and deviations of a curve (None: score, "rank": of all layers)."""
    values: dict[int, list[float]] = {}
    for run in variant.runs.values():
        wanted = tag or run.score_tag(results.score)
        for name, curve in run.curves.items():
            if name == wanted or (tag == "rank" and is_rank(name)):
                for step, value in curve:
                    values.setdefault(step, []).append(value)
    finite = {step: found for step, found in sorted(values.items()) if all(map(math.isfinite, found))}
    means = [(float(step), statistics.fmean(found), deviation(found)) for step, found in finite.items()]
    window = math.ceil(len(means) / MOST_POINTS)
    parts = [means[start : start + window] for start in range(0, len(means), window)] if means else []
    return tuple(
        (part[-1][0], statistics.fmean(mean for _, mean, _ in part), statistics.fmean(spread for *_, spread in part))
        for part in parts
    )


def controls(results: Results) -> str:
    """Reports if the runs differ only in the options that the experiment varies."""
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
    for variant in (one for one in results.variants if not one.known):
        options = [run.options() for run in variant.runs.values()]
        values = [" or ".join(dict.fromkeys(option_text(one, name) for one in options)) for name in names]
        seeds = ", ".join(map(str, sorted(variant.runs)))
        rows.append([variant.name, seeds, *values])
    page.table(["variant", "seeds", *names], rows)


def _ranks(page: Page, results: Results, folder: Path, where: str) -> None:
    last = {variant.name: variant.ranks() for variant in results.variants if not variant.known}
    layers = list(dict.fromkeys(layer for ranks in last.values() for layer in ranks))
    if not layers:
        return
    values = np.array([[ranks.get(layer, np.nan) for layer in layers] for ranks in last.values()])
    figure = heat_map("rank of each layer's attention, mean over heads and seeds", values, list(last), layers, where)
    with rewriting(folder / RANKS) as part:
        figure.savefig(part)
    page.heading("Ranks")
    page.pictures([(svg(figure), "The rank of each layer's attention when it was last measured.")])


def _pictures(page: Page, results: Results) -> None:
    runs = {name: run.folder for name, run in results.firsts.items()}
    validation = {name: sorted(folder.glob("val_*.png")) for name, folder in runs.items()}
    of_maps = {name: sorted((folder / maps.FOLDER).rglob("*.png"))[-MOST_MAPS:] for name, folder in runs.items()}
    for heading, pictures in (("Validation", validation), ("Attention maps", of_maps)):
        found = {name: paths for name, paths in pictures.items() if paths}
        if found:
            page.heading(heading)
        for name, paths in found.items():
            with page.folded(name, opened=len(found) < 4):
                page.pictures([(path, path.stem) for path in paths])


def _list(names: Iterable[str]) -> str:
    return ", ".join(outermost(names)) or "nothing"


def write_summary(results: Results, folder: Path, device: str) -> None:
    """Writes curves for TensorBoard: `summary/VARIANT` with the mean score over seeds, and the scores as bars."""
    shutil.rmtree(folder / SUMMARY, ignore_errors=True)
    note = "{machine}; {date}".format(**conditions(device))
    bars = [(variant.name, *results.summary(variant)[:2]) for variant in results.variants]
    with SummaryWriter(str(folder / SUMMARY)) as writer:
        figure = bar_plot(results.title, bars, f"{results.tag}, mean over seeds", note)
        writer.add_figure(f"{GROUP}/{results.tag}", figure, close=False)
        writer.add_text(GROUP, tables.markdown(results))
    for number, variant in enumerate(one for one in results.variants if not one.known):
        name = UNSAFE.sub("-", variant.name).strip("-.")  # that of runs which exist may have paths in it, and no end
        name = name if len(name) <= LONGEST else f"{name[:LONGEST]}-{number}"
        with SummaryWriter(str(folder / SUMMARY / name)) as writer:
            for step, score, _ in mean_curve(variant, results, None):
                writer.add_scalar(f"{GROUP}/{results.tag}", score, int(step))
