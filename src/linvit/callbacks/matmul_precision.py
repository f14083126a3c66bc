"""The precision of float32 products within a run."""

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn


class MatmulPrecision(Callback):
    """Sets torch's precision to the model's `float32_matmul_precision` for the length of a run."""

    def __init__(self) -> None:
        self.before: str | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the precision; warns if the model is compiled, since attention has no precision of its own then."""
        wanted = pl_module.hparams["float32_matmul_precision"]
        if wanted == (before := torch.get_float32_matmul_precision()):
            return
        self.before = before
        torch.set_float32_matmul_precision(wanted)
        if pl_module.hparams["compile"] and wanted != "highest":
            rank_zero_warn(
                f"--model.compile=true with --model.float32_matmul_precision={wanted}: compiled, the sums and inverses "
                f"of attention have this precision, too; not compiled they stay in IEEE float32"
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restores the precision."""
        if self.before is not None:
            torch.set_float32_matmul_precision(self.before)
            self.before = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restores the precision after a run that failed."""
        self.teardown(trainer, pl_module, "")
