"""`linvit bench data`: how fast images are loaded, beside timm's loader and beside the model."""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from jsonargparse import Namespace
from lightning.fabric import Fabric
from torch.nn import functional as F

from linvit.cli.bench.loaders import linvit_loader, rate, timm_loader, unknown_to_timm
from linvit.data import ClassificationData
from linvit.data.base import ImageData
from linvit.data.transforms.classification import Augmentation
from linvit.errors import UserError, check_number
from linvit.runs.parser import build_task
from linvit.runs.trained import data_of, read_settings
from linvit.tasks.base import SET_BY_DATA
from linvit.terminal import argument_parser

RECIPE = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25)
WORKERS = 8
CPU_BATCH = 8  # of the model: a recipe's batch is made for a GPU, and on a CPU takes minutes and all the memory
EPILOG = """examples:
  linvit bench data path/to/folder    linvit's loader and timm's, with DeiT's
                                      augmentation at 224x224
  linvit bench data --config imagenet/swin_tiny --source path/to/folder
                                      the same with a model: which of the two
                                      waits for the other?

"images/s per core" is the number of images divided by the CPU seconds of one
thread that decodes, augments and collates them to 8-bit batches. The work on
whole batches on the device (normalising, erasing) is timed on its own.
"""


def main(argv: list[str]) -> int:
    """Runs `linvit bench data`; prints the rates and returns 0.

    Raises:
        UserError: If there is nothing to measure.
    """
    parser = argument_parser("linvit bench data", __doc__, EPILOG)
    parser.add_argument("source", nargs="?", help="the images; the configuration's if left out")
    parser.add_argument("--config", metavar="CONFIG", help="experiment whose data and model are measured")
    parser.add_argument("--source", dest="instead", metavar="SOURCE", help="the same as the first argument")
    parser.add_argument("--images", type=int, default=512, help="images per round and loader (512)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; loaders take turns (5)")
    args = parser.parse_intermixed_args(argv)  # linvit bench data --images 64 FOLDER
    check_number("--images", args.images, at_least=1, whole=True)
    check_number("--rounds", args.rounds, at_least=1, whole=True)
    source = args.source or args.instead
    if source is None and args.config is None:
        raise UserError("linvit bench data needs images: linvit bench data FOLDER, or --config FILE")

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _measure(args, source, threads)
    finally:
        torch.set_num_threads(threads)
    return 0


def _measure(args: argparse.Namespace, source: str | None, threads: int) -> None:
    """Times the loaders on one thread, and the model on as many as it would have."""
    if args.config is None:
        settings, data, workers = None, ClassificationData(str(source), augmentation=RECIPE), WORKERS
    else:
        # a set that takes the place of the configuration's has classes of its own
        given = [] if source is None else [f"--data.source={source}", "--data.num_classes=null"]
        settings = read_settings("linvit bench data", ["--config", args.config, *given])
        data, workers = _checked(data_of(settings))
    data.num_workers = 0  # in this process: its CPU seconds are counted
    data.setup("fit")
    count = len(data.train_set)
    if count < data.batch_size:
        raise UserError(
            f"'{data.source}' has {count} training images, less than one batch of {data.batch_size}; add some"
        )
    augmentation = data.train_transform.augmentation
    print(f"{args.images} of {count} images of {data.source}, {data.size[0]}x{data.size[1]}")
    print(f"{augmentation}\n")

    loaders: dict[str, Callable[[], Any]] = {
        "linvit": linvit_loader(data, replace(augmentation, augment_on="worker")),
        "linvit, augment_on: device": linvit_loader(data, replace(augmentation, augment_on="device")),
    }
    folder = Path(data.source) / "train"
    missing = unknown_to_timm(folder, augmentation)
    if missing:
        print(f"timm's loader is left out; it does not do {', '.join(missing)}\n")
    else:
        loaders = {f"timm {timm.__version__}": timm_loader(folder, data, augmentation)} | loaders
    rounds = [{name: rate(loader(), args.images) for name, loader in loaders.items()} for _ in range(args.rounds)]
    rates = {name: statistics.median(one[name] for one in rounds) for name in loaders}
    base = next(iter(loaders))
    print(f"  {'loader':<28} images/s per core   ratio")
    for name, median in rates.items():
        ratio = statistics.median(one[name] / one[base] for one in rounds)
        print(f"  {name:<28} {median:>17.0f} {ratio:>7.2f}")
    fabric = Fabric(accelerator="auto", devices=1, precision=_precision(settings))
    print(f"\n  on the device ({fabric.device.type}), per batch of {data.batch_size}:")
    for name in ("linvit", "linvit, augment_on: device"):
        print(f"  {name:<28} {_device_seconds(data, loaders[name](), fabric) * 1e3:>14.1f} ms")
    if settings is not None:
        torch.set_num_threads(threads)
        _compare(settings, data, fabric, rates[f"linvit{_suffix(augmentation)}"], workers)


def _suffix(augmentation: Augmentation) -> str:
    return ", augment_on: device" if augmentation.augment_on == "device" else ""


def _checked(data: ImageData) -> tuple[ClassificationData, int]:
    """The data, and its number of loader processes."""
    if not isinstance(data, ClassificationData):
        raise UserError(f"linvit bench data measures ClassificationData; the configuration has {type(data).__name__}")
    return data, data.num_workers


def _precision(settings: Namespace | None) -> Any:
    trainer = settings.trainer if settings is not None else None
    return trainer.get("precision") if isinstance(trainer, dict) else None


def _device_seconds(data: ClassificationData, loader: Any, fabric: Fabric, repeats: int = 5) -> float:
    """Median of the seconds that a batch takes on the device, without its transfer."""
    batch = next(iter(loader))
    batch["image"] = fabric.to_device(batch["image"])
    return _seconds(lambda: data.on_after_batch_transfer(dict(batch), 0), fabric, repeats)


def _seconds(work: Callable[[], Any], fabric: Fabric, repeats: int) -> float:
    taken = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        work()
        if fabric.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])  # the first one warms up


def _compare(settings: Namespace, data: ClassificationData, fabric: Fabric, per_core: float, workers: int) -> None:
    """Times training steps of the model on one batch; prints whether the loader or the model is the slower one."""
    facts = {fact: getattr(data, fact) for fact in SET_BY_DATA if getattr(data, fact) is not None}
    task = build_task(settings.model, **facts)
    model, optimizer = fabric.setup(task, torch.optim.AdamW(task.parameters()))
    batch = min(data.batch_size, CPU_BATCH) if fabric.device.type == "cpu" else data.batch_size
    images = torch.randn(batch, data.in_chans, *data.size, device=fabric.device)
    labels = torch.zeros(batch, dtype=torch.long, device=fabric.device)

    def step() -> None:
        fabric.backward(F.cross_entropy(model(images), labels))
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained = batch / _seconds(step, fabric, 3)
    cores = min(max(workers, 1), os.cpu_count() or 1)
    loaded = per_core * cores
    waits = "the model waits for the loader" if loaded < trained else "the loader waits for the model"
    print(f"\n  the model trains on {trained:.0f} images/s ({fabric.device.type}, {batch} per step)")
    print(f"  {workers} loader processes on {cores} cores load {loaded:.0f} images/s: {waits}")
