"""Where loading an image spends its time, part by part, in linvit's loader and in timm's: one thread, processor time.

Usage: python benchmarks/loader_parts.py FOLDER [--images 384] [--rounds 3]

FOLDER is as of benchmarks/imagenet_like.py. The recipe is that of `linvit bench data`, which times the loaders as they
are; here each part is timed within the running loader, with the caches as the parts before it leave them. That adds
some microseconds to each call. The loaders take turns; the figures are medians over rounds, milliseconds per image.
"""

import argparse
import os
import statistics
import time
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from linvit.cli.bench.loaders import linvit_loader, timm_loader
from timm.data import ImageDataset
from timm.data.auto_augment import AugmentOp
from timm.data.transforms import RandomResizedCropAndInterpolation

from linvit.cli.bench.data import RECIPE
from linvit.data import ClassificationData, base
from linvit.data.sources.images import Images
from linvit.data.sources.read import ImageFile
from linvit.data.transforms.classification import TrainTransform
from linvit.data.transforms.geometry import Resize, Warp
from linvit.data.transforms.ops import PixelOp

PARTS = (
    (Images, "_load", "rows, files, headers"),
    (ImageFile, "decode", "decode"),
    (TrainTransform, "__call__", "random numbers, crop and flip"),
    (Resize, "image", "resize"),
    (Warp, "image", "RandAugment: moves"),
    (PixelOp, "image", "RandAugment: colours"),
    (base, "collate", "batch"),
    (ImageDataset, "__getitem__", "files, headers, decode, RGB"),
    (RandomResizedCropAndInterpolation, "__call__", "crop and resize"),
    (AugmentOp, "__call__", "RandAugment"),
)
REST = "everything else"

spent: dict[str, float] = defaultdict(float)
running: list[float] = []  # of the calls that have not returned: what the calls within them took


def timed(owner: Any, name: str, part: str) -> None:
    """Replaces a function by one that adds its time, without that of the timed calls within it, to a part."""
    function = getattr(owner, name)

    def run(*args: Any, **options: Any) -> Any:
        started = time.thread_time()
        running.append(0.0)
        try:
            return function(*args, **options)
        finally:
            took = time.thread_time() - started
            spent[part] += took - running.pop()
            if running:
                running[-1] += took

    setattr(owner, name, run)


def measure(loader: Any, images: int) -> dict[str, float]:
    """Milliseconds per image of each part."""
    spent.clear()
    count, started = 0, time.thread_time()
    for batch in loader:
        count += len(batch["image"] if isinstance(batch, dict) else batch[0])
        if count >= images:
            break
    spent[REST] = time.thread_time() - started - sum(spent.values())
    return {part: 1e3 * took / count for part, took in spent.items()}


def main() -> None:
    """Reads the arguments, runs the loaders and prints a table of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=384, help="per round and loader")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for owner, name, part in PARTS:
        timed(owner, name, part)
    data = ClassificationData(str(args.folder), augmentation=RECIPE, num_workers=0)
    data.setup("fit")
    loaders = {"timm": timm_loader(args.folder / "train", data, RECIPE), "linvit": linvit_loader(data, RECIPE)}
    rounds = [{name: measure(loader(), args.images) for name, loader in loaders.items()} for _ in range(args.rounds)]
    for name in loaders:
        parts = {part: statistics.median(one[name].get(part, 0) for one in rounds) for part in rounds[0][name]}
        print(f"\n| {name} | ms per image |\n|---|---|")
        for part, took in [*parts.items(), ("sum", sum(parts.values()))]:
            print(f"| {part} | {took:.3f} |")
    print(f"\nload {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
