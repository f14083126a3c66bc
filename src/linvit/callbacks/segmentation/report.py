"""The scores of each class as a table, and the confusion matrix of pixels as a picture."""

from pathlib import Path
from typing import Any, cast

from lightning.pytorch import LightningModule, Trainer
from PIL import Image

from linvit.callbacks.class_names import class_names
from linvit.callbacks.report import Report, write_classes, write_picture
from linvit.callbacks.tensorboard import add_picture


class SegmentationReport(Report):
    """Writes `val_classes.csv` (class, pixels, IoU, Acc, F1) and `val_confusion.png`; after a test, `test_...`.

    Training reports each validation, and writes the picture to TensorBoard, too. Both are of the weights that
    `predict_with` names. The task offers `class_table(stage)`: the confusion matrix, and scores of each class.

    Args:
        folder: Where to write; null is the folder of the logger, and nothing is written without one.
    """

    def collect(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> Any:
        """The matrix and the scores, which all ranks have."""
        return cast("Any", pl_module).class_table(stage)

    def write(self, found: Any, trainer: Trainer, pl_module: LightningModule, folder: Path, stage: str) -> str:
        """Writes the table and the picture."""
        from linvit.callbacks.confusion_picture import matrix_picture  # here, since matplotlib takes half a second

        matrix, scores = found[0].cpu().numpy(), {name: values.cpu().numpy() for name, values in found[1].items()}
        table = folder / f"{stage}_classes.csv"
        write_classes(table, pl_module, "pixels", matrix.sum(1), scores)
        picture = matrix_picture(matrix, class_names(pl_module))
        write_picture(folder / f"{stage}_confusion.png", Image.fromarray(picture))
        add_picture(trainer, f"{stage}/confusion", picture)
        return f"scores of each class: {table}"
