"""What reports and pictures call the classes of a task."""

from lightning.pytorch import LightningModule


def class_names(pl_module: LightningModule) -> list[str]:
    """Names of the classes of a task, or their numbers."""
    return list(pl_module.hparams["class_names"] or map(str, range(pl_module.hparams["num_classes"])))
