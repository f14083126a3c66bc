"""Base class of the tasks' reports: times and places of writing, and pictures; the report of classification."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from PIL import Image
from torchmetrics.classification import MulticlassConfusionMatrix

from linvit.callbacks.common import add_picture, class_names, gather
from linvit.io.files import make_folder, rewriting
from linvit.io.plain_text import write_csv

MOST = 50  # classes in a picture
WITH_TEXT = 20  # classes up to which the fractions are written


class Findings(NamedTuple):
    """For K classes: numbers of a unit (K,), scores (K,) by name, a picture, its name, and maybe a table of images."""

    unit: str
    counts: np.ndarray
    scores: Mapping[str, np.ndarray]
    name: str
    picture: Callable[[], np.ndarray]
    images: Sequence[Sequence[Any]] = ()


class Report(Callback):
    """Writes a table of the classes and a picture of each validation and each `linvit test`; the last ones are kept.

    They are `val_classes.csv` and `val_NAME.png`, after a test `test_...`, for the weights that `predict_with` selects,
    from the task's `class_findings(stage)`. Training also writes the picture to TensorBoard.

    Args:
        folder: Output folder; null is the folder of the logger, and nothing is written without one.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        self.folder = folder
        self._table: Path | None = None

    def findings(self, pl_module: LightningModule, stage: str) -> Findings | None:
        """Returns the report on the dataset just evaluated. All ranks call it, before metrics are reset."""
        return cast("Any", pl_module).class_findings(stage)  # type: ignore[no-any-return]

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the report before a checkpoint of this moment is written."""
        if not trainer.sanity_checking:
            self._report(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports."""
        self._report(trainer, pl_module, "test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prints the path of the last report."""
        if self._table is not None:
            rank_zero_info(f"scores of each class: {self._table}")

    def _report(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        found = self.findings(pl_module, stage)
        folder = self.folder or (trainer.log_dir if trainer.loggers else None)  # all ranks take part
        if found is None or folder is None or trainer.fast_dev_run or not trainer.is_global_zero:  # type: ignore[attr-defined]
            return
        unit, counts, scores, name, draw, images = found
        rows = [["class", unit, *scores]]
        for own, count, *values in zip(class_names(pl_module), counts.tolist(), *scores.values(), strict=True):
            rows.append([own, str(count), *("" if np.isnan(value) else f"{value:.6f}" for value in values)])
        picture = draw()
        with training_on(trainer):
            make_folder(Path(folder))
            write_table(Path(folder) / f"{stage}_classes.csv", rows)
            if images:
                write_table(Path(folder) / f"{stage}_images.csv", images)
            write_picture(Path(folder) / f"{stage}_{name}.png", Image.fromarray(picture))
            self._table = Path(folder) / f"{stage}_classes.csv"
            add_picture(trainer, f"{stage}/{name}", picture)


@contextmanager
def training_on(trainer: Trainer) -> Iterator[None]:
    """Turns the error of a report that cannot be written into a warning during training."""
    try:
        yield
    except OSError as error:
        if trainer.state.fn != "fit":
            raise
        rank_zero_warn(f"a report of step {trainer.global_step} could not be written: {error}")


def write_table(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    """Writes rows as CSV, the names of the columns first."""
    with rewriting(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        write_csv(file, rows)


def write_picture(path: Path, picture: Image.Image, durable: bool = True, **options: Any) -> None:
    """Writes a picture in the format of the path's suffix, with PIL's options; see `rewriting`."""
    content = io.BytesIO()  # PIL does not notice that a full disk has truncated a JPEG file
    picture.save(content, Image.registered_extensions()[path.suffix.lower()], **options)
    with rewriting(path, durable) as part:
        part.write_bytes(content.getvalue())


def rendered(figure: Any) -> np.ndarray:
    """Returns a figure of matplotlib as a picture (H, W, 3), uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # imported here, since it takes half a second

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()  # type: ignore[no-untyped-call]


def confusion_picture(
    labels: np.ndarray, predicted: np.ndarray, names: Sequence[str], counts: np.ndarray | int = 1, most: int = MOST
) -> np.ndarray:
    """Draws a confusion matrix of all classes or the `most` confused, (H, W, 3), uint8; pairs come `counts` times."""
    from matplotlib.figure import Figure

    classes, weights = len(names), np.broadcast_to(counts, labels.shape)
    wrong = weights * (labels != predicted)
    errors = np.bincount(labels, wrong, classes) + np.bincount(predicted, wrong, classes)
    shown = np.sort(np.argsort(-errors, kind="stable")[:most])
    place = np.full(classes, -1)
    place[shown] = np.arange(len(shown))
    inside = (place[labels] >= 0) & (place[predicted] >= 0)
    matrix = np.zeros((len(shown), len(shown)))
    np.add.at(matrix, (place[labels[inside]], place[predicted[inside]]), weights[inside])
    matrix /= np.maximum(np.bincount(labels, weights, classes)[shown], 1)[:, None]
    few = len(shown) <= WITH_TEXT
    side = 3 + len(shown) * (0.6 if few else 0.2)  # inches
    figure = Figure(figsize=(side, side), dpi=100, layout="constrained")
    axes = figure.subplots()
    plotted = MulticlassConfusionMatrix(max(len(shown), 2))
    plotted.plot(
        torch.from_numpy(matrix), axes, add_text=few, labels=[names[c][:18] for c in shown.tolist()], cmap="Blues"
    )
    axes.tick_params("x", rotation=90)
    if len(shown) < classes:
        axes.set_title(f"the {len(shown)} most confused of {classes} classes")
    return rendered(figure)


class ClassReport(Report):
    """Writes `val_classes.csv` (class, images, top-1) and `val_confusion.png`; after a test, `test_...`.

    `val_images.csv` has each image's number, its label, and the class predicted by each kind of weights. The picture
    is for the weights that `predict_with` selects.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        super().__init__(folder)
        self._seen: list[torch.Tensor] = []
        self._weights: tuple[str, ...] = ()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discards the predictions of the last epoch."""
        self._seen.clear()

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Keeps numbers, labels and predictions of a batch, on their device."""
        outputs, batch, *_ = args
        self._weights = tuple(outputs)
        self._seen.append(torch.stack([batch["index"].to(batch["label"]), batch["label"], *outputs.values()]))

    on_test_epoch_start = on_validation_epoch_start
    on_test_batch_end = on_validation_batch_end  # type: ignore[assignment]

    def findings(self, pl_module: LightningModule, stage: str) -> Findings | None:
        """Returns images and accuracy of each class, of the images of all devices, on rank 0."""
        own = torch.cat(self._seen, 1).cpu().numpy() if self._seen else None
        parts = [part for part in gather(own) or [] if part is not None]
        if not parts:
            return None
        found = np.concatenate(parts, 1)  # numbers, labels and predictions: (2 + kinds of weights, N)
        found = found[:, found[0].argsort(kind="stable")]
        seen = dict(zip(("image", "label", *self._weights), found, strict=True))
        label, names = seen["label"], class_names(pl_module)
        images = np.bincount(label, minlength=len(names))
        columns, scores = {"raw": "top1", "ema": "ema_top1"}, {}
        for kind in self._weights:
            right = np.bincount(label[label == seen[kind]], minlength=len(names))
            scores[columns[kind]] = np.divide(right, images, out=np.full(len(names), np.nan), where=images > 0)
        shown = seen.get(pl_module.hparams["predict_with"], seen["raw"])
        picture = partial(confusion_picture, label, shown, names)
        return Findings("images", images, scores, "confusion", picture, [[*seen], *found.T.tolist()])
