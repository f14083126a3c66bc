"""Training and validation images after their transforms, in TensorBoard."""

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torchvision.utils import make_grid

from linvit.callbacks.common import rgb, writers


class ImageGrid(Callback):
    """Writes one grid of transformed images per split at the start of a run, and leaves the random state unchanged.

    The images are those of the data module's `preview`; without such a method, nothing is written.

    Args:
        images: Images per grid.
    """

    def __init__(self, images: int = 32) -> None:
        self.images = images

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draws the first images of the training and the validation set, spread evenly."""
        preview = getattr(getattr(trainer, "datamodule", None), "preview", None)
        if not trainer.is_global_zero or not writers(trainer) or preview is None:
            return
        with isolate_rng():
            shown = preview(self.images)
        for name, images in shown.items():
            for writer in writers(trainer):
                writer.add_image(f"transforms/{name}", make_grid(rgb(images)), trainer.global_step)
