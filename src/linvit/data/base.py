"""What every image data module shares: image size, loaders, and the work on whole batches."""

import os
from collections.abc import Sequence
from itertools import islice
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from linvit.data.loading.sampler import EvalSampler, TrainSampler, check_equal_batches
from linvit.data.loading.seeds import SeededIndex, sample_seed
from linvit.data.loading.shared_memory import check_shared_memory, explain
from linvit.data.sources.images import collate
from linvit.data.sources.stream import Stream, stream_loader
from linvit.data.transforms.classification import denormalise
from linvit.data.transforms.on_device import finish
from linvit.errors import UserError
from linvit.image_size import image_size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageData(LightningDataModule):
    """Base of the data modules. A subclass supplies `setup` and the facts `num_classes` and `class_names`.

    Loader processes hand over 8-bit images; float arithmetic is done per batch on the device. The order of training
    samples follows from (seed, epoch, rank layout), a sample's augmentation from (seed, epoch, row, repeat).

    Args:
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process.
        img_size: Side, or (H, W), of the images given to the model.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.
        seed: Of the order of samples and of all augmentation; null is the run's (`seed_everything`).
        repeated_aug: How often each image of an epoch is used, augmented differently each time.

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
        seed: int | None = None,
        repeated_aug: int = 1,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1; got {batch_size}")
        if num_workers < 0:
            raise UserError(f"num_workers must be 0 (load in the training process) or more; got {num_workers}")
        if len(mean) != 3 or len(std) != 3 or not all(deviation > 0 for deviation in std):
            raise UserError(f"mean and std need 3 values, one per channel, std above 0; got {list(mean)}, {list(std)}")
        if repeated_aug < 1:
            raise UserError(f"repeated_aug must be 1 (each image once) or more; got {repeated_aug}")
        if seed is not None and seed < 0:
            raise UserError(f"seed must be 0 or more, or null for the run's; got {seed}")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.img_size: int | Sequence[int] = img_size
        self.size = image_size(img_size)
        self.mean = tuple(mean)
        self.std = tuple(std)
        self.seed = seed
        self.repeated_aug = repeated_aug
        self._statistics = torch.tensor([self.mean, self.std]).view(2, 3, 1, 1)

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if the data has no labels."""
        raise NotImplementedError

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, if the data has them."""
        raise NotImplementedError

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Finishes the images of a batch where they now are: augmentation on the device, normalising, erasing."""
        if not isinstance(batch, dict):  # Lightning's model summary sends bare images through here
            return batch
        image, plans = batch["image"], batch.pop("device_ops", None)
        if self._statistics.device != image.device:
            self._statistics = self._statistics.to(image.device)
        batch["image"] = finish(image, plans.samples if plans else (), *self._statistics)
        trainer = self.trainer
        return batch if trainer is None else trainer.precision_plugin.convert_input(batch)  # half precision wants half

    def preview(self, count: int) -> dict[str, Tensor]:
        """Training and validation images (count, 3, H, W) in [0, 1] as the model sees them, spread over the sets."""
        shown = {}
        for name, samples in (("train", self.train_set), ("val", self.val_set)):
            if isinstance(samples, Stream):
                batch = collate(list(islice(samples, count)))
            else:
                total = len(samples)  # type: ignore[arg-type]
                shares = min(count, total)
                rows = [i * total // shares for i in range(shares)]
                batch = collate([samples[SeededIndex(row, sample_seed(self._seed, row))] for row in rows])
            plans = batch.get("device_ops")
            images = finish(batch["image"], plans.samples if plans else (), *self._statistics.cpu())
            shown[name] = denormalise(images, self.mean, self.std)
        return shown

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches; the last incomplete one is dropped unless it is the only one."""
        devices = 1 if self.trainer is None else self.trainer.num_devices
        check_shared_memory(self.batch_size, self._image_bytes, self.num_workers, devices)
        if isinstance(self.train_set, Stream):
            return stream_loader(self.train_set, self.num_workers)
        length = len(self.train_set)  # type: ignore[arg-type]
        return self._loader(
            self.train_set, TrainSampler(length, self._seed, *self._place, self.repeated_aug, self.batch_size)
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """All validation samples, in order."""
        return self._in_order(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """All test samples, in order."""
        return self._in_order(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """All samples to predict, in order."""
        return self._in_order(self.predict_set)

    def on_exception(self, exception: BaseException) -> None:
        """Adds to the error of a killed loader process what there is of shared memory."""
        explain(exception, self.batch_size, self._image_bytes, self.num_workers)

    @property
    def _image_bytes(self) -> int:
        """Bytes of an image as a loader process hands it over: 8-bit RGB."""
        return 3 * self.size[0] * self.size[1]

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    @property
    def _place(self) -> tuple[int, int]:
        """This process among all: rank and world size."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _in_order(self, samples: Dataset[Any]) -> DataLoader[Any]:
        if self.trainer is not None and isinstance(self.trainer.strategy, FSDPStrategy):
            counts = samples.shards.counts if isinstance(samples, Stream) else [len(samples)]  # type: ignore[arg-type]
            check_equal_batches(None if counts is None else sum(counts), self.trainer.world_size, self.batch_size)
        if isinstance(samples, Stream):
            return stream_loader(samples, self.num_workers)
        return self._loader(samples, EvalSampler(len(samples), *self._place))  # type: ignore[arg-type]

    def _loader(self, samples: Dataset[Any], sampler: TrainSampler | EvalSampler) -> DataLoader[Any]:
        return DataLoader(
            samples,
            batch_size=self.batch_size,
            sampler=sampler,
            num_workers=self.num_workers,
            collate_fn=collate,
            generator=torch.Generator(),  # torch's own would be drawn from, once per epoch with loader processes
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
