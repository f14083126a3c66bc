"""How fast images are loaded, beside timm's loader.

    python benchmarks/loading.py path/to/folder             # with DeiT's augmentation at 224x224
    python benchmarks/loading.py path/to/folder --config imagenet/swin_tiny

"images/s per core" is the number of images divided by the CPU seconds of one thread that decodes, augments and collates
them to 8-bit batches. Whether training waits for its images says data_wait in the curves of a run.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.data import ImageDataset, create_loader

from linvit.data import ClassificationData
from linvit.data.transforms.classification import Augmentation, TrainTransform
from linvit.errors import UserError, check_number
from linvit.runs.options import read_config
from linvit.runs.run import Run

RECIPE = Augmentation(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=0.25)


def main(argv: list[str] | None = None) -> None:
    """Prints the rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", help="the images; the configuration's if left out")
    parser.add_argument("--config", metavar="CONFIG", help="configuration whose data is measured")
    parser.add_argument("--images", type=int, default=512, help="images per round and loader (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds; loaders take turns (%(default)s)")
    args = parser.parse_intermixed_args(argv)  # --images 64 FOLDER
    check_number("--images", args.images, at_least=1, whole=True)
    check_number("--rounds", args.rounds, at_least=1, whole=True)
    if args.source is None and args.config is None:
        parser.error("name the images: FOLDER, or --config FILE")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        _measure(args)
    finally:
        torch.set_num_threads(threads)


def _measure(args: argparse.Namespace) -> None:
    data: Any = ClassificationData(args.source or "", augmentation=RECIPE)
    if args.config is not None:  # a set that takes the place of the configuration's has classes of its own
        given = {} if args.source is None else {"data.source": args.source, "data.num_classes": None}
        data = Run.from_config(read_config(args.config, given)).data
    data.num_workers = 0
    data.setup("fit")
    count = len(data.train_set)
    if count < data.batch_size:
        raise UserError(
            f"'{data.source}' has {count} training images, less than one batch of {data.batch_size}; add some"
        )
    recipe = data.train_transform.augmentation if isinstance(data, ClassificationData) else None
    sized = f"{data.size[0]}x{data.size[1]}"
    print(f"{args.images} images, drawn from the {count} of {data.source}, {sized}\n{recipe or ''}\n")
    loaders: dict[str, Callable[[], Any]] = {}
    if missing := [type(data).__name__] if recipe is None else _unknown_to_timm(data, recipe):
        print(f"timm's loader is left out; it does not do {', '.join(missing)}\n")
    else:
        loaders[f"timm {timm.__version__}"] = lambda: _timm_loader(data, recipe)
    loaders["linvit"] = data.train_dataloader
    if recipe is not None:
        loaders["linvit"] = lambda: _loader(data, replace(recipe, augment_on="worker"))
        loaders["linvit, augment_on: device"] = lambda: _loader(data, replace(recipe, augment_on="device"))
    rounds = [{name: rate(loader(), args.images) for name, loader in loaders.items()} for _ in range(args.rounds)]
    base = next(iter(loaders))
    print(f"  {'loader':<28} images/s per core   ratio")
    for name in loaders:
        ratio = statistics.median(one[name] / one[base] for one in rounds)
        print(f"  {name:<28} {statistics.median(one[name] for one in rounds):>17.0f} {ratio:>7.2f}")


def _loader(data: ClassificationData, augmentation: Augmentation) -> Any:
    data.train_set.reader.transform = TrainTransform(data.size, augmentation, data.mean)
    return data.train_dataloader()


def _unknown_to_timm(data: ClassificationData, given: Augmentation) -> list[str]:
    """The parts of a recipe that timm's loader cannot do: it would fail, or do something else."""
    unknown = [] if Path(data.source, "train").is_dir() else ["images outside a folder"]
    unknown += ["crop_scale: null"] * (given.crop_scale is None)
    return unknown + [name for name in ("rotate", "translate", "zoom") if getattr(given, name)]


def _timm_loader(data: ClassificationData, given: Any) -> Any:
    """The training loader of timm for the same files and recipe, without the part that runs on the device."""
    policy = given.auto_augment
    if policy and policy.startswith("rand") and "mmax" not in policy:
        policy += "-mmax9"  # at magnitude 10 timm posterizes to 0 bits, which Pillow 13 refuses
    return create_loader(
        ImageDataset(str(Path(data.source, "train"))),
        input_size=(3, *data.size),
        batch_size=data.batch_size,
        is_training=True,
        scale=given.crop_scale,
        ratio=given.crop_ratio,
        hflip=given.hflip,
        color_jitter=given.color_jitter,
        auto_augment=policy,
        interpolation=given.interpolation,
        re_prob=given.random_erasing,
        re_mode="pixel",
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    ).loader


def rate(loader: Any, images: int) -> float:
    """Images per CPU second of this thread."""
    count, started = 0, time.thread_time()
    for batch in loader:
        count += len(batch["image"] if isinstance(batch, dict) else batch[0])
        if count >= images:
            break
    return count / (time.thread_time() - started)


if __name__ == "__main__":
    main()
