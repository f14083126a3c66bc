"""What came of a network whose attention was replaced: scores, errors of each block, time and memory, as one page."""

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Trainer
from torch import nn

from linvit.experiments.measure import interleaved, out_of_memory, peak_memory
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.files import replacing
from linvit.linearization.distillation import Distillation, Matching
from linvit.plain_text import CsvWriter, markdown_table
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
    """Of both networks at one image size: seconds and bytes of a forward pass of one image."""

    side: int
    teacher: tuple[float, int]
    student: tuple[float, int]


def write_page(run: Run, command: str) -> Path:
    """Measures teacher and student of a run that has been trained; writes linearize.html, .md and .csv beside it.

    Args:
        run: The run, after `fit`, whose task has a teacher.
        command: What made it.

    Returns:
        The page.
    """
    folder = Path(str(run.trainer.log_dir))
    task = Run.read(folder, "validate").trained()
    option = Teacher.of(task.hparams["teacher"])
    teacher = teacher_network(task, option)
    start = copied_student(task, teacher)
    student = task.network if task.average is None else task.average.network
    scores = {
        "teacher": score(run, task, teacher),
        "student before any step": score(run, task, start),
        "student": score(run, task, student),
    }
    batch = run.data.on_after_batch_transfer(next(iter(run.data.val_dataloader())), 0)
    errors = {
        name: relative_errors(teacher, one, batch["image"]) for name, one in (("before", start), ("after", student))
    }
    costs = cost(teacher, student, batch["image"][0])
    rows = [["network", task.score_metric], *([name, f"{value:.4f}"] for name, value in scores.items())]
    blocks = [["attention", "error before", "error after"]]
    blocks += [[name, f"{errors['before'][name]:.4f}", f"{errors['after'][name]:.4f}"] for name in errors["after"]]
    speed = [["side", "teacher (ms)", "student (ms)", "teacher (MiB)", "student (MiB)", "student / teacher"]]
    for one in costs:
        (t, m), (own, less) = one.teacher, one.student
        speed.append(
            [
                str(one.side),
                f"{1e3 * t:.2f}",
                f"{1e3 * own:.2f}",
                f"{m / 2**20:.1f}",
                f"{less / 2**20:.1f}",
                f"{own / t:.2f}",
            ]
        )
    page = Page(f"linearize: {task.hparams['attention']}")
    page.code(command)
    page.table(rows[0], rows[1:], EXPLAINED)
    page.table(blocks[0], blocks[1:], ERRORS)
    if curves := error_curves(folder):
        plot = line_plot(
            "Error of attention while training", curves, Axis("step"), Axis("mean squared error", log=True)
        )
        page.pictures([(plot, "Error of each block in training, with its own inputs")])
    page.table(speed[0], speed[1:], f"{SPEED} {crossover(costs)}")
    series = [
        Series(name, tuple((one.side, 1e3 * getattr(one, name)[0]) for one in costs)) for name in ("teacher", "student")
    ]
    page.pictures([(line_plot("Time", series, Axis("side of the image"), Axis("ms", log=True)), "Time of one image")])
    page.paragraph(f"Their attention maps beside one another: linvit analyze --ckpt_path {folder}")
    page.write(folder / "linearize.html")
    with replacing(folder / "linearize.md") as file:
        text = "\n\n".join([f"`{command}`", EXPLAINED, markdown_table(rows), ERRORS, markdown_table(blocks), SPEED])
        file.write(f"{text} {crossover(costs)}\n\n{markdown_table(speed)}\n".encode())
    with (folder / "linearize.csv").open("w", newline="", encoding="utf-8") as sheet:
        writer = CsvWriter(sheet)
        writer.writerow(["what", "of", "value"])
        writer.writerows(["score", name, value] for name, value in scores.items())
        writer.writerows([f"error {when}", name, v] for when, found in errors.items() for name, v in found.items())
        writer.writerows(
            [f"seconds at {one.side}", n, getattr(one, n)[0]] for one in costs for n in ("teacher", "student")
        )
        writer.writerows(
            [f"bytes at {one.side}", n, getattr(one, n)[1]] for one in costs for n in ("teacher", "student")
        )
    return folder / "linearize.html"


def score(run: Run, task: Task, network: nn.Module) -> float:
    """What a network in the place of the task's scores on the validation split."""
    trainer = Trainer(
        accelerator="cpu" if run.task.device.type == "cpu" else "auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with in_place(task, network):
        trainer.validate(task, datamodule=run.data, verbose=False)
    return float(trainer.callback_metrics["val/score"])


@contextmanager
def in_place(task: Task, network: nn.Module) -> Iterator[None]:
    """In this context a task has another network, and no moving average."""
    kept = task.network, task.ema
    task.network, task.ema = network.to(task.device).eval(), None
    try:
        yield
    finally:
        task.network, task.ema = kept


def relative_errors(teacher: nn.Module, student: nn.Module, images: Any) -> dict[str, float]:
    """The error of each matched attention layer over the mean square of the teacher's output, on a batch of images."""
    distillation = Distillation(teacher, student, Matching())
    found = distillation.distances(images)["attention"]
    distillation.close()
    return {name: error / distillation.scales["attention"][name] for name, error in found.items()}


@torch.no_grad()
def cost(teacher: nn.Module, student: nn.Module, image: torch.Tensor) -> list[Cost]:
    """Time and memory of both networks at the size of an image (C, H, W) and at multiples of it, as far as they go."""
    found: list[Cost] = []
    networks = {"teacher": teacher.eval(), "student": student.eval()}
    for times in TIMES:
        images = image[None].repeat(1, 1, times, times).cpu()
        works = {name: partial(network, images) for name, network in networks.items()}
        try:
            timing = interleaved(works, budget=SECONDS / len(TIMES))
            memory = {name: peak_memory(work) for name, work in works.items()}
        except (AssertionError, ValueError, RuntimeError, MemoryError) as error:
            if found and (out_of_memory(error) or not isinstance(error, MemoryError)):
                break  # a network of timm that takes one size alone
            raise
        found.append(Cost(images.shape[-1], *((timing[name].median, memory[name]) for name in networks)))
    return found


def crossover(costs: list[Cost]) -> str:
    """From which of the measured sizes on the student is faster, in words."""
    faster = [one.side for one in costs if one.student[0] < one.teacher[0]]
    if not faster:
        return f"At none of these sizes, up to {costs[-1].side}, is the student faster."
    return (
        f"The student is faster from {faster[0]} pixels on."
        if faster == [o.side for o in costs][-len(faster) :]
        else (f"The student is faster at {', '.join(map(str, faster))} pixels.")
    )


def error_curves(folder: Path) -> list[Series]:
    """The errors of each block's attention in metrics.csv."""
    path = folder / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else ()) if name.startswith("teacher_attention/")]
    return [
        Series(name.partition("/")[2], tuple((float(row["step"]), float(row[name])) for row in rows if row[name]))
        for name in names
    ]
