"""Runs that are interrupted after some optimiser steps and resumed in a new trainer, model and data module."""

import csv
import hashlib
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from linvit.callbacks import SaveCheckpoints, StopOnSignal
from linvit.data import ClassificationData, DetectionData, SegmentationData
from linvit.data.sources.scenes import CLASSES, Scenes
from linvit.io.files import LAST, unlock
from linvit.io.signals import STOP, Stopped
from linvit.runs.checkpoint import Checkpoint
from linvit.runs.loggers import run_loggers
from linvit.tasks import ClassificationTask, DetectionTask, SegmentationTask
from linvit.weights import torch_file
from tests.cli.forked import Forked, free_port
from tests.training import trainer

BACKBONE = {"name": "deit_tiny", "depth": 1, "embed_dim": 24, "patch_size": 4, "proj_drop": 0.2}
RANDOM = {"drop_path_rate": 0.3, "ema_decay": 0.9, "mixup_alpha": 0.8, "cutmix_alpha": 1.0}
SEGMENTATION = {  # UPerNet: dropout of channels, BatchNorm, an auxiliary head
    "backbone": {"name": "pvt_v2_b0", "embed_dims": [8, 8, 16, 16], "depths": [1] * 4, "num_heads": [1, 1, 2, 2]},
    "head": {"name": "upernet", "width": 8, "auxiliary_width": 8},
    **{"drop_path_rate": 0.3, "ema_decay": 0.9, "schedule": "poly", "warmup_steps": 3},
}
DETECTION = {  # Mask R-CNN: anchors and proposals are drawn at random
    "backbone": {**SEGMENTATION["backbone"]},
    "head": {"name": "mask_rcnn", "width": 8, "fc_width": 16, "anchor_samples": 16, "roi_samples": 8},
    **{"drop_path_rate": 0.3, "ema_decay": 0.9, "schedule": "steps", "decay_epochs": [1], "warmup_steps": 3},
}
SHORT = {"max_epochs": 2, "limit_train_batches": 7, "limit_val_batches": 1}
COMPARED = ("state_dict", "optimizer_states", "lr_schedulers", "random_state", "loops")  # of a checkpoint


class StopAt(Callback):
    """Ends a run on all ranks after so many optimiser steps, as SIGTERM does: `StopOnSignal` saves last.ckpt."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_before_optimizer_step(self, trainer: Trainer, *args: Any) -> None:
        """Asks the run to end after this step."""
        if trainer.global_step == self.step - 1:
            STOP.agree(signal.SIGTERM)


class Seen(Callback):
    """Which samples were trained on, with their augmentation, and what happened when, one file per rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _write(self, trainer: Trainer, kind: str, *what: Any) -> None:
        with (self.folder / f"{kind}-{trainer.global_rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([trainer.current_epoch, trainer.global_step, *what]) + "\n")

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._write(trainer, "samples", batch["index"].tolist(), digest(batch))

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._write(trainer, "events", "batch")

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer, "events", "validation")

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer, "events", "start")

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._write(trainer, "events", "end")


def digest(batch: Any) -> str:
    """A digest of all tensors in nested mappings and sequences."""
    total = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            total.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict | list | tuple):
            for inner in part.values() if isinstance(part, dict) else part:
                add(inner)

    add(batch)
    return total.hexdigest()


def classification(model: dict[str, Any], loading: dict[str, Any]) -> tuple[ClassificationTask, ClassificationData]:
    """A tiny task and the digits."""
    task = ClassificationTask(backbone=BACKBONE, num_classes=10, img_size=8, lr=1e-2, warmup_epochs=0.5, **model)
    return task, ClassificationData(**{"source": "digits", "batch_size": 16, "img_size": 8, "seed": 5, **loading})


def segmentation(model: dict[str, Any], loading: dict[str, Any]) -> tuple[SegmentationTask, SegmentationData]:
    """A tiny task and scenes of digits: 29 to train, and 7 to evaluate."""
    task = SegmentationTask(num_classes=len(CLASSES), class_names=CLASSES, img_size=32, lr=1e-2, **model)
    scenes = Scenes(train=29, val=7, test=7)
    return task, SegmentationData(**{"batch_size": 4, "img_size": 32, "seed": 5, "scenes": scenes, **loading})


def detection(model: dict[str, Any], loading: dict[str, Any]) -> tuple[DetectionTask, DetectionData]:
    """A tiny task and scenes of digits, some of them empty: 29 to train, and 7 to evaluate."""
    task = DetectionTask(num_classes=10, class_names=[*"0123456789"], img_size=32, lr=1e-2, **model)
    scenes = Scenes(train=29, val=7, test=7, digits=(0, 3))
    return task, DetectionData(
        **{"batch_size": 4, "img_size": 32, "seed": 5, "masks": True, "scenes": scenes, **loading}
    )


def part(
    folder: Path,
    step: int,
    seed: int,
    loading: dict[str, Any],
    resumed: Path | None = None,
    model: dict[str, Any] = RANDOM,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Path:
    """Trains up to a step, as a new process would; the checkpoint, behind which nothing happened."""
    seed_everything(seed, verbose=False)
    os.environ.pop("PL_GLOBAL_SEED")
    make = {None: classification, "upernet": segmentation, "mask_rcnn": detection}[model.get("head", {}).get("name")]
    task, data = make(model, loading)
    purge_step = None
    if resumed is not None:
        checkpoint = Checkpoint(resumed, resumed=True)
        purge_step = checkpoint.purge_step
    loggers = run_loggers([], folder / "runs", None if resumed is None else "version_0", purge_step)
    stop = StopAt(step)
    stopping = [stop, StopOnSignal(), Seen(folder), *callbacks]  # which sees no batch after the end
    runner = trainer(
        folder,
        callbacks=[*stopping, SaveCheckpoints()],
        logger=loggers,
        enable_checkpointing=True,
        **{**SHORT, **options},
    )
    STOP.received, STOP.agreed = None, False  # as in a new process
    try:
        with suppress(Stopped):
            runner.fit(task, datamodule=data, ckpt_path=resumed, weights_only=True)
    finally:
        STOP.received, STOP.agreed, STOP.deferred = None, False, False
        unlock(last_of(folder).parent)  # as the end of a process does
    return last_of(folder)


def last_of(folder: Path) -> Path:
    """The last.ckpt of a run."""
    return folder / "runs" / "version_0" / "checkpoints" / "last.ckpt"


def run(folder: Path, stops: Sequence[int], loading: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Trains with interruptions after some steps; weights and all other state at the end, samples and events.

    Each part of the run has another state of the random generators when it starts, as another process has.
    """
    folder.mkdir()
    last = None
    for seed, step in enumerate([*stops, 10**6]):
        last = part(folder, step, seed, loading, last, **options)
    return read(folder, last)


def ranks(folder: Path, number: int, step: int, seed: int, *args: Any, **options: Any) -> Path:
    """The same as `part` on several ranks, in processes forked from this one."""
    on_ranks(folder, number, lambda: part(folder, step, seed, *args, devices=number, strategy="ddp", **options))
    return last_of(folder)


def on_ranks(folder: Path, number: int, function: Callable[[], object]) -> None:
    """Calls a function in processes forked from this one, as many as there are ranks."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(number)}
    common |= {"LOCAL_WORLD_SIZE": str(number), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "none"}

    def call() -> int:
        function()
        return 0

    env = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    output = folder / "output"
    started = [Forked(call, folder, output, one) for one in env]
    codes = [os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1]) for process in started]
    assert codes == [0] * number, f"{codes}\n{output.read_text(encoding='utf-8')}"


def read(folder: Path, checkpoint: Path) -> dict[str, Any]:
    """What a run came to: the checkpoint, the files that a user reads, and samples and events of each rank."""
    lines = {
        path.stem: [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted(folder.glob("*-*.jsonl"))
    }
    content = torch.load(checkpoint, weights_only=True)
    del content["callbacks"]  # which has paths; what follows from it is among the files
    return {"checkpoint": content, "files": files(checkpoint.parents[1]), **lines}


def files(run: Path) -> dict[str, Any]:
    """What a user reads in the folder of a run, by the names of files, without measured times and memory."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        if path.suffix == ".ckpt":
            content = torch_file.load(path, objects=False)
            # how an epoch was parted by an interruption at its end is not a difference; only last.ckpt is resumed
            kept = [key for key in COMPARED if key in content and (key != "loops" or path.name == LAST)]
            found[path.name] = {key: content[key] for key in kept}
        elif path.name == "metrics.csv":
            with path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            found[path.name] = [{tag: cell for tag, cell in row.items() if cell and not _measured(tag)} for row in rows]
        elif path.suffix in (".csv", ".png"):
            found[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it says what it purges
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    for tag in events.Tags()["scalars"]:
        if not _measured(tag):
            found.setdefault("events", {})[tag] = {event.step: event.value for event in events.Scalars(tag)}
    return found


def _measured(tag: str) -> bool:
    """Whether the values of a tag are times or memory, which no two runs share."""
    return tag.startswith(("images/s", "data_wait", "memory/"))


def differences(one: Any, other: Any, name: str = "") -> list[str]:
    """Names of all entries of two nested structures that differ."""
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and torch.equal(one, other)
        return [] if same else [name]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        one, other = dict(enumerate(one)), dict(enumerate(other))
    if isinstance(one, dict) and isinstance(other, dict):
        keys = one.keys() | other.keys()
        return [found for key in keys for found in differences(one.get(key), other.get(key), f"{name}/{key}")]
    return [] if one == other else [name]
