"""Which blocks of a teacher keep their attention: what each choice costs, measured once, in a table beside the runs."""

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from linvit.backbones.stage import specs_per_layer
from linvit.callbacks.report import write_table
from linvit.errors import UserError
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.io.plain_text import read_csv, shown
from linvit.linearization.distillation import first_tensor, last_features
from linvit.linearization.student import Conversions, greedy_order
from linvit.registry import Spec
from linvit.runs.folder import run_name
from linvit.runs.resolve import root_of
from linvit.runs.run import Run
from linvit.tasks import Task
from linvit.tasks.teacher import fingerprint, given_options, teacher_network

BATCHES = 4  # of the validation split
TABLE = "keep.csv"
COLUMNS = ["converted", "error", "score", "seconds"]
CAPTION = (
    "The blocks that were converted one after another, before any step of training: each time the one that moved the "
    "last features least. The error is their squared distance from the teacher's, over the square of the teacher's; "
    f"{BATCHES} batches of the validation split. Time is that of the fastest batch."
)


class Measured(NamedTuple):
    """Of a network: error of the last features relative to the teacher's, score, and seconds per image."""

    error: float
    score: float
    seconds: float

    def __str__(self) -> str:
        return f"error {self.error:.3g}, score {self.score:.4f}, {1e3 * self.seconds:.3f} ms per image"


class Measurements:
    """Measurements of each choice of converted blocks, made once, by rank 0, and kept in a CSV file."""

    def __init__(self, path: Path, measure: Callable[[Collection[int]], Measured] | None = None) -> None:
        self.path, self._measure = path, measure
        self.rows = self._read()

    def __call__(self, converted: Collection[int]) -> Measured:
        """Returns the measurement of a choice."""
        key = tuple(sorted(converted))
        while key not in self.rows and rank_zero_only.rank:  # type: ignore[attr-defined]
            time.sleep(1)
            self.rows = self._read()
        if key not in self.rows:
            assert self._measure is not None
            self.rows[key] = self._measure(key)
            rows = ([" ".join(map(str, blocks)), *found] for blocks, found in self.rows.items())
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_table(self.path, [COLUMNS, *rows])
        return self.rows[key]

    @property
    def order(self) -> list[int]:
        """The blocks in the order of their conversion."""
        return list(greedy_order([key[0] for key in self.rows if len(key) == 1], lambda blocks: self(blocks).error))

    def _read(self) -> dict[tuple[int, ...], Measured]:

        def parse(row: Mapping[str, str]) -> tuple[tuple[int, ...], Measured]:
            measured = Measured(*(float(row.get(name, "")) for name in COLUMNS[1:]))
            return tuple(map(int, row[COLUMNS[0]].split())), measured

        return dict(read_csv(self.path, COLUMNS[0], parse)) if self.path.exists() else {}


def find_kept(run: Run, count: int) -> tuple[list[Spec | None], Path]:
    """The list for `--model.attention` in which so many blocks keep their teacher's, and the file of measurements."""
    task, attention = run.task, run.task.hparams["attention"]
    if task.teacher is None or attention is None or isinstance(attention, list):
        raise UserError(f"--keep chooses the blocks of one attention; got --model.attention={attention}")
    cuda = torch.cuda.is_available() and run.config["trainer"]["accelerator"] != "cpu"
    device = torch.device("cuda" if cuda else "cpu")
    teacher = teacher_network(task, task.teacher).to(device)
    seed, img_size = run.config["seed_everything"], task.hparams["img_size"]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        conversions = Conversions(teacher, attention, img_size)
    blocks = conversions.blocks
    if not 0 <= count < len(blocks):
        raise UserError(f"--keep: of {len(blocks)} blocks 0 to {len(blocks) - 1} can be kept; got {count}")
    batches: list[dict[str, Any]] = []
    targets: list[Tensor] = []

    def measure(converted: Collection[int]) -> Measured:
        if not batches:
            run.data.setup("validate")
            for batch in islice(run.data.val_dataloader(), BATCHES):
                batches.append(run.data.on_after_batch_transfer(move_data_to_device(batch, device), 0))
            targets.extend(features(task, teacher, batches)[0])
        found, score, seconds = features(task, conversions.network(converted), batches)
        distance = sum((own - target).square().sum() for own, target in zip(found, targets, strict=True))
        return Measured(float(distance / sum(target.square().sum() for target in targets)), score, seconds)

    key = [fingerprint(teacher), attention, img_size, seed, run.config["data"], BATCHES]
    name = hashlib.sha256(json.dumps(key, default=str).encode()).hexdigest()[:12]
    table = Measurements(root_of(run.config) / run_name(run.config["config"]) / f"keep-{name}.csv", measure)
    say = rank_zero_only(partial(print, flush=True))
    total = len(blocks) * (len(blocks) + 1) // 2 + 1
    done = f"{len(table.rows)} of them are in {shown(table.path)} already"
    say(f"which blocks to keep: {total} networks are measured, {done}")
    say(f"nothing converted: {table([])}")
    for block in blocks:
        say(f"{conversions.layers[block]} alone: {table([block])}")
    order: list[int] = []
    for block in greedy_order(blocks, lambda converted: table(converted).error):
        order.append(block)
        say(f"{len(order)} converted, {conversions.layers[block]} the last: {table(order)}")
    theirs: Any = given_options(task.teacher).get("attention")
    names = [name.removeprefix("backbone.") for name in conversions.layers]
    kept = specs_per_layer(theirs, getattr(teacher, "backbone", teacher), names)
    pairs = zip(conversions.specs(order[: len(blocks) - count]), kept, strict=True)
    specs = [of_teacher if own is None else own for own, of_teacher in pairs]
    say(f"--model.attention='{json.dumps(specs)}'")
    return specs, table.path


def add_curve(page: Page, path: Path) -> None:
    """Adds score and error over time, from no block converted to all, to a page."""
    table = Measurements(path)
    order = table.order
    found = [table(order[:converted]) for converted in range(len(order) + 1)]
    rows = [
        [str(converted), str(block), f"{one.error:.3g}", f"{one.score:.4f}", f"{1e3 * one.seconds:.3f}"]
        for converted, (block, one) in enumerate(zip(["", *order], found, strict=True))
    ]
    page.table(["converted", "block", "error", "score", "ms per image"], rows, CAPTION)
    curves = {"Score": [one.score for one in found], "Error of the last features": [one.error for one in found]}
    labels, plots = tuple(map(str, range(len(found)))), []
    for title, values in curves.items():
        points = tuple((1e3 * one.seconds, value) for one, value in zip(found, values, strict=True))
        plots.append(line_plot(title, [Series("converted", points, labels=labels)], Axis("ms per image"), Axis(title)))
    page.pictures([(plot, "Numbers of converted blocks, before any step") for plot in plots], width=560)


@torch.no_grad()
def features(task: Task, network: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[list[Tensor], float, float]:
    """Returns the last features, the score and the seconds per image of a network in place of the task's."""
    device = next(network.eval().parameters()).device
    metrics = {name: metric.to(device) for name, metric in task.configure_metrics().items()}
    found: list[Tensor] = []
    hooks = [
        network.get_submodule(name).register_forward_hook(lambda _, __, output: found.append(first_tensor(output)))
        for name in last_features(network)
    ]
    fastest = math.inf
    for batch in batches:
        start = time.perf_counter()
        task.score_batch(network, batch, metrics)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, (time.perf_counter() - start) / len(batch["image"]))
    for hook in hooks:
        hook.remove()
    return found, float(metrics[task.score_metric].compute()), fastest
