"""Scenes of many handwritten digits on textured backgrounds, with the class of each pixel, boxes and instance masks.

The digits are the 1,797 real ones that come with linvit, split as they are for classification, so that no test digit is
in a training scene. A scene is a function of its seed: nothing is stored, and it may be of any size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, ClassVar

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.data.loading.sampler import generator, sample_seed
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import SampleReader, Target, Transform
from linvit.data.sources.labels import Classes, undecoded
from linvit.data.sources.read import RGB, ImageReader
from linvit.data.sources.splits import SCENES, Rows, load_splits
from linvit.data.transforms.decode import decode
from linvit.errors import UserError, check_number, check_range

CLASSES = ["background", *map(str, range(10))]
SCENE_SPLITS = ("train", "val", "test")
INK = 0.5  # a pixel belongs to the digit that covers more of it than this
HIDDEN = 0.25  # a digit is not an instance if a smaller fraction of it is visible
PLACES = 8  # drawn for a digit, until one is free
CONTRAST = 90.0  # of a digit against its surroundings: the least distance of their colours, of 442


@dataclass(frozen=True)
class Generated:
    """Number of samples of a generated dataset.

    Attributes:
        train: Training samples of an epoch.
        val: Validation samples, the same in every epoch and run.
        test: Test samples, likewise.
        seed: Of all samples.
    """

    option: ClassVar[str] = ""
    train: int = 2000
    val: int = 200
    test: int = 400
    seed: int = 0

    def __post_init__(self) -> None:
        for name in SCENE_SPLITS:
            check_number(f"{self.option}{name}", getattr(self, name), at_least=1, whole=True)


@dataclass(frozen=True)
class Scenes(Generated):
    """Configuration of the scenes of `digit_scenes`.

    Attributes:
        digits: Fewest and most digits of a scene.
        digit_size: Least and largest side of a digit, as a fraction of the scene's shorter side.
    """

    option: ClassVar[str] = "scenes."
    digits: tuple[int, int] = (4, 8)
    digit_size: tuple[float, float] = (0.22, 0.45)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.digits[0] <= self.digits[1]:
            raise UserError(f"scenes.digits must be [fewest, most] with 0 <= fewest <= most; got {list(self.digits)}")
        check_range("scenes.digit_size", self.digit_size, at_most=1)


def scene(split: str, seed: int, size: tuple[int, int], options: Scenes = Scenes()) -> dict[str, Tensor]:
    """Makes the scene of a size (H, W) that follows from a seed, of the digits of a split.

    It has `image`, 8-bit (3, H, W); `mask`, 8-bit (H, W), 0 for the background and 1 + digit; and for each digit that
    is not hidden, far ones first, `boxes` (N, 4) of its visible part, `labels` (N,), and `masks` (N, H, W), 8-bit.
    """
    rng = generator(seed)
    images, digits = pool(split)
    image = background(rng, size)
    mask, owner = np.zeros(size, np.uint8), np.zeros(size, np.uint8)  # owner: number of the instance, 0 for none
    count = int(rng.integers(options.digits[0], options.digits[1] + 1))
    chosen = rng.integers(len(digits), size=count)
    low, high = (max(round(part * min(size)), 8) for part in options.digit_size)
    sides = np.minimum(rng.integers(low, high + 1, count), min(size))
    inks = _drawn(images[chosen], sides, rng)
    whole, taken = [], np.zeros((0, 4))
    for number, (ink, index) in enumerate(zip(inks, chosen, strict=True), 1):
        side = len(ink)
        top, left = _place(rng, size, side, taken)
        taken = np.concatenate([taken, [[top, left, top + side, left + side]]])
        at = slice(top, top + side), slice(left, left + side)
        around = image[at]
        around += ink[..., None] * (_colour(rng, around.mean((0, 1))) - around)
        covered = ink > INK
        mask[at][covered] = 1 + digits[index]
        owner[at][covered] = number
        whole.append(int(covered.sum()))
    shown = torch.from_numpy((image + rng.normal(0, 4, (*size, 1))).clip(0, 255).astype(np.uint8)).permute(2, 0, 1)
    return {"image": shown, "mask": torch.from_numpy(mask)} | _instances(owner, whole, digits[chosen])


@cache
def pool(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the digits of a split: 8-bit images (N, 8, 8), and which digits they are (N,)."""
    rows = load_splits("digits")[split]
    images = undecoded(rows, "image")["image"]
    return np.stack([decode(stored["bytes"])[0].numpy() for stored in images]), np.array(rows["label"])


def background(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Draws a texture (H, W, 3), float32, 0 to 255: clouds of several sizes, and stripes with probability 1/2."""
    base = rng.uniform(30, 225, 3).astype(np.float32)
    clouds = torch.from_numpy(base)[None, :, None, None]
    for cells, strength in ((3, 30), (9, 18), (27, 12)):  # each finer than the one before, which is enlarged
        noise = torch.from_numpy(rng.normal(0, strength, (1, 3, cells, cells)).astype(np.float32))
        clouds = F.interpolate(clouds, (cells, cells), mode="bilinear") + noise
    image: np.ndarray = F.interpolate(clouds, size, mode="bilinear")[0].permute(1, 2, 0).contiguous().numpy()
    if rng.random() < 0.5:
        angle, period = rng.uniform(0, np.pi), rng.uniform(0.04, 0.2) * min(size)
        x, y = np.cos(angle) * np.arange(size[1]), np.sin(angle) * np.arange(size[0])
        wave = np.sin((2 * np.pi / period) * (x + y[:, None])).astype(np.float32)
        image += wave[..., None] * rng.normal(0, 14, 3).astype(np.float32)
    return image


def _drawn(images: np.ndarray, sides: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Digits (n, 8, 8) in 8 bits as ink, 0 to 1, each on a square of its side, turned and shrunk a little."""
    if not len(images):
        return []
    largest, n = int(sides.max()), len(images)
    angle, stretch = np.deg2rad(rng.uniform(-15, 15, n)), rng.uniform(1.1, 1.3, (2, n))
    cos, sin = np.cos(angle) * stretch, np.sin(angle) * stretch  # (2, n): of the x and the y axis
    # Canvas coordinates run from -1 to 1 over `largest` pixels; the square of a digit is the upper left part of it.
    zoom = largest / sides
    matrix = zoom[:, None, None] * np.stack([cos[0], -sin[1], sin[0], cos[1]], -1).reshape(n, 2, 2)
    offset = matrix.sum(-1, keepdims=True) * (1 - 1 / zoom)[:, None, None]
    theta = np.concatenate([matrix, offset], -1)  # (n, 2, 3)
    canvas = F.affine_grid(torch.from_numpy(theta.astype(np.float32)), [n, 1, largest, largest], align_corners=False)
    ink = torch.from_numpy(images[:, None].astype(np.float32) / 255)
    drawn = F.grid_sample(ink, canvas, "bicubic", "zeros", align_corners=False)[:, 0].numpy()
    # A pixel of the 8 x 8 image is enlarged to `scale` pixels, and edges are as wide. They are made one pixel wide, as
    # those of a stroke are that covers pixels in part: then the visible part of a digit matches its label.
    scale = (sides / (8 * stretch.mean(0))).astype(np.float32)[:, None, None]
    drawn = ((drawn - INK) * scale + INK).clip(0, 1)
    return [digit[:side, :side] for digit, side in zip(drawn, sides, strict=True)]


def _place(rng: np.random.Generator, size: tuple[int, int], side: int, taken: np.ndarray) -> tuple[int, int]:
    """Draws the place of a digit: the first that others (N, 4) hardly cover, or the least covered of those drawn."""
    places = rng.random((PLACES, 2)) * (np.array(size) - side + 1)
    corner = places.astype(int)  # (PLACES, 2)
    low = np.maximum(corner[:, None], taken[:, :2])
    high = np.minimum(corner[:, None] + side, taken[:, 2:])
    shared = (high - low).clip(0).prod(-1).sum(-1) / side**2  # (PLACES,)
    free = np.flatnonzero(shared < 0.1)
    top, left = corner[free[0] if len(free) else shared.argmin()]
    return int(top), int(left)


def _colour(rng: np.random.Generator, around: np.ndarray) -> np.ndarray:
    """Draws a colour that differs from its surroundings."""
    colours = rng.uniform(0, 255, (PLACES, 3)).astype(np.float32)
    distance = np.sqrt(((colours - around) ** 2).sum(-1))
    far = np.flatnonzero(distance > CONTRAST)
    chosen: np.ndarray = colours[far[0] if len(far) else distance.argmax()]
    return chosen


def _instances(owner: np.ndarray, whole: list[int], digits: np.ndarray) -> dict[str, Tensor]:
    """Returns boxes, labels and masks of each digit's visible part; `owner` (H, W) is the digit at each pixel."""
    seen = np.bincount(owner.ravel(), minlength=len(whole) + 1)[1:]
    kept = np.flatnonzero(seen > HIDDEN * np.array(whole))
    masks = owner == (kept + 1)[:, None, None].astype(np.uint8)  # (N, H, W)
    boxes = np.zeros((len(kept), 4), np.float32)
    for axis, first in ((1, 0), (2, 1)):  # over the rows for x, over the columns for y
        line = masks.any(axis)
        boxes[:, first] = line.argmax(1)
        boxes[:, first + 2] = line.shape[1] - line[:, ::-1].argmax(1)
    labels = torch.from_numpy(digits[kept].astype(np.int64))
    return {"boxes": torch.from_numpy(boxes), "labels": labels, "masks": torch.from_numpy(masks.astype(np.uint8))}


@dataclass
class GeneratedReader(SampleReader):
    """Makes the sample of a row of a `GeneratedSource`, with the targets as further entries."""

    make: Callable[[str, int], dict[str, Any]]
    options: Generated

    def columns_of(self, rows: Rows) -> Rows:
        """Returns the columns that identify a sample."""
        return rows.with_format("arrow")

    def __call__(self, row: Mapping[str, Any], number: int, place: str, seed: int) -> dict[str, Any]:
        """Makes a sample; a training sample also depends on its seed in the epoch, if each epoch has new samples."""
        split = row["split"]
        fresh = seed if split == SCENE_SPLITS[0] else 0
        made_from = sample_seed(self.options.seed, SCENE_SPLITS.index(split), row["scene"], fresh)
        made = self.make(split, made_from) | {"image_id": row["scene"]}
        sample = {name: made[name] for name in ("image", *self.targets)}
        return self.transform(sample, seed) | {"index": number, "id": f"{split}_{row['scene']}"}


@dataclass(eq=False, kw_only=True)
class GeneratedSource(DataSource):
    """A source whose images, of three bands of 8 bits, are made from a split and a seed when they are asked for."""

    make: Callable[[str, int], dict[str, Any]]
    image_column = "scene"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images.bands != RGB:
            what = f"the images of {self.name} have three bands of 8 bits"
            raise UserError(f"{what}; leave --data.bands and value_range out")

    @cached_property
    def splits(self) -> Splits:
        """Numbers of the samples of each split."""
        return {
            name: datasets.Dataset.from_dict({"split": [name] * count, "scene": list(range(count))})
            for name, count in ((name, getattr(self.options, name)) for name in SCENE_SPLITS)
        }

    def reader(self, targets: Mapping[str, Target], transform: Transform) -> SampleReader:
        """Makes images instead of decoding them; see `DataSource.reader`."""
        return GeneratedReader(transform, self.image_column, targets, self.images, self.make, self.options)


class SceneSource(GeneratedSource):
    """The data source `digit_scenes`: scenes of a size (H, W)."""

    classes = Classes(CLASSES[1:], [*range(10)])

    def __init__(self, images: ImageReader, options: Scenes, size: tuple[int, int]) -> None:
        super().__init__(SCENES, images, options=options, make=partial(_with_objects, size=size, options=options))


def _with_objects(split: str, seed: int, size: tuple[int, int], options: Scenes) -> dict[str, Any]:
    """Returns a scene, and its boxes, labels and masks as detection has them."""
    made: dict[str, Any] = scene(split, seed, size, options)
    return made | {"objects": {name: made[name].numpy() for name in ("boxes", "labels", "masks")}}
