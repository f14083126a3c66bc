"""What came of a network whose attention was replaced: scores, errors of each block, time and memory, as one page."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from linvit.errors import UserError
from linvit.experiments.keep import TABLE, add_curve, score, validation_batches
from linvit.experiments.measure import interleaved, out_of_memory, peak_memory
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.files import replacing
from linvit.linearization.distillation import Distillation
from linvit.plain_text import CsvWriter, markdown_table
from linvit.runs.folder import RunFolder
from linvit.runs.run import Run
from linvit.tasks import Task, Teacher
from linvit.tasks.teacher import copied_student, teacher_network

TIMES = (1, 2, 3, 4)  # the sides at which both are timed, over that of the run
SECONDS = 8.0  # for all sizes together
EXPLAINED = (
    "Scores are of the validation split. Before any step the student has all weights of its teacher that it has a "
    "place for, and new parameters at their initial values."
)
ERRORS = (
    "Mean squared error of what attention mixes, before its output projection, over the mean square of the teacher's: "
    "0 is the same, 1 is as far as 0 would be. Of one batch of the validation split, in evaluation mode."
)
SPEED = (
    "One image, forward pass, in turns in one process, on this machine alone. Memory is what the pass allocates at one "
    "time, beyond weights and image."
)


class Cost(NamedTuple):
    """Of a forward pass of one square image: side in pixels, seconds, bytes."""

    side: int
    seconds: float
    bytes: int


class Findings(NamedTuple):
    """What was measured.

    Attributes:
        scores: Of the validation split, by network.
        errors: Of each attention layer, before any step and after, relative to its teacher.
        costs: Of teacher and student, at the same sizes.
    """

    scores: dict[str, float]
    errors: dict[str, tuple[float, float]]
    costs: dict[str, list[Cost]]

    def tables(self, metric: str) -> list[tuple[str, list[list[str]]]]:
        """Captions and rows, the titles first."""
        scores = [["network", metric], *([name, f"{score:.4f}"] for name, score in self.scores.items())]
        errors = [["attention", "error before", "error after"]]
        errors += [[name, f"{before:.4f}", f"{after:.4f}"] for name, (before, after) in self.errors.items()]
        costs = [["side", "teacher (ms)", "student (ms)", "teacher (MiB)", "student (MiB)", "student / teacher"]]
        for pair in zip(self.costs["teacher"], self.costs["student"], strict=True):
            times, sizes = (
                [f"{1e3 * cost.seconds:.2f}" for cost in pair],
                [f"{cost.bytes / 2**20:.1f}" for cost in pair],
            )
            costs.append([str(pair[0].side), *times, *sizes, f"{pair[1].seconds / pair[0].seconds:.2f}"])
        return [(EXPLAINED, scores), (ERRORS, errors), (f"{SPEED} {self.crossover}", costs)]

    @property
    def crossover(self) -> str:
        """From which of the measured sizes on the student is faster, in words."""
        pairs = list(zip(self.costs["teacher"], self.costs["student"], strict=True))
        slower = [i for i, (teacher, student) in enumerate(pairs) if student.seconds >= teacher.seconds]
        first = slower[-1] + 1 if slower else 0
        if first == len(pairs):
            return f"Up to {pairs[-1][0].side} pixels the student is not faster."
        return f"The student is faster from {pairs[first][0].side} pixels on."

    def write_csv(self, path: Path) -> None:
        """Writes all numbers: what, of which network or layer, value."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = CsvWriter(file)
            writer.writerow(["what", "of", "value"])
            writer.writerows(["score", name, score] for name, score in self.scores.items())
            for name, (before, after) in self.errors.items():
                writer.writerows([["error before", name, before], ["error after", name, after]])
            for name, costs in self.costs.items():
                for side, seconds, size in costs:
                    writer.writerows([[f"seconds at {side}", name, seconds], [f"bytes at {side}", name, size]])


def write_page(run: Run, command: str, folders: Sequence[Path]) -> Path:
    """Measures teacher and student of a run that has been trained; writes linearize.html, .md and .csv beside it.

    Args:
        run: The run, after `fit`, whose task has a teacher.
        command: What made it.
        folders: Of the stages, each of which started from the weights of the one before; the last is the run's.

    Returns:
        The page.
    """
    *stages, folder = folders
    task = Run.read(folder, "validate").trained()
    found = measure(run, task, [RunFolder(stage) for stage in stages])
    tables = found.tables(task.score_metric)
    captions = [(f"{caption}\n\n{markdown_table(rows)}") for caption, rows in tables]
    with replacing(folder / "linearize.md") as file:
        file.write("\n\n".join([f"`{command}`", *captions, ""]).encode())
    found.write_csv(folder / "linearize.csv")
    page = Page(f"linearize: {task.hparams['attention']}")
    page.code(command)
    for caption, (titles, *rows) in tables:
        page.table(titles, rows, caption)
    curves: dict[str, list[tuple[float, float]]] = {}
    steps = 0  # of the stages before
    for stage in folders:
        found_curves = RunFolder(stage).curves
        for tag, points in found_curves.items():
            if tag.startswith("teacher_attention/"):
                curves.setdefault(tag.partition("/")[2], []).extend((steps + step, error) for step, error in points)
        steps += 1 + max((step for points in found_curves.values() for step, _ in points), default=-1)
    if curves:
        series = [Series(name, tuple(points)) for name, points in curves.items()]
        plot = line_plot("Attention", series, Axis("step"), Axis("mean squared error", log=True))
        page.pictures([(plot, "Error of each block's attention in training")])
    times = [Series(name, tuple((cost.side, 1e3 * cost.seconds) for cost in own)) for name, own in found.costs.items()]
    plot = line_plot("Forward pass", times, Axis("side of the image (pixels)"), Axis("ms", log=True))
    page.pictures([(plot, "Time of one image")])
    if (folder / TABLE).exists():
        add_curve(page, folder / TABLE)
    page.paragraph(f"Their attention maps beside one another: linvit analyze --ckpt_path {folder} TEACHER")
    page.write(folder / "linearize.html")
    return folder / "linearize.html"


def measure(run: Run, task: Task, stages: Sequence[RunFolder]) -> Findings:
    """Measures the teacher of a trained task, a student before any step and after stages, and the task's network."""
    device = run.trainer.strategy.root_device
    teacher = teacher_network(task, Teacher.of(task.hparams["teacher"])).to(device)
    start = copied_student(task, teacher)
    student = (task.network if task.average is None else task.average.network).to(device)
    networks = {"teacher": teacher, "student before any step": start, "student": student}
    images = next(validation_batches(run, 1, device))["image"]
    before, after = (attention_errors(teacher, network, images) for network in (start, student))
    scores = {
        name: score(task, network, validation_batches(run, None, device))[0] for name, network in networks.items()
    }
    after_stages = {f"student after stage {i}": stage.score(stage.score_tag()) for i, stage in enumerate(stages, 1)}
    scores |= {name: last.value for name, last in after_stages.items() if last is not None}
    scores["student"] = scores.pop("student")  # the last row
    return Findings(
        scores,
        {name: (before[name], after[name]) for name in before},
        costs(task, {"teacher": teacher, "student": student}, images[0], device),
    )


def attention_errors(teacher: nn.Module, student: nn.Module, images: Any) -> dict[str, float]:
    """The relative error of each matched attention layer on a batch of images."""
    distillation = Distillation(teacher, student)
    errors = distillation.distances(images)["attention"]
    distillation.close()
    return errors


@contextmanager
def in_place(task: Task, network: nn.Module) -> Iterator[None]:
    """In this context a task has another network, and no moving average."""
    kept = task.network, task.ema
    task.network, task.ema = network.eval(), None
    try:
        yield
    finally:
        task.network, task.ema = kept


@torch.no_grad()
def costs(
    task: Task, networks: dict[str, nn.Module], image: torch.Tensor, device: torch.device
) -> dict[str, list[Cost]]:
    """Time and memory of networks at the size of an image (C, H, W) and at multiples of it, as far as they take it."""
    found: dict[str, list[Cost]] = {name: [] for name in networks}
    for times in TIMES:
        images = image[None].repeat(1, 1, times, times).to(device)
        works = {}
        for name, network in networks.items():
            with in_place(task, network.to(device)):
                works[name] = partial(task.measurable_network().eval(), images)
        try:
            timing = interleaved(works, budget=SECONDS / len(TIMES), device=device)
            memory = {name: peak_memory(work, device) for name, work in works.items()}
        except Exception as error:
            if times > 1 and (out_of_memory(error) or isinstance(error, AssertionError | UserError)):
                break  # a network that takes one size alone
            raise
        for name in networks:
            found[name].append(Cost(images.shape[-1], timing[name].median, memory[name]))
    return found
