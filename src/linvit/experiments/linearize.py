"""What came of a network whose attention was replaced: scores, errors of layers, time and memory, maps, as one page."""

import copy
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from linvit.analysis.maps import Query
from linvit.analysis.recorder import layer_name, observe
from linvit.callbacks.attention.maps import Maps, attention_maps, gallery
from linvit.callbacks.common import DARK, LIGHT
from linvit.callbacks.report import write_table
from linvit.errors import UserError
from linvit.experiments.analyze import Photo, read_photos
from linvit.experiments.bench.costs import Cost
from linvit.experiments.crossover import costs_by_size, crossover, times_of
from linvit.experiments.keep import TABLE, add_curve
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, heat_map, line_plot, svg
from linvit.files import replacing
from linvit.plain_text import markdown_table
from linvit.runs.conditions import conditions
from linvit.runs.folder import RunFolder
from linvit.runs.run import Run
from linvit.tasks import Task, Teacher
from linvit.tasks.teacher import DISTANCE, START, TEACHER, teacher_network

PAGE = "linearize.html"
SECONDS = 8.0  # for the timing of all sizes, and again for maps; one size and one image are measured in any case
IMAGES = 2  # of which maps are drawn
COLUMNS = 11  # of the heat map, and ticks of the plot over epochs
INTRODUCTION = (
    "The teacher is a trained network: {teacher}. The student is a copy of it with another attention: {student}. It "
    "was trained beside its teacher."
)
SCORES = (
    "{metric} of the validation split; higher is better. Before any step the student has the weights of its teacher "
    "that it has a place for, and new parameters at their initial values."
)
ERRORS = (
    "How far what a layer's attention puts out is from what that of the teacher does, on the same images: mean squared "
    "error over the teacher's mean square, so 0 is the same, and 1 as far off as zeros would be. Attention outputs are "
    "taken before the output projection. Of the first batch of the validation split, in evaluation mode."
)
SPEED = (
    "Forward pass of one image, median; teacher and student take turns. Memory is the most that the pass allocates, "
    "beyond weights and image. Measured on {device}, so the size from which the student is faster holds for that alone."
)
MAPS = (
    "Where the token with the red ring (without a ring: the class token) looks: its row of each layer's attention "
    "matrix, mean over heads, light is much; and what reaches it through all layers (rollout). Negative weights are "
    "drawn as 0."
)


class Findings(NamedTuple):
    """What a run has logged of its teacher and of itself, and what both cost."""

    scores: dict[str, float]  # of the validation split, by network
    errors: dict[str, dict[str, float]]  # of each layer, relative to its teacher's, at the "start" and after epochs
    costs: list[Cost]  # of teacher and student, at the same sizes, in turns
    device: str  # on which costs were measured

    def tables(self, metric: str) -> list[tuple[str, str, list[list[str]]]]:
        """Heading, what a table shows, and its rows, the titles first."""
        scores = [["network", metric], *([name, f"{score:.4f}"] for name, score in self.scores.items())]
        when = [*self.errors][:: max(len(self.errors) - 1, 1)]  # the first and the last
        ends = [{**self.errors[name], "mean": float(np.mean([*self.errors[name].values()]))} for name in when]
        errors = [["layer", *(name if name == "start" else f"after epoch {name}" for name in when)]]
        errors += [[layer, *(f"{end.get(layer, np.nan):.4f}" for end in ends)] for layer in (ends[0] if ends else ())]
        costs = [["side", "teacher (ms)", "student (ms)", "student / teacher", "teacher (MiB)", "student (MiB)"]]
        teacher, student = (times_of(self.costs, name) for name in ("teacher", "student"))
        for pair in zip(self.costs[::2], self.costs[1::2], strict=True):
            side = pair[0].size[1]
            times = [f"{1e3 * own[side]:.2f}" for own in (teacher, student)]
            ratio = f"{student[side] / teacher[side]:.2f}"
            costs.append([str(side), *times, ratio, *(f"{cost.peak['forward'] / 2**20:.1f}" for cost in pair)])
        faster = faster_in_words(crossover(student, teacher))
        return [
            ("Scores", SCORES.format(metric=metric), scores),
            ("Errors of attention", ERRORS, errors),
            ("Time and memory", f"{faster} {SPEED.format(device=self.device)}", costs),
        ]

    def rows(self) -> list[tuple[str, str, float]]:
        """All numbers: what, of which network or layer, value."""
        rows = [("score", name, score) for name, score in self.scores.items()]
        for when, errors in self.errors.items():
            name = "error at the start" if when == "start" else f"error after epoch {when}"
            rows += [(name, layer, error) for layer, error in errors.items()]
        for cost in self.costs:
            rows.append((f"seconds at {cost.size[1]}", cost.name, cost.seconds["forward"].median))
            rows.append((f"bytes at {cost.size[1]}", cost.name, cost.peak["forward"]))
        return rows


def faster_in_words(side: float | None) -> str:
    """A sentence on the size of image from which on a student is faster."""
    if side in (None, math.inf):
        return "At these sizes the student is not faster."
    return f"The student is faster from {side:.0f} pixels on." if side else "The student is faster at all these sizes."


def write_page(run: Run, command: str, folders: Sequence[Path]) -> None:
    """Writes linearize.html, .md and .csv beside a run after `fit`: what its stages have logged, and what it costs."""
    folder, device = folders[-1], run.trainer.strategy.root_device
    task = run.trained() if run.finished else run.task  # there was nothing left to train
    logged = [RunFolder(stage) for stage in folders]
    networks = {
        "teacher": teacher_network(task, Teacher.of(task.hparams["teacher"])).to(device),
        "student": copy.deepcopy(task.predicting).to(device),
    }  # a copy is not compiled, and the teacher is not
    photos = read_photos(run.data, IMAGES, device)
    measurable = {name: in_place(task, network) for name, network in networks.items()}
    machine = conditions(str(device))
    found = Findings(
        scores(logged),
        errors(logged),
        costs_by_size(measurable, photos[0].batch["image"][0], device, SECONDS),
        machine["machine"] if device.type == "cpu" else machine["device"],
    )
    tables = found.tables(task.score_metric)
    source = Teacher.of(task.hparams["teacher"]).source or "the weights that the backbone brings"
    given = task.hparams["attention"]
    attention = given if isinstance(given, str) else json.dumps(given).replace('"', "")
    introduction = INTRODUCTION.format(teacher=source, student=attention)
    parts = [f"## {heading}\n\n{caption}\n\n{markdown_table(rows)}" for heading, caption, rows in tables]
    with replacing(folder / "linearize.md") as file:
        file.write("\n\n".join([f"`{command}`", introduction, *parts, ""]).encode())
    write_table(folder / "linearize.csv", [("what", "of", "value"), *found.rows()])
    page = Page(f"linearize: {attention}")
    page.code(command)
    page.paragraph(introduction)
    pictures = [score_plot(logged), error_picture(found.errors), time_plot(found.costs)]
    for (heading, caption, (titles, *rows)), picture in zip(tables, pictures, strict=True):
        page.heading(heading)
        page.table(titles, rows, caption)
        page.pictures(picture, width=None if heading == "Errors of attention" else 560)
    if (folder / TABLE).exists():
        page.heading("Blocks that were kept")
        add_curve(page, folder / TABLE)
    page.heading("Attention maps")
    drawn, left_out = maps(networks, photos, SECONDS)
    if drawn:
        page.pictures([((gallery(drawn, "weights", LIGHT), gallery(drawn, "weights", DARK)), MAPS)])
    if left_out:
        page.table(["left out", "why"], left_out.items())
    page.write(folder / PAGE)


def by_epoch(runs: Sequence[RunFolder], tag: str) -> dict[int, float]:
    """A curve of validations, of one run after the other, by the number of epochs that had been trained."""
    found: dict[int, float] = {}
    before = 1
    for run in runs:
        epochs = dict(run.curves.get("epoch", []))
        found |= {before + int(epochs[step]): value for step, value in run.curves.get(tag, []) if step in epochs}
        before += 1 + int(max(epochs.values(), default=-1))
    return found


def scores(runs: Sequence[RunFolder]) -> dict[str, float]:
    """What the teacher scores, and the student before any step, after stages, after its last epoch and its best one."""
    starts = {"teacher": f"{TEACHER}score", "student before any step": f"{START}score"}
    found = {name: runs[0].curves[tag][0][1] for name, tag in starts.items() if tag in runs[0].curves}
    *stages, run = runs
    ends = {f"student after stage {i}": stage.score(stage.score_tag()) for i, stage in enumerate(stages, 1)}
    found |= {name: end.value for name, end in ends.items() if end is not None}
    later = by_epoch([run], run.score_tag())
    if later:
        last, best = max(later), max(later, key=lambda epoch: later[epoch])
        found[f"student after epoch {last}, the last"] = later[last]
        found |= {f"student after epoch {best}, the best": later[best]} if later[best] > later[last] else {}
    return found


def errors(runs: Sequence[RunFolder]) -> dict[str, dict[str, float]]:
    """The relative error of each attention layer, at the start and after epochs."""
    found: dict[str, dict[str, float]] = {}
    for tag, curve in runs[0].curves.items():
        if tag.startswith(f"{START}{DISTANCE}"):
            found.setdefault("start", {})[layer_name(tag.removeprefix(f"{START}{DISTANCE}"))] = curve[0][1]
    for tag in runs[-1].curves:
        if tag.startswith(DISTANCE):
            for epoch, error in by_epoch(runs, tag).items():
                found.setdefault(str(epoch), {})[layer_name(tag.removeprefix(DISTANCE))] = error
    return found


def score_plot(runs: Sequence[RunFolder]) -> list[tuple[str, str]]:
    """The student's score over the epochs, and the teacher's, with what they are; nothing without scores."""
    tag = runs[-1].score_tag()
    points = [(0, score) for _, score in runs[0].curves.get(f"{START}score", [])]
    points += sorted(by_epoch(runs, tag).items())
    if not points:
        return []
    ends = points[0][0], points[-1][0]
    series = [
        Series("teacher", tuple((end, score) for end in ends)) for _, score in runs[0].curves.get(f"{TEACHER}score", [])
    ]
    ticks = tuple(float(epoch) for epoch in spread([epoch for epoch, _ in points]))
    plot = line_plot("Score", [*series, Series("student", tuple(points))], Axis("epochs", ticks=ticks), Axis(tag))
    return [(plot, "The score after each epoch; 0 is before any step.")]


def spread(values: Sequence[Any]) -> list[Any]:
    """All values, or as many as are shown, evenly spread."""
    count = min(len(values), COLUMNS)
    return [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]


def error_picture(errors: Mapping[str, Mapping[str, float]]) -> list[tuple[str, str]]:
    """A heat map of the errors of layers over the epochs, with what it is; nothing without errors."""
    if not errors:
        return []
    when = spread([*errors])
    layers = [*errors[when[0]]]
    values = np.array([[float(f"{errors[name].get(layer, np.nan):.3g}") for name in when] for layer in layers])
    return [(svg(heat_map("error by epoch, yellow: large", values, layers, when)), "The errors after each epoch.")]


def time_plot(costs: Sequence[Cost]) -> list[tuple[str, str]]:
    """The time of both over the side of the image, with what it is."""
    curves = {name: times_of(costs, name) for name in ("teacher", "student")}
    series = [Series(name, tuple((side, 1e3 * time) for side, time in own.items())) for name, own in curves.items()]
    sides = Axis("side of the image (pixels)", ticks=tuple(curves["teacher"]))
    return [(line_plot("Forward pass", series, sides, Axis("ms", log=True)), "The time of one image over its side.")]


def maps(
    networks: Mapping[str, nn.Module], photos: Sequence[Photo], seconds: float
) -> tuple[list[Maps], dict[str, str]]:
    """The maps of images, of one network below the other, until time is up, and what is left out, with the reason."""
    drawn, left_out, until = [], {}, time.monotonic() + seconds
    for photo in photos:
        for name, network in networks.items():
            try:
                found = attention_maps(photo.pixels, observe(network, photo.batch["image"][0][None]), Query())
            except UserError as error:
                left_out[name] = str(error)
                continue
            left_out |= {f"{what}, {name}": why for what, why in found.left_out.items()}
            drawn += [found._replace(caption=name)] * ("weights" in found.maps)
        if time.monotonic() > until:
            break
    return drawn, left_out


def in_place(task: Task, network: nn.Module) -> nn.Module:
    """The network as `Task.measurable_network` makes it of a task's own."""
    kept = task.network
    try:
        task.network = network
        return task.measurable_network().eval()
    finally:
        task.network = kept
