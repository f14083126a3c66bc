"""config.yaml in the folder of a run."""

from pathlib import Path

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from linvit import yaml_text
from linvit.errors import UserError
from linvit.runs.folder import run_config


class SaveRunConfig(SaveConfigCallback):
    """Saves the full configuration of a training run beside its checkpoints.

    A resumed run adds a file of its own if anything in it differs from the last one, other than the checkpoint.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Saves before training starts; a kill leaves the whole file or none."""
        if stage == "fit" and not self.already_saved:
            path = Path(str(trainer.log_dir), self.config_filename)
            self.config_filename, self.overwrite = f"{path.name}.part", True
            super().setup(trainer, pl_module, stage)
            if trainer.is_global_zero:
                part = path.with_name(self.config_filename)
                if _options(part) == _options(run_config(path.parent)):
                    part.unlink()
                else:
                    part.replace(path)


def _options(config: Path) -> object:
    """What a configuration holds, but the checkpoint; the path itself if it cannot be read."""
    try:
        return {**yaml_text.load(yaml_text.read(config), str(config)), "ckpt_path": None}
    except (OSError, UserError, TypeError):
        return config
