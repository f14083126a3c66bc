"""Report on a network whose attention was replaced: scores, errors of layers, time and memory, maps, as one page."""

import copy
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from linvit.analysis.maps import Query
from linvit.analysis.recorder import layer_name, observe
from linvit.backbones.replace_attention import softmax_blocks
from linvit.callbacks.attention.maps import Maps, attention_maps, gallery
from linvit.callbacks.common import DARK, LIGHT
from linvit.errors import UserError
from linvit.experiments.analyze import Photo, read_photos
from linvit.experiments.bench.costs import TIMES, Cost, Crossover, costs_by_size, crossover, times_of
from linvit.experiments.hybrids.search import HybridSearch
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, heat_map, line_plot, svg
from linvit.runs.conditions import conditions
from linvit.runs.folder import RunFolder
from linvit.runs.run import Run
from linvit.tasks import Task, Teacher
from linvit.tasks.teacher import DISTANCE, START, TEACHER, teacher_network

PAGE = "linearize.html"
SECONDS = 8.0  # for the timing of all sizes; one is measured in any case
IMAGES = 2  # with maps
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
    "Error of a layer's attention output against the teacher's, on the same images: mean squared error over the "
    "teacher's mean square, so 0 is equal, and 1 is the error of zeros. Attention outputs are "
    "taken before the output projection. Of the first batch of the validation split, in evaluation mode."
)
SPEED = (
    "Forward pass of one image, median; teacher and student take turns. Memory is the most that the pass allocates, "
    "beyond weights and image. Measured on {device}, so the size from which the student is faster holds for that alone."
)
MAPS = (
    "Attention of the token with the red ring (without a ring: the class token): its row of each layer's attention "
    "matrix, mean over heads, light is high; and the rollout through all layers. Negative weights are "
    "drawn as 0."
)


def write_page(run: Run, command: str, folders: Sequence[Path], search: HybridSearch | None = None) -> None:
    """Writes linearize.html beside a run after `fit`: the logged values of its stages, and its costs."""
    folder, device = folders[-1], run.trainer.strategy.root_device
    task = run.trained() if run.finished else run.task  # there was nothing left to train
    teacher, given = Teacher.of(task.hparams["teacher"]), task.hparams["attention"]
    networks = {
        "teacher": teacher_network(task, teacher).to(device),
        "student": copy.deepcopy(task.predicting).to(device),
    }  # a copy is not compiled, and the teacher is not
    photos = read_photos(run.data, IMAGES, device)
    machine, logged = conditions(str(device)), [RunFolder(stage) for stage in folders]
    measurable = {name: in_place(task, network) for name, network in networks.items()}
    costs = costs_by_size(measurable, photos[0].batch["image"][0], device, SECONDS)
    attention = given if isinstance(given, str) else json.dumps(given).replace('"', "")
    page = Page(f"linearize: {attention}")
    page.code(command)
    source = teacher.source or "the weights that the backbone brings"
    page.paragraph(INTRODUCTION.format(teacher=source, student=attention))
    blocks = {name: str(softmax_blocks(network)) for name, network in networks.items()}
    add_scores(page, logged, task.score_metric, blocks)
    add_errors(page, errors(logged))
    add_costs(page, costs, machine["machine"] if device.type == "cpu" else machine["device"])
    if search is not None:
        page.heading("Search of the hybrid")
        search.add_to(page)
    add_maps(page, networks, photos)
    page.write(folder / PAGE)


def by_epoch(runs: Sequence[RunFolder], tag: str) -> dict[int, float]:
    """Returns a curve of validations, of one run after the other, by the number of epochs that had been trained."""
    found: dict[int, float] = {}
    before = 1
    for run in runs:
        epochs = run.epoch_at
        found |= {before + epochs[step]: value for step, value in run.curves.get(tag, []) if step in epochs}
        before += 1 + max(epochs.values(), default=-1)
    return found


def scores(runs: Sequence[RunFolder]) -> dict[str, float]:
    """Returns the teacher's score, and the student's before any step, after stages, its last and its best epoch."""
    starts = {"teacher": f"{TEACHER}score", "student before any step": f"{START}score"}
    found = {name: runs[0].curves[tag][0][1] for name, tag in starts.items() if tag in runs[0].curves}
    *stages, run = runs
    ends = {f"student after stage {i}": stage.score(stage.score_tag()) for i, stage in enumerate(stages, 1)}
    found |= {name: end.value for name, end in ends.items() if end is not None}
    last, best = run.score(run.score_tag()), run.best_score(run.score_tag())
    if last is not None:
        found[f"student after epoch {last.epoch}, the last"] = last.value
    if last is not None and best is not None and not best.value <= last.value:  # the last may be NaN
        found[f"student after epoch {best.epoch}, the best"] = best.value
    return found


def errors(runs: Sequence[RunFolder]) -> dict[str, dict[str, float]]:
    """Returns the relative error of each attention layer, at the start and after epochs."""
    found: dict[str, dict[str, float]] = {}
    for tag, curve in runs[0].curves.items():
        if tag.startswith(f"{START}{DISTANCE}"):
            found.setdefault("start", {})[layer_name(tag.removeprefix(f"{START}{DISTANCE}"))] = curve[0][1]
    for tag in runs[-1].curves:
        if tag.startswith(DISTANCE):
            for epoch, error in by_epoch(runs, tag).items():
                found.setdefault(str(epoch), {})[layer_name(tag.removeprefix(DISTANCE))] = error
    return found


def add_scores(page: Page, runs: Sequence[RunFolder], metric: str, blocks: Mapping[str, str]) -> None:
    """Adds the scores and softmax `blocks` of teacher and student, and a plot of both scores over the epochs."""
    page.heading("Scores")
    found, tag, begun = scores(runs), runs[-1].score_tag(), runs[0].curves
    rows = [[name, blocks[name.partition(" ")[0]], f"{score:.4f}"] for name, score in found.items()]
    page.table(["network", "softmax blocks", metric], rows, SCORES.format(metric=metric))
    points = [(0, score) for _, score in begun.get(f"{START}score", [])] + sorted(by_epoch(runs, tag).items())
    points = [(epoch, score) for epoch, score in points if math.isfinite(score)]
    if points:
        of_teacher = [((points[0][0], score), (points[-1][0], score)) for _, score in begun.get(f"{TEACHER}score", [])]
        series = [*(Series("teacher", ends) for ends in of_teacher), Series("student", tuple(points))]
        ticks = tuple(float(epoch) for epoch in spread([epoch for epoch, _ in points]))
        plot = line_plot("Score", series, Axis("epochs", ticks=ticks), Axis(tag))
        page.pictures([(plot, "The score after each epoch; 0 is before any step.")], width=560)


def spread(values: Sequence[Any]) -> list[Any]:
    """Returns all values, or as many as are shown, evenly spaced."""
    count = min(len(values), COLUMNS)
    return [values[round(i * (len(values) - 1) / max(count - 1, 1))] for i in range(count)]


def add_errors(page: Page, found: Mapping[str, Mapping[str, float]]) -> None:
    """Adds the errors of layers at the start and at the end, and a heat map over the epochs."""
    page.heading("Errors of attention")
    when = [*found][:: max(len(found) - 1, 1)]  # the first and the last
    ends = [{**found[name], "mean": float(np.mean([*found[name].values()]))} for name in when]
    rows = [[layer, *(f"{end.get(layer, np.nan):.4f}" for end in ends)] for layer in (ends[0] if ends else ())]
    page.table(["layer", *("start" if name == "start" else f"after epoch {name}" for name in when)], rows, ERRORS)
    if found:
        shown = spread([*found])
        layers = [*found[shown[0]]]
        values = np.array([[float(f"{found[name].get(layer, np.nan):.3g}") for name in shown] for layer in layers])
        picture = svg(heat_map("error by epoch, yellow: large", values, layers, shown))
        page.pictures([(picture, "The errors after each epoch.")])


def add_costs(page: Page, costs: Sequence[Cost], device: str) -> None:
    """Adds time and memory of teacher and student by the side of the image."""
    page.heading("Time and memory")
    curves = {name: times_of(costs, name) for name in ("teacher", "student")}
    rows = []
    for pair in zip(costs[::2], costs[1::2], strict=True):
        before, after = (1e3 * cost.seconds["forward"].median for cost in pair)
        memory = (f"{cost.peak['forward'] / 2**20:.1f}" for cost in pair)
        rows.append([str(pair[0].size[1]), f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}", *memory])
    met = crossover(curves["student"], curves["teacher"])
    assert met is not None  # both are timed at each size
    titles = ["side", "teacher (ms)", "student (ms)", "student / teacher", "teacher (MiB)", "student (MiB)"]
    page.table(titles, rows, f"{comparison(met)} {SPEED.format(device=device)}")
    series = [Series(name, tuple((side, 1e3 * time) for side, time in own.items())) for name, own in curves.items()]
    sides = Axis("side of the image (pixels)", ticks=tuple(curves["teacher"]))
    plot = line_plot("Forward pass", series, sides, Axis("ms", log=True))
    page.pictures([(plot, "The time of one image over its side.")], width=560)


def comparison(met: Crossover) -> str:
    """Says at which sides the student is faster than its teacher, of those that were measured."""
    sides = ", ".join(f"{side:,.0f}" for side in met.measured)
    short = " (larger ones need more time or memory than is left)" * (len(met.measured) < len(TIMES))
    where = {0.0: "at every side measured", math.inf: "not faster at the largest side measured"}
    found = where.get(met.size, f"from a side of about {met} pixels on")
    return f"Sides measured: {sides} pixels{short}. The student is {'faster ' * (met.size < math.inf)}{found}."


def add_maps(page: Page, networks: Mapping[str, nn.Module], photos: Sequence[Photo]) -> None:
    """Adds the maps of images, one network below the other, and the reasons for missing maps."""
    page.heading("Attention maps")
    drawn, left_out = list[Maps](), dict[str, str]()
    for photo in photos:
        for name, network in networks.items():
            try:
                found = attention_maps(photo.pixels, observe(network, photo.batch["image"][0][None]), Query())
            except UserError as error:
                left_out[name] = str(error)
                continue
            left_out |= {f"{what}, {name}": why for what, why in found.left_out.items()}
            drawn += [found._replace(caption=name)] * ("weights" in found.maps)
    if drawn:
        page.pictures([((gallery(drawn, "weights", LIGHT), gallery(drawn, "weights", DARK)), MAPS)])
    if left_out:
        page.table(["left out", "why"], left_out.items())


def in_place(task: Task, network: nn.Module) -> nn.Module:
    """Returns the network as `Task.measurable_network` makes it of a task's own."""
    kept = task.network
    try:
        task.network = network
        return task.measurable_network().eval()
    finally:
        task.network = kept
