"""Images per second and core of the training pipeline of ADE20K's recipes, against a plain torchvision v2 pipeline.

Usage: python benchmarks/segmentation_pipeline.py FOLDER [--images 200] [--rounds 5]

FOLDER is ADE20K, or what benchmarks/ade20k_like.py makes. Both pipelines read, decode, resize, crop by the rule of two
classes, flip, change colours, pad and normalise, one image after another in one thread; they take turns, batch by
batch, and the time of the processor is counted. torchvision's contrast and brightness are other formulas, which cost
the same.
"""

import argparse
import time
from pathlib import Path
from statistics import median

import torch
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as v2

from linvit.data import SegmentationData
from linvit.data.base import IMAGENET_MEAN, IMAGENET_STD
from linvit.data.loading.sampler import SeededIndex, sample_seed

BATCH, SIDE = 8, 512


def chance() -> bool:
    """Heads or tails."""
    return bool(torch.rand(()) < 0.5)


def between(low: float, high: float) -> float:
    """A number, uniform."""
    return float(torch.empty(()).uniform_(low, high))


def torchvision_sample(image_file: Path, mask_file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """One training sample by torchvision's functions."""
    image = decode_image(str(image_file), ImageReadMode.RGB)
    mask = decode_image(str(mask_file), ImageReadMode.UNCHANGED)
    mask = torch.where(mask == 0, 255, mask - 1)
    ratio = between(0.5, 2.0)
    height, width = image.shape[-2:]
    scale = min(int(2048 * ratio) / max(height, width), int(512 * ratio) / min(height, width))
    size = [int(height * scale + 0.5), int(width * scale + 0.5)]
    image = v2.resize(image, size, InterpolationMode.BILINEAR, antialias=False)
    mask = v2.resize(mask, size, InterpolationMode.NEAREST)
    down, right = max(SIDE - size[0], 0), max(SIDE - size[1], 0)
    for _ in range(11):
        top, left = (int(torch.randint(max(side - SIDE, 0) + 1, ())) for side in size)
        part = v2.crop(mask, top, left, min(SIDE, size[0]), min(SIDE, size[1]))
        values, counts = part.unique(return_counts=True)
        counts = counts[values != 255]
        if len(counts) > 1 and counts.max() / counts.sum() < 0.75:
            break
    image = v2.crop(image, top, left, min(SIDE, size[0]), min(SIDE, size[1]))
    if chance():
        image, part = v2.horizontal_flip(image), v2.horizontal_flip(part)
    if chance():
        image = v2.adjust_brightness(image, between(0.875, 1.125))
    contrast_first = chance()
    if contrast_first and chance():
        image = v2.adjust_contrast(image, between(0.5, 1.5))
    if chance():
        image = v2.adjust_saturation(image, between(0.5, 1.5))
    if chance():
        image = v2.adjust_hue(image, between(-0.1, 0.1))
    if not contrast_first and chance():
        image = v2.adjust_contrast(image, between(0.5, 1.5))
    image = v2.normalize(v2.to_dtype(image, torch.float32, scale=True), IMAGENET_MEAN, IMAGENET_STD)
    return v2.pad(image, [0, 0, right, down]), v2.pad(part, [0, 0, right, down], fill=255)


def main(folder: Path, images: int, rounds: int) -> None:
    """Prints the images per second of both, and their ratio."""
    torch.set_num_threads(1)
    data = SegmentationData(
        str(folder),
        num_classes=150,
        reduce_zero_label=True,
        resize_limits=(2048, SIDE),
        img_size=SIDE,
        exif_orientation=False,
    )
    data.setup("fit")
    files = sorted((folder / "images" / "training").iterdir())[:images]
    pairs = [(file, folder / "annotations" / "training" / f"{file.stem}.png") for file in files]

    def ours(rows: range, turn: int) -> None:
        samples = [data.train_set[SeededIndex(row, sample_seed(0, turn, row))] for row in rows]
        data.finish(data.collate(samples))

    def theirs(rows: range, turn: int) -> None:
        samples = [torchvision_sample(*pairs[row]) for row in rows]
        torch.stack([image for image, _ in samples])
        torch.stack([mask for _, mask in samples])

    spent = {"linvit": [0.0] * rounds, "torchvision": [0.0] * rounds}
    for turn in range(rounds + 1):  # the first warms up
        for start in range(0, len(pairs), BATCH):
            rows = range(start, min(start + BATCH, len(pairs)))
            for name, run in (("linvit", ours), ("torchvision", theirs)):
                before = time.process_time()
                run(rows, turn)
                if turn:
                    spent[name][turn - 1] += time.process_time() - before
    for name, seconds in spent.items():
        each = [len(pairs) / turn for turn in seconds]
        print(f"{name:12} {median(each):6.1f} images/s and core, {min(each):.1f} to {max(each):.1f} in {rounds} rounds")
    ratios = [b / a for a, b in zip(spent["linvit"], spent["torchvision"], strict=True)]
    print(f"ratio        {median(ratios):6.2f}, {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    main(given.folder, given.images, given.rounds)
