"""What every image data module shares: image size, normalisation, loaders."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linvit.data.transforms import denormalise
from linvit.errors import UserError
from linvit.image_size import image_size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageData(LightningDataModule):
    """Base of the data modules. A subclass supplies `setup` and the facts `num_classes` and `class_names`.

    Args:
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process.
        img_size: Side, or (H, W), of the images given to the model.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.

    Attributes:
        train_set: Training samples, after `setup`.
        val_set: Validation samples.
        test_set: Test samples.
        predict_set: Samples to predict.
    """

    train_set: Dataset[Any]
    val_set: Dataset[Any]
    test_set: Dataset[Any]
    predict_set: Dataset[Any]

    def __init__(
        self,
        batch_size: int,
        num_workers: int,
        img_size: int | Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1; got {batch_size}")
        if num_workers < 0:
            raise UserError(f"num_workers must be 0 (load in the training process) or more; got {num_workers}")
        if len(mean) != 3 or len(std) != 3 or not all(deviation > 0 for deviation in std):
            raise UserError(f"mean and std need 3 values, one per channel, std above 0; got {list(mean)}, {list(std)}")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.img_size: int | Sequence[int] = img_size
        self.size = image_size(img_size)
        self.mean = tuple(mean)
        self.std = tuple(std)

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if the data has no labels."""
        raise NotImplementedError

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, if the data has them."""
        raise NotImplementedError

    def preview(self, count: int) -> dict[str, Tensor]:
        """Training and validation images (count, 3, H, W) in [0, 1] as the model sees them, spread over the sets."""
        shown = {}
        for name, samples in (("train", self.train_set), ("val", self.val_set)):
            total = len(samples)  # type: ignore[arg-type]
            shares = min(count, total)
            picked = [samples[i * total // shares]["image"] for i in range(shares)]
            shown[name] = denormalise(torch.stack(picked), self.mean, self.std)
        return shown

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches; the last incomplete one is dropped unless it is the only one."""
        samples = len(self.train_set)  # type: ignore[arg-type]
        return self._loader(self.train_set, shuffle=True, drop_last=samples >= self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        """All validation samples, in order."""
        return self._loader(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """All test samples, in order."""
        return self._loader(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """All samples to predict, in order."""
        return self._loader(self.predict_set)

    def _loader(self, samples: Dataset[Any], shuffle: bool = False, drop_last: bool = False) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
