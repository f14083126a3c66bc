"""Reports of dense prediction: pictures, scores of the classes, curves, masks and boxes as files."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from PIL import Image, ImageDraw, ImageFont

from linvit.callbacks.common import LIGHT, Paper, add_picture, class_names, pixels
from linvit.callbacks.report import rendered, training_on, write_picture
from linvit.io import coco_masks
from linvit.io.files import make_folder, rewriting
from linvit.io.rasters import georeference, write_tiff

OPACITY = 0.6  # of the colours over a picture
SWATCH, LINE, GAP = 14, 20, 6  # pixels of a legend


FIRST = (  # grey, Tableau's ten with black in place of their grey: PASCAL VOC's first ones have three reds among them
    *((96, 96, 96), (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40), (148, 103, 189)),
    *((140, 86, 75), (227, 119, 194), (0, 0, 0), (188, 189, 34), (23, 190, 207)),
)


def palette(classes: int) -> np.ndarray:
    """Returns a colour per class (K, 3), uint8: eleven distinct ones, then PASCAL VOC's bits of numbers."""
    numbers = np.arange(classes)
    colours = np.zeros((classes, 3), dtype=np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (((numbers >> (3 * bit + channel)) & 1) << (7 - bit)).astype(np.uint8)
    colours[: len(FIRST)] = FIRST[:classes]
    return colours


def overlay(picture: np.ndarray, classes: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Returns a grey picture (H, W, 3), uint8, under the colours of classes (H, W); other pixels are unchanged."""
    known = classes < len(colours)
    mixed = (1 - OPACITY) * picture.mean(-1, keepdims=True) + OPACITY * colours[np.where(known, classes, 0)]
    return np.where(known[..., None], mixed.round().astype(np.uint8), picture)


def legend(colours: np.ndarray, names: Sequence[str], width: int, paper: Paper = LIGHT) -> Image.Image:
    """Returns a picture of that width with a swatch and the name of each class, in as many columns as fit."""
    font = ImageFont.load_default(12)
    column = SWATCH + 3 * GAP + max((int(font.getlength(name)) for name in names), default=0)
    columns = max(width // column, 1)
    rows = -(-len(names) // columns)
    picture = Image.new("RGB", (width, rows * LINE + GAP), paper.back)
    draw = ImageDraw.Draw(picture)
    for i, (name, colour) in enumerate(zip(names, colours.tolist(), strict=True)):
        left, top = i % columns * column + GAP, i // columns * LINE + GAP
        draw.rectangle((left, top, left + SWATCH, top + SWATCH), tuple(colour), "grey")
        draw.text((left + SWATCH + GAP, top + SWATCH / 2), name, paper.ink, font, anchor="lm")
    return picture


class ValidationPictures(Callback):
    """Writes a picture at each validation: a row for each of the first images of rank 0's part of the dataset.

    TensorBoard has all of them (`val/NAME`), and `val_NAME.png` in the run's folder is the last. Predictions use the
    weights that `predict_with` selects. A subclass supplies `name`, `titles`, `width` and `rows`.

    Args:
        images: Number of rows of the picture.
    """

    name: ClassVar[str]
    """Name of the picture."""
    titles: ClassVar[tuple[str, ...]]
    """Titles of the columns."""
    width: ClassVar[int]
    """Width of a column in pixels."""

    def __init__(self, images: int = 4) -> None:
        self.images = images
        self._rows: list[np.ndarray] = []

    def rows(self, task: LightningModule, batch: dict[str, Any], predicted: Any) -> Iterable[np.ndarray]:
        """Returns a row per image of a batch, (H, columns x width, 3), uint8, from the results of `score_batch`."""
        raise NotImplementedError

    def below(self, task: LightningModule) -> list[np.ndarray]:
        """Returns the pictures below the rows, as wide as they are."""
        return []

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the rows of the last validation."""
        self._rows.clear()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Makes the rows of the first images."""
        outputs, batch, *_ = args
        missing = self.images - len(self._rows)
        if trainer.is_global_zero and trainer.loggers and missing > 0:
            predicted = outputs.get(pl_module.hparams["predict_with"], outputs["raw"])
            self._rows += islice(self.rows(pl_module, batch, predicted), missing)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the picture."""
        folder = trainer.log_dir  # all ranks take part, since it is that of rank 0
        if not self._rows or folder is None or trainer.sanity_checking:
            return
        titles = Image.new("RGB", (self.width * len(self.titles), LINE), "white")
        for i, title in enumerate(self.titles):
            place = (i + 0.5) * self.width, LINE / 2
            ImageDraw.Draw(titles).text(place, title, "black", ImageFont.load_default(12), anchor="mm")
        picture = np.concatenate([np.asarray(titles), *self._rows, *self.below(pl_module)])
        with training_on(trainer):
            make_folder(Path(folder))
            write_picture(Path(folder) / f"val_{self.name}.png", Image.fromarray(picture))
            add_picture(trainer, f"val/{self.name}", picture)


class SegmentationPictures(ValidationPictures):
    """Writes `val_segmentation.png`: rows of image, labels and prediction, and a legend of the classes.

    Args:
        images: Number of rows of the picture.
    """

    name, titles, width = "segmentation", ("image", "labels", "prediction"), 320

    def rows(self, task: LightningModule, batch: dict[str, Any], predicted: Any) -> Iterator[np.ndarray]:
        """Lays labels and predictions over the images of a batch."""
        colours = palette(task.hparams["num_classes"])
        for image, mask, classes in zip(batch["image"], batch["mask"], predicted, strict=True):
            picture = pixels(image, task.trainer)
            side = (self.width, max(round(self.width * picture.shape[0] / picture.shape[1]), 1))
            shown = np.asarray(Image.fromarray(picture).resize(side))
            whole = [Image.fromarray(found.to(torch.int32).cpu().numpy(), mode="I") for found in (mask, classes)]
            maps = [np.asarray(found.resize(side, Image.Resampling.NEAREST)) for found in whole]
            yield np.concatenate([shown, *(overlay(shown, found, colours) for found in maps)], 1)

    def below(self, task: LightningModule) -> list[np.ndarray]:
        """Returns the legend."""
        colours = palette(task.hparams["num_classes"])
        return [np.asarray(legend(colours, class_names(task), len(self.titles) * self.width))]


def write_mask(target: Path, classes: np.ndarray, colours: np.ndarray, image: str) -> Path:
    """Writes classes (H, W) as PNG or, for a GeoTIFF, as GeoTIFF; returns the path, `target` with an extension."""
    kind = np.uint8 if len(colours) <= 256 else np.uint16
    place, saved = georeference(image), classes.astype(kind)
    path = target.with_name(f"{target.name}.{'png' if place is None else 'tif'}")
    if place is None:
        write_picture(path, Image.fromarray(saved), durable=False)
    else:
        with rewriting(path, durable=False) as part:
            write_tiff(part, saved[None], place, colours.tolist() if kind is np.uint8 else ())
    return path


SHOWN = {"0.50": slice(1), "0.75": slice(5, 6), "0.50:0.95": slice(None)}  # IoU thresholds among 0.50, 0.55, ..., 0.95


def curves_picture(precision: Mapping[str, np.ndarray]) -> np.ndarray:
    """Draws the mean over classes of COCO's precision (10, 101, K), -1 for those without objects, a panel per kind."""
    from matplotlib.figure import Figure  # imported here, since it takes half a second

    figure = Figure(figsize=(5 * len(precision), 4.2), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(precision), squeeze=False)[0]
    for axes, (kind, values) in zip(panels, precision.items(), strict=True):
        found = values[..., (values >= 0).all((0, 1))]
        for name, chosen in SHOWN.items() if found.shape[-1] else ():
            curve = found[chosen].mean((0, 2))
            axes.plot(np.linspace(0, 1, len(curve)), curve, label=f"IoU {name}: AP {curve.mean():.3f}")
            axes.legend(loc="lower left")
        axes.set(xlabel="recall", ylabel="precision", title=f"{kind}, {found.shape[-1]} classes", ylim=(0, 1.02))
        axes.grid(color="#e2e2e2")
    return rendered(figure)


class DetectionPictures(ValidationPictures):
    """Writes `val_detection.png`: rows of image, truth and detections, with names and scores.

    Args:
        images: Number of rows of the picture.
        threshold: Minimum score of the drawn detections.
    """

    name, titles, width = "detection", ("image", "truth", "detections"), 400

    def __init__(self, images: int = 4, threshold: float = 0.3) -> None:
        super().__init__(images)
        self.threshold = threshold

    def rows(self, task: LightningModule, batch: dict[str, Any], predicted: Any) -> Iterator[np.ndarray]:
        """Draws the images of a batch; see `ValidationPictures`."""
        colours, names = palette(task.hparams["num_classes"]), class_names(task)
        for image, pair in zip(batch["image"], predicted, strict=True):
            plain = enlarged(Image.fromarray(pixels(image, task.trainer)), self.width, self.width)
            shown = [plain, plain.copy(), plain.copy()]
            for picture, objects in zip(shown[1:], pair, strict=True):
                draw(picture, objects, colours, names, self.threshold)
            yield np.concatenate([np.asarray(picture) for picture in shown], 1)


def enlarged(picture: Image.Image, least: int, most: int) -> Image.Image:
    """Resizes a picture to a width between two bounds, keeping its aspect."""
    width = min(max(picture.width, least), most)
    return picture.resize((width, max(round(picture.height * width / picture.width), 1)))


MASK_OPACITY = 0.45
FONT = 12  # pixels


def draw(picture: Image.Image, objects: Any, colours: np.ndarray, names: Sequence[str], threshold: float = 0.0) -> None:
    """Draws objects (`size`, `boxes`, `labels`, `rles`, `scores`) over a picture of any size, the best last."""
    scale = np.tile([picture.width / objects.size[1], picture.height / objects.size[0]], 2)
    scores = np.ones(len(objects.labels)) if objects.scores is None else objects.scores
    rles = objects.rles or [None] * len(scores)
    shown = [i for i in np.argsort(scores, kind="stable").tolist() if scores[i] >= threshold]
    for i in shown:
        if rles[i] is not None:
            mask = Image.fromarray(round(255 * MASK_OPACITY) * coco_masks.decode([rles[i]])[0])
            colour = Image.new("RGB", picture.size, tuple(colours[objects.labels[i]].tolist()))
            picture.paste(colour, mask=mask.resize(picture.size, Image.Resampling.NEAREST))
    pen = ImageDraw.Draw(picture)
    for i in shown:
        label = int(objects.labels[i])
        crowd = " (crowd)" if objects.iscrowd is not None and objects.iscrowd[i] else ""
        score = "" if objects.scores is None else f" {objects.scores[i]:.2f}"
        box, ink = (objects.boxes[i] * scale).tolist(), tuple(colours[label].tolist())
        _frame(pen, picture.width, box, ink, names[label] + crowd + score)


def _frame(pen: ImageDraw.ImageDraw, width: int, box: Sequence[float], colour: tuple[int, ...], text: str) -> None:
    """Draws a box, and its text at its upper edge, inside of it at the upper edge of the picture of that width."""
    left, top, right, bottom = box
    pen.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour, width=2)
    font = ImageFont.load_default(FONT)
    length = font.getlength(text) + 4
    place = (max(min(left, width - length), 0), top - FONT - 2 if top > FONT + 2 else top)
    pen.rectangle((*place, place[0] + length, place[1] + FONT + 2), colour)
    ink = "black" if np.dot(colour, (0.299, 0.587, 0.114)) > 140 else "white"
    pen.text((place[0] + 2, place[1] + FONT / 2 + 1), text, ink, font, anchor="lm")
