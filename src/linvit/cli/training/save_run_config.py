"""config.yaml in the folder of a run."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback


class SaveRunConfig(SaveConfigCallback):
    """Saves the full configuration of a training run beside its checkpoints; a resumed run adds a file of its own."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves before training starts; a kill leaves the whole file or none."""
        if stage == "fit" and not self.already_saved:
            path = Path(str(trainer.log_dir), self.config_filename)
            self.config_filename, self.overwrite = f"{path.name}.part", True
            super().setup(trainer, pl_module, stage)
            if trainer.is_global_zero:
                path.with_name(self.config_filename).replace(path)
