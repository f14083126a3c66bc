"""Trains on scenes of many sizes with one small digit each: at native size in packs, and resized to one square.

    python benchmarks/small_digits.py FOLDER [--ways native 32 40] [--seeds 0 1]

The scenes are made once. Their sides are uniform from 16 to 48 pixels with an aspect of at most 2, a bright digit of 8
to 12 pixels has any place on a dark texture, and no digit of a test scene is in a training scene. A way is `native`
(packs of as many tokens as 64 squares of 32 x 32) or the side of the square to which all images are stretched. The same
command resumes. It prints a table: test accuracy of all scenes and of those of less and more than 32 x 32 pixels, and
images per second of processor time of `linvit fit`, with start and validation. Intervals are 95 %, by a bootstrap over
the digits, of the mean over the seeds.
"""

import argparse
import csv
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from linvit.data.sources.scenes import background, pool

SCENES = {"train": 8000, "val": 1000, "test": 2000}
EPOCHS = 10
OPTIONS = """--config quickstart --trainer.callbacks=null --trainer.enable_progress_bar=false --resume=auto
--trainer.gradient_clip_val=1 --model.backbone.name=deit_tiny --model.backbone.embed_dim=64 --model.backbone.depth=4
--model.backbone.num_heads=2 --model.backbone.patch_size=4 --model.backbone.cpe=true --model.attention=linear
--model.drop_path_rate=0 --model.lr=2e-3 --model.warmup_epochs=1 --data.augmentation.crop_scale=[1,1]
--data.augmentation.crop_ratio=[0.5,2] --data.augmentation.rotate=0 --data.augmentation.translate=0
--data.augmentation.zoom=0 --data.crop_mode=squash --data.mean=[0.3,0.3,0.3] --data.std=[0.25,0.25,0.25]"""


def main(argv: list[str] | None = None) -> None:
    """Makes the scenes, trains what is missing, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ways", nargs="+", default=["native", "32"], help="native, or a side (%(default)s)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of the runs (%(default)s)")
    args = parser.parse_args(argv)
    for split, count in SCENES.items():
        if not (args.folder / "scenes" / split).exists():
            make(args.folder / "scenes", split, count)
    for seed in args.seeds:
        for way in args.ways:
            if not (args.folder / f"{way}_{seed}" / "predictions.csv").exists():
                train(args.folder, way, seed)
    report(args.folder, args.ways, args.seeds)


def make(root: Path, split: str, count: int) -> None:
    """Writes scenes as root/split/CLASS/NUMBER_DIGIT.png; DIGIT is the row of the digit in its split."""
    rng, (images, classes) = np.random.default_rng([len(split), count]), pool(split)
    hidden = root / f"{split}.part"
    for number in range(count):
        height, width = rng.integers(16, 49, 2)
        while max(height, width) > 2 * min(height, width):
            height, width = rng.integers(16, 49, 2)
        digit, side = int(rng.integers(len(images))), int(rng.integers(8, 13))
        ink = np.asarray(Image.fromarray(images[digit]).resize((side, side), Image.Resampling.BICUBIC))[..., None] / 255
        scene = background(rng, (int(height), int(width))) / 2
        top, left = int(rng.integers(height - side + 1)), int(rng.integers(width - side + 1))
        around = scene[top : top + side, left : left + side]
        around += ink * (rng.uniform(180, 255, 3) - around)
        scene += rng.normal(0, 4, (height, width, 1))
        file = hidden / str(classes[digit]) / f"{number:05d}_{digit}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(scene.clip(0, 255).astype(np.uint8)).save(file)
    hidden.rename(root / split)


def train(folder: Path, way: str, seed: int) -> None:
    """Trains and predicts; adds the seconds of the processor to `seconds.txt`."""
    own, scenes = folder / f"{way}_{seed}", folder / "scenes"
    own.mkdir(exist_ok=True)
    size = [f"--data.img_size={32 if way == 'native' else way}", "--data.crop_pct=1", "--data.batch_size=64"]
    packs = ["--data.token_budget=4096", "--data.patch_size=4"] if way == "native" else []
    run = [f"--data.source={scenes}", f"--trainer.max_epochs={EPOCHS}", f"--seed_everything={seed}"]
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    linvit("fit", *OPTIONS.split(), *size, *packs, *run, f"--trainer.default_root_dir={own}")
    with (own / "seconds.txt").open("a") as file:
        print(sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before, file=file)
    linvit("predict", "--model", own / "quickstart/version_0", scenes / "test", "--output", own / "out")
    next((own / "out").glob("*.csv")).rename(own / "predictions.csv")


def linvit(*arguments: str | Path) -> None:
    """Runs a command of linvit in one thread."""
    command = [sys.executable, "-m", "linvit", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | {"OMP_NUM_THREADS": "1"})


def report(folder: Path, ways: list[str], seeds: list[int]) -> None:
    """Prints a row for each way, and one for its difference from the first."""
    hits = {way: np.mean([correct(folder / f"{way}_{seed}") for seed in seeds], 0) for way in ways}
    files = sorted((folder / "scenes" / "test").rglob("*.png"))
    digits = np.array([int(file.stem.split("_")[1]) for file in files])
    pixels = np.array([Image.open(file).size for file in files]).prod(1)
    sizes = (pixels > 0, pixels < 32**2, pixels > 32**2)
    print("| way | images/s | all test scenes | below 32 x 32 pixels | above | by seed |\n|--|--:|--:|--:|--:|--:|")
    for way in ways:
        spent = sum(float(line) for seed in seeds for line in (folder / f"{way}_{seed}/seconds.txt").open())
        scores = (interval(hits[way][size], digits[size]) for size in sizes)
        each = ", ".join(f"{correct(folder / f'{way}_{seed}').mean():.3f}" for seed in seeds)
        print(f"| {way} | {len(seeds) * EPOCHS * SCENES['train'] / spent:.0f} | {' | '.join(scores)} | {each} |")
    for way in ways[1:]:
        scores = (interval((hits[way] - hits[ways[0]])[size], digits[size]) for size in sizes)
        print(f"| {way} - {ways[0]} | | {' | '.join(scores)} | |")


def correct(run: Path) -> np.ndarray:
    """Returns which of the test scenes, in the order of their files, a run recognised."""
    with (run / "predictions.csv").open() as file:
        rows = sorted((row["id"], row["class"]) for row in csv.DictReader(file))
    return np.array([Path(name).parent.name == found for name, found in rows], float)


def interval(hits: np.ndarray, digits: np.ndarray) -> str:
    """Returns the mean and its interval; the bootstrap draws digits with all of their scenes."""
    _, rows = np.unique(digits, return_inverse=True)
    sums, counts = np.bincount(rows, hits), np.bincount(rows)
    drawn = np.random.default_rng(0).integers(len(counts), size=(2000, len(counts)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    return f"{hits.mean():.3f} ({low:.3f} to {high:.3f})"


if __name__ == "__main__":
    main()
