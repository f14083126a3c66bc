"""What every image data module shares: its source, splits, samples and loaders, and the work on whole batches."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Self

import datasets
import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import EvalSampler, TrainSampler, check_equal_batches
from linvit.data.loading.seeds import SeededIndex, sample_seed
from linvit.data.loading.shared_memory import check_shared_memory, explain
from linvit.data.sources.bad_images import BadImages, Policy
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import Images, Sample, Target, Transform, collate
from linvit.data.sources.read import MAX_PIXELS, check_max_pixels
from linvit.data.sources.splits import HUB
from linvit.data.sources.stream import Stream
from linvit.data.sources.stream_checks import check_stream_options
from linvit.data.transforms.bands import Bands
from linvit.data.transforms.on_device import denormalise, normalise
from linvit.errors import UserError
from linvit.image_size import image_size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageData(LightningDataModule):
    """Base of the data modules.

    A subclass supplies `num_classes` and `class_names`, `targets`, and the two transforms, which bring all samples to
    8-bit images of `size`, or with a `value_range` to float32 images from 0 to 255. What else is arithmetic on floats
    is done per batch on the device. The order of training samples follows from (seed, epoch, rank layout), a sample's
    augmentation from (seed, epoch, row, copy).

    Args:
        source: An embedded set ("digits": 1,797 real handwritten digits); a path to an image folder
            (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`), to parquet or arrow data, or to a set saved with `save_to_disk`;
            or `hub:owner/name`.
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process.
        img_size: Side, or [H, W], of the images given to the model.
        val_fraction: Fraction of the training images held out when the data has no validation split.
        repeated_aug: How often each image of an epoch is used, augmented differently each time. Epochs keep their
            length, so each has 1 / repeated_aug of the images (DeiT: 3).
        bands: Numbers of the bands of an image that become its channels, in this order; the first is 1. null is for
            images of one or three bands, as RGB. A model has as many input channels, and pretrained weights of three
            are repeated and scaled for it.
        value_range: The values that become 0 and 1, [low, high] or a pair for each band; what lies beyond is clipped.
            null is for values of 8 bits. `linvit data check` prints the percentiles.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.
        image_column: Column of the images; null finds it.
        exif_orientation: Turn photos as the camera's EXIF entry says; the papers' programs did not.
        streaming: Read parquet, arrow or tar files or a hub set from one end to the other instead of at random.
        streaming_rows: Training rows of a stream whose files do not contain their number; parquet and arrow files do.
        shuffle_buffer: Undecoded images that each loader process of a stream holds, to choose from at random.
        bad_images: skip puts another image in the place of a training image that cannot be decoded, raise ends the run.
            Evaluation always raises.
        max_bad_fraction: Largest fraction of the training images that is skipped (5 are always allowed).
        max_pixels: Images with more are refused before they are decoded; WebP and JPEG 2000 from half as many on.
        seed: Of the order of images and of all augmentation; null is `seed_everything`.
        predict_path: Images to predict in place of the source's; anything that it can be.

    Attributes:
        size: (H, W) of the images given to the model.
        train_transform: A training sample and its seed to the sample that is used.
        eval_transform: Likewise of validation, test and prediction.
        train_set: Training samples, after `setup`.
        val_set: Validation samples.
        test_set: Test samples.
        predict_set: Samples to predict.
    """

    train_transform: Transform
    eval_transform: Transform
    train_set: Images | Stream
    val_set: Images | Stream
    test_set: Images | Stream
    predict_set: Images | Stream
    ragged: ClassVar[Collection[str]] = ()
    """Entries of a sample that differ in shape between samples, which batches hold as lists."""
    mixed: ClassVar[Collection[str]] = ()
    """Entries that may differ in shape, which a batch holds as a list if they do, and else as one tensor."""
    held: ClassVar[Collection[str]] = ()
    """Entries that Lightning neither moves to the device nor converts to half precision; see `Held`."""
    how_to_label: ClassVar[str] = "give the images labels"
    """What to do about data without labels, for an error message."""
    how_to_count: ClassVar[str | None] = None
    """What to do where the number of classes is unknown, for an error message; None is `how_to_label`."""
    advanced_options: ClassVar[frozenset[str]] = frozenset(
        {"bands", "value_range", "mean", "std", "image_column", "val_fraction", "repeated_aug", "seed"}
        | {"max_bad_fraction", "max_pixels", "streaming_rows", "shuffle_buffer"}
    )
    """Options that recipes set and users rarely do: only `--help=all` shows them."""

    def __init__(
        self,
        source: str = "digits",
        batch_size: int = 64,
        num_workers: int = 2,
        img_size: int | Sequence[int] = 224,
        val_fraction: float = 0.1,
        repeated_aug: int = 1,
        bands: list[int] | None = None,
        value_range: tuple[float, float] | list[tuple[float, float]] | None = None,
        mean: Sequence[float] = IMAGENET_MEAN,
        std: Sequence[float] = IMAGENET_STD,
        image_column: str | None = None,
        exif_orientation: bool = True,
        streaming: bool = False,
        streaming_rows: int | None = None,
        shuffle_buffer: int = 1000,
        bad_images: Policy = "skip",
        max_bad_fraction: float = 0.001,
        max_pixels: int = MAX_PIXELS,
        seed: int | None = None,
        predict_path: str | None = None,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise UserError(f"batch_size must be at least 1; got {batch_size}")
        if num_workers < 0:
            raise UserError(f"num_workers must be 0 (load in the training process) or more; got {num_workers}")
        self.bands = Bands.parse(bands, value_range)
        channels = self.bands.channels
        if len(mean) != channels or len(std) != channels or not all(deviation > 0 for deviation in std):
            way = "" if channels == 3 else "; linvit data check with the same --bands and --value_range prints them"
            raise UserError(
                f"mean and std need {channels} values, one per channel, std above 0; got {list(mean)}, {list(std)}{way}"
            )
        if repeated_aug < 1:
            raise UserError(f"repeated_aug must be 1 (each image once) or more; got {repeated_aug}")
        if seed is not None and seed < 0:
            raise UserError(f"seed must be 0 or more, or null for the run's; got {seed}")
        if not 0 < val_fraction < 1:
            raise UserError(f"val_fraction must lie between 0 and 1; got {val_fraction}")
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.img_size: int | Sequence[int] = img_size
        self.size = image_size(img_size)
        self.val_fraction = val_fraction
        self.repeated_aug = repeated_aug
        self.mean, self.std = tuple(mean), tuple(std)
        self.exif_orientation = exif_orientation
        self.max_pixels = check_max_pixels(max_pixels)
        self.seed = seed
        self.stream_options = check_stream_options(streaming, streaming_rows, shuffle_buffer, repeated_aug)
        self.bad_images = BadImages(bad_images, max_bad_fraction, num_workers)
        self.data_source = DataSource(source, image_column, val_fraction, streaming, self.prepare)
        self.predict_source = None if predict_path is None else DataSource(predict_path, image_column, 0, False, dict)
        self._statistics = torch.tensor([self.mean, self.std]).view(2, -1, 1, 1)

    @property
    def num_classes(self) -> int | None:
        """Number of classes, or None if the data has no labels."""
        raise NotImplementedError

    @property
    def in_chans(self) -> int:
        """Channels C of the images."""
        return self.bands.channels

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes, if the data has them."""
        raise NotImplementedError

    def targets(self, split: str) -> Mapping[str, Target]:
        """What the samples of a split have besides their images.

        Raises:
            UserError: If the split lacks it, so that it can only be predicted.
        """
        raise NotImplementedError

    def predicted_targets(self) -> Mapping[str, Target]:
        """What samples that are predicted have besides their images."""
        return {}

    def prepare(self, splits: Splits) -> Splits:
        """The splits with targets in the form that training needs, such as classes as numbers."""
        return splits

    def check_training(self) -> None:
        """Checks training and validation split against each other, after both were made."""

    def trained_rows(self, rows: datasets.Dataset, chosen: np.ndarray | None) -> np.ndarray | None:
        """Numbers of the training rows that are used, of those that are `chosen`; None means all."""
        return chosen

    def train_sampler(self, samples: Images) -> TrainSampler:
        """The order of the training samples."""
        return TrainSampler(len(samples), *self.order_options)

    @property
    def order_options(self) -> tuple[int, int, int, int, int]:
        """What a sampler needs besides the samples: seed, rank, world size, copies, batch size."""
        return (self._seed, *self._place, self.repeated_aug, self.batch_size)

    @property
    def collate(self) -> Callable[[Sequence[Sample]], dict[str, Any]]:
        """What makes a batch of samples, in a loader process."""
        return partial(collate, ragged=self.ragged, mixed=self.mixed, held=self.held)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> Self:
        """Raises a `UserError`: Lightning would unpickle the file freely, and there is nothing of the data in it."""
        raise UserError(f"'{checkpoint_path}' holds nothing of the data; build {cls.__name__} with its arguments")

    @property
    def splits(self) -> Splits:
        """The rows of each split that the data has, images and targets in the form that training needs."""
        return self.data_source.splits

    @property
    def image_column(self) -> str:
        """Name of the column of images."""
        return self.data_source.image_column

    @property
    def predicted(self) -> str:
        """The name of what is predicted: `predict_path`, or else the source."""
        return (self.predict_source or self.data_source).name

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs: fit, validate, test or predict."""
        if stage == "fit":
            folder = None if self.trainer is None else self.trainer.log_dir
            self.bad_images.report = Path(folder) / "bad_images.csv" if folder else None
            self.train_set = self._samples("train", training=True)
            rank_zero_info(f"data source '{self.source}' has {self.num_classes} classes")
        if stage in ("fit", "validate"):
            self.val_set = self._samples("val")
        if stage == "fit":
            self.check_training()
        if stage == "test":
            self.test_set = self._samples(self.data_source.evaluated({*self.splits, "val"}))
        if stage == "predict":
            source = self.predict_source or self.data_source
            self.predict_set = self._samples(source.evaluated({*source.splits}), predict=True)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Finishes a batch on the device that it was moved to; see `finish`."""
        if not isinstance(batch, dict):  # Lightning's model summary sends bare images through here
            return batch
        self.finish(batch)
        trainer = self.trainer
        return batch if trainer is None else trainer.precision_plugin.convert_input(batch)  # half precision wants half

    def finish(self, batch: dict[str, Any]) -> None:
        """Does what is left to do with the images of a batch, in place: augmentation, normalising, random erasing.

        A recipe may erase after mixup and CutMix. These are the task's, since they change the targets too: it finds
        `after_mixing` in the batch, and calls it with the images (B, C, H, W) that it has mixed, which returns them.
        """
        image, ops = batch["image"], batch.pop("device_ops", None)
        device = image[0].device
        if self._statistics.device != device:
            self._statistics = self._statistics.to(device)
        if isinstance(image, list):  # of evaluation, of several sizes
            batch["image"] = [normalise(one, *self._statistics) for one in image]
            return
        image = normalise(image if ops is None else ops.apply(image), *self._statistics)
        image = image if ops is None else ops.clear_padding(image)
        if ops is not None and ops.erase_after_mixing:
            batch["after_mixing"] = ops.erase
        elif ops is not None:
            image = ops.erase(image)
        batch["image"] = image

    def preview(self, count: int) -> dict[str, Tensor]:
        """Training and validation images (count, C, H, W) in [0, 1], as the model sees them; none of an empty split."""
        shown = {}
        for name, samples in (("train", self.train_set), ("val", self.val_set)):
            if isinstance(samples, Stream):
                chosen = list(islice(samples, count))
            else:
                total, number = len(samples), min(count, len(samples))
                rows = [i * total // number for i in range(number)]
                chosen = [samples[SeededIndex(row, sample_seed(self._seed, row))] for row in rows]
            if not chosen:
                continue  # a stream that a resumed run finds at the end of its epoch
            batch = self.collate([self.drawn(sample) for sample in chosen])
            self.finish(batch)
            images = batch.get("after_mixing", Tensor.detach)(self._of_one_size(batch["image"]))
            shown[name] = denormalise(images, *self._statistics)
        return shown

    def drawn(self, sample: Sample) -> Sample:
        """A sample with its targets drawn into its image, to be shown."""
        return sample

    def _of_one_size(self, images: Tensor | list[Tensor]) -> Tensor:
        """Images (B, C, H, W) to be shown; those of several sizes are resized to `size`, whatever their aspect."""
        if isinstance(images, Tensor):
            return images
        return torch.cat([F.interpolate(image[None], self.size, mode="area") for image in images])

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes shuffled batches; the last incomplete one is dropped unless it is the only one."""
        devices = 1 if self.trainer is None else self.trainer.num_devices
        check_shared_memory(self.batch_size, self._image_bytes, self.num_workers, devices)
        if isinstance(self.train_set, Stream):
            return self._loader(self.train_set, None, training=True)
        return self._loader(self.train_set, self.train_sampler(self.train_set), training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all validation samples, in order."""
        return self._in_order(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all test samples, in order."""
        return self._in_order(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all samples to predict, in order."""
        return self._in_order(self.predict_set)

    def on_exception(self, exception: BaseException) -> None:
        """Adds the state of the shared memory to the error of a killed loader process."""
        explain(exception, self.batch_size, self._image_bytes, self.num_workers)

    @property
    def _image_bytes(self) -> int:
        """Bytes of an image as a loader process hands it over."""
        return self._pixel_bytes * self.size[0] * self.size[1]

    @property
    def _pixel_bytes(self) -> int:
        return self.in_chans * (1 if self.bands.ranges is None else 4)

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    @property
    def _place(self) -> tuple[int, int]:
        """Rank and world size."""
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _samples(self, split: str, training: bool = False, predict: bool = False) -> Images | Stream:
        """Makes the samples of a split; images of training alone may be skipped, and prediction needs no targets."""
        targets = self.predicted_targets() if predict else self.targets(split)
        source = self.predict_source if predict and self.predict_source else self.data_source
        rows, chosen, shards = source.rows_of(split, whole=predict)
        transform = self.train_transform if training else self.eval_transform
        on_hub = source.name.startswith(HUB)
        reader = source.reader(targets, transform, self.max_pixels, self.exif_orientation, on_hub, self.bands)
        bad = self.bad_images if training else BadImages("raise")
        if shards is None or self.stream_options is None:
            images = Images(rows, reader, bad, self.trained_rows(rows, chosen) if training else chosen)
            images.check_bands()
            return images
        seed = self._seed if training else None
        shared = (self.batch_size, self.num_workers, *self._place, bad, self.source)
        return Stream(shards, reader, *shared, seed, *self.stream_options)

    def _in_order(self, samples: Images | Stream) -> DataLoader[Any]:
        if self.trainer is not None and isinstance(self.trainer.strategy, FSDPStrategy):
            counts = samples.shards.counts if isinstance(samples, Stream) else [len(samples)]
            check_equal_batches(None if counts is None else sum(counts), self.trainer.world_size, self.batch_size)
        return self._loader(samples, None if isinstance(samples, Stream) else EvalSampler(len(samples), *self._place))

    def _loader(
        self, samples: Images | Stream, sampler: TrainSampler | EvalSampler | None, training: bool = False
    ) -> DataLoader[Any]:
        return make_loader(samples, self.batch_size, self.num_workers, self.collate, sampler, training)
