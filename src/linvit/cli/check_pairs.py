"""`linvit data check` of images with masks: every mask is read, and held against the classes and its image's size."""

import argparse
from collections import Counter

from torch.utils.data import DataLoader
from tqdm import tqdm

from linvit.data.segmentation import SegmentationData
from linvit.data.sources.mask_check import MaskFinding, shares


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what masks mean."""
    parser.add_argument("--num_classes", type=int, help="of masks: how many classes there are")
    parser.add_argument(
        "--class_names",
        help="of masks or objects: a file with a name per line; or ade20k, isprs",
    )
    parser.add_argument("--reduce_zero_label", action="store_true", help="masks count from 1, and 0 is for no class")


def check(data: SegmentationData, workers: int, shown: int) -> tuple[list[str], list[MaskFinding]]:
    """Examines all masks in several processes.

    Returns:
        Lines about each split: how frequent the classes are, and those that never occur; and the bad masks.
    """
    lines, bad = [], []
    names = data.class_names or [str(index) for index in range(data.num_classes or 0)]
    for split, rows in data.splits.items():
        if data.mask_column not in rows.features:
            lines.append(f"  {split:<10}no masks")
            continue
        pixels: Counter[int] = Counter()
        for found in tqdm(DataLoader(data.masks(rows), None, num_workers=workers), unit=" masks"):
            pixels.update(found.pixels)
            bad += [found] if found.reason else []
        lines.append(f"  {split:<10}{len(rows):>12,} masks: {shares(pixels, names, shown)}")
        absent = [name for index, name in enumerate(names) if index not in pixels]
        if absent:
            lines.append(f"  {split:<10}WARNING: {len(absent)} classes have no pixel: {', '.join(absent[:shown])}")
    return lines, bad
