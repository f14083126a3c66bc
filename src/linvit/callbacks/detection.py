"""What a run of detection shows: scores of the classes, curves, pictures, and detections as files."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from lightning.pytorch import LightningModule, Trainer
from PIL import Image, ImageDraw, ImageFont

from linvit import coco_masks
from linvit.callbacks.common import class_names, pixels
from linvit.callbacks.dense import ValidationPictures, palette
from linvit.callbacks.report import Findings, Report, rendered


class DetectionReport(Report):
    """Writes `val_classes.csv` (class, objects, box_AP, ...) and `val_precision_recall.png`; after a test, `test_...`.

    Both are of the weights that `predict_with` names. The task offers `results(stage)`, whose `evaluations` are COCO's
    of boxes and masks and whose `objects` are the true ones of each class, on rank 0.
    """

    name = "precision_recall"

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> Any:
        """COCO's evaluations, and how many objects each class has."""
        results = cast("Any", pl_module).results(stage)
        return dict(results.evaluations), results.objects

    def findings(self, found: Any, pl_module: LightningModule) -> Findings:
        """Objects and average precision of each class."""
        evaluations, objects = found
        scores = {
            f"{kind}_{name}": values
            for kind, each in evaluations.items()
            for name, values in each.class_scores().items()
        }
        picture = curves_picture({kind: each.precision for kind, each in evaluations.items()})
        return Findings("objects", objects, scores, picture)


SHOWN = {"0.50": slice(1), "0.75": slice(5, 6), "0.50:0.95": slice(None)}  # IoU thresholds among 0.50, 0.55, ..., 0.95


def curves_picture(precision: Mapping[str, np.ndarray]) -> np.ndarray:
    """Draws the mean over classes of the precision, as COCO interpolates it, a panel per kind: (H, W, 3), uint8.

    By "box" or "mask" there is (10, 101, K) of IoU threshold, recall and class; -1 for a class without an object.
    """
    from matplotlib.figure import Figure  # here, since it takes half a second

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
        images: Rows of the picture.
        threshold: Detections of lower scores are left out.
    """

    name, titles, width = "detection", ("image", "truth", "detections"), 400

    def __init__(self, images: int = 4, threshold: float = 0.3) -> None:
        super().__init__(images)
        self.threshold = threshold

    def rows(
        self, trainer: Trainer, pl_module: LightningModule, batch: dict[str, Any], predicted: Any
    ) -> Iterator[np.ndarray]:
        """Draws the images of a batch; see `ValidationPictures`."""
        colours, names = palette(pl_module.hparams["num_classes"]), class_names(pl_module)
        for image, pair in zip(batch["image"], predicted, strict=True):
            plain = enlarged(Image.fromarray(pixels(image, trainer)), self.width, self.width)
            shown = [plain, plain.copy(), plain.copy()]
            for picture, objects in zip(shown[1:], pair, strict=True):
                draw(picture, objects, colours, names, self.threshold)
            yield np.concatenate([np.asarray(picture) for picture in shown], 1)


def enlarged(picture: Image.Image, least: int, most: int) -> Image.Image:
    """A picture whose width lies between two bounds, with its aspect."""
    width = min(max(picture.width, least), most)
    return picture.resize((width, max(round(picture.height * width / picture.width), 1)))


OPACITY = 0.45  # of masks
FONT = 12  # pixels


def draw(picture: Image.Image, objects: Any, colours: np.ndarray, names: Sequence[str], threshold: float = 0.0) -> None:
    """Draws objects over a picture of any size, the surest last; those of lower scores than the threshold are left out.

    The objects have `size` (H, W) of the image, `boxes` in its pixels, `labels`, `rles`, and detected ones `scores`.
    """
    scale = np.tile([picture.width / objects.size[1], picture.height / objects.size[0]], 2)
    scores = np.ones(len(objects.labels)) if objects.scores is None else objects.scores
    rles = objects.rles or [None] * len(scores)
    shown = [i for i in np.argsort(scores, kind="stable").tolist() if scores[i] >= threshold]
    for i in shown:
        if rles[i] is not None:
            mask = Image.fromarray(round(255 * OPACITY) * coco_masks.decode([rles[i]])[0])
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
