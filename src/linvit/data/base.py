"""Base class of image data modules: source, splits, samples, loaders, and the processing of whole batches."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from linvit.data.loading.loader import make_loader
from linvit.data.loading.sampler import (
    EvalSampler,
    SeededIndex,
    TrainSampler,
    check_equal_batches,
    sample_seed,
)
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import Images, Sample, Target, Transform, collate
from linvit.data.sources.read import MAX_PIXELS, BadImages, ImageReader, Policy
from linvit.data.sources.scan import ImageFinding, ScanResult
from linvit.data.sources.splits import load_splits
from linvit.data.sources.stream import Stream
from linvit.data.transforms.decode import Bands
from linvit.data.transforms.on_device import Normalisation
from linvit.errors import UserError, check_number
from linvit.image_size import image_size

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class TargetReport(NamedTuple):
    """Result of `linvit data check` on the targets; `refused` is the reason why `linvit fit` would reject the data.

    The check also runs the steps of `linvit fit` before the first batch, unless the images have no targets
    (`trainable`). `noted` is listed with the bad images and annotations and does not make `linvit fit` fail.
    """

    lines: list[str]
    bad: Sequence[ImageFinding] = ()
    malformed: Sequence[ImageFinding] = ()
    refused: Sequence[str] = ()
    trainable: bool = True
    noted: Sequence[ImageFinding] = ()


class ImageData(LightningDataModule):
    """Base of the data modules.

    A subclass supplies `num_classes` and `class_names`, `targets`, and the two transforms, which bring all samples to
    8-bit images of `size`, or with a `value_range` to float32 images from 0 to 255. What else is arithmetic on floats
    is done per batch on the device. The order of training samples follows from (seed, epoch, ranks), a sample's
    augmentation from (seed, epoch, row, copy).

    Args:
        source: An embedded set ("digits": 1,797 real handwritten digits); a path to an image folder
            (`train/CLASS/*.jpg`, `val/CLASS/*.jpg`, or `train/*.jpg` with labels in `train/metadata.csv`), to parquet
            or arrow data, or to a set saved with `save_to_disk`; or `hub:owner/name`.
        batch_size: Images per step and device.
        num_workers: Loader processes per device; 0 loads in the training process.
        img_size: Side, or [H, W], of the images given to the model.
        val_fraction: Fraction of the training images held out when the data has no validation split.
        repeated_aug: How often each image of an epoch is used, augmented differently each time. Epochs keep their
            length, so each has 1 / repeated_aug of the images (DeiT: 3).
        bands: Numbers of the bands of an image that become its channels, in this order; the first is 1. null is for
            images of one or three bands, as RGB, and puts transparent ones of 8 bits on white. A model has as many
            input channels, and pretrained weights of three are repeated and scaled for it.
        value_range: The values that become 0 and 1, [low, high] or a pair for each band; other values are clipped.
            null is for values of 8 bits. `linvit data check` prints the percentiles.
        mean: Mean of each channel, subtracted from images in [0, 1].
        std: Standard deviation of each channel.
        image_column: Column of the images; null finds it.
        exif_orientation: Rotate images, and masks with an orientation, by EXIF or XMP; the papers' programs did not.
        streaming: Read parquet, arrow or tar files or a hub set sequentially instead of at random.
        streaming_rows: Training rows of a stream whose files do not contain their number; parquet and arrow files do.
        shuffle_buffer: Undecoded images that each loader process of a stream holds, to choose from at random.
        bad_images: skip replaces a training image that cannot be decoded by another one, raise ends the run.
            Evaluation always raises.
        max_bad_fraction: Largest fraction of the training images that is skipped (5 are always allowed).
        max_pixels: Images with more are refused before they are decoded; WebP and JPEG 2000 from half as many on.
        seed: Of the order of images and of all augmentation; null is `seed_everything`.
        predict_path: Images to predict instead of the source's; the same kinds of sources.
    """

    train_transform: Transform
    eval_transform: Transform
    train_set: Images | Stream
    val_set: Images | Stream
    test_set: Images | Stream
    predict_set: Images | Stream
    list_keys: ClassVar[Collection[str]] = ()
    """Entries of a sample that batches hold as lists, as they do all tensors that differ in shape."""
    cpu_keys: ClassVar[Collection[str]] = ()
    """Entries that Lightning neither moves to the device nor converts to half precision; see `NotTransferred`."""
    subset: bool = False
    """True if the data has only some of the classes of the network that is scored; see `restrict_to`."""
    how_to_restrict: ClassVar[str] = ""
    """Advice for data with fewer classes than the network, for an error message."""
    how_to_label: ClassVar[str] = "give the images labels"
    """Advice for data without labels, for an error message."""
    how_to_count: ClassVar[str | None] = None
    """Advice if the number of classes is unknown, for an error message; None is `how_to_label`."""
    advanced_options: ClassVar[frozenset[str]] = frozenset(
        {"bands", "value_range", "mean", "std", "image_column", "val_fraction", "repeated_aug", "seed"}
        | {"max_bad_fraction", "max_pixels", "streaming_rows", "shuffle_buffer"}
    )
    """Options that recipes set and users rarely do: only `--help=all` shows them."""
    check_defaults: ClassVar[Mapping[str, Any]] = {}
    """Defaults of options that differ in `linvit data check`."""

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
        check_number("batch_size", batch_size, at_least=1, whole=True)
        check_number("num_workers", num_workers, at_least=0, whole=True, note=" (0 loads in the training process)")
        check_number("repeated_aug", repeated_aug, at_least=1, whole=True, note=" (1 uses each image once)")
        check_number("val_fraction", val_fraction, above=0, below=1)
        check_number("shuffle_buffer", shuffle_buffer, at_least=1, whole=True)
        if streaming_rows is not None:
            check_number("streaming_rows", streaming_rows, at_least=1, whole=True)
        if streaming and repeated_aug > 1:
            raise UserError(f"a stream gives each image once per epoch; got repeated_aug={repeated_aug}")
        if seed is not None:
            check_number("seed", seed, at_least=0, whole=True, note=", or null for the run's")
        self.bands = Bands.parse(bands, value_range)
        channels = self.bands.channels
        if len(mean) != channels or len(std) != channels or not all(deviation > 0 for deviation in std):
            way = "" if channels == 3 else "; linvit data check with the same --bands and --value_range prints them"
            raise UserError(
                f"mean and std need {channels} values, one per channel, std above 0; got {list(mean)}, {list(std)}{way}"
            )
        self.source = source
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.img_size: int | Sequence[int] = img_size
        self.size = image_size(img_size)
        self.val_fraction = val_fraction
        self.repeated_aug = repeated_aug
        self.mean, self.std = tuple(mean), tuple(std)
        self.seed = seed
        self.stream_options = (shuffle_buffer, streaming_rows) if streaming else None
        self.bad_images = BadImages(bad_images, max_bad_fraction)
        self.images = ImageReader(max_pixels, exif_orientation, bands=self.bands)
        self.data_source = DataSource(source, self.images, image_column, val_fraction, streaming, self.prepare)
        self.predict_source = None
        if predict_path is not None:
            load = partial(load_splits, classes=False)
            self.predict_source = DataSource(predict_path, self.images, image_column, load=load)
        self.normalisation = Normalisation(self.mean, self.std)

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
        """Returns the targets of a split, by key; raises a `UserError` if the split has none."""
        raise NotImplementedError

    def predicted_targets(self) -> Mapping[str, Target]:
        """Returns the targets of the samples to predict, by key."""
        return {}

    def prepare(self, splits: Splits) -> Splits:
        """Returns the splits with targets in the form that training needs, such as classes as numbers."""
        return splits

    def restrict_to(self, classes: Sequence[str]) -> None:
        """Maps labels to indices into the `classes` of a network; the data has a subset of these classes."""
        raise NotImplementedError

    def check_training(self) -> None:
        """Checks training and validation split against each other, after both were made."""

    @property
    def collate(self) -> Callable[[Sequence[Sample]], dict[str, Any]]:
        """Returns the function that collates samples into a batch, in a loader process."""
        return partial(collate, list_keys=self.list_keys, cpu_keys=self.cpu_keys)

    @classmethod
    def recognises(cls, source: str) -> bool:
        """True if `linvit data check` takes a data source for one of this module's task."""
        return False

    def check_targets(self, found: ScanResult, workers: int) -> TargetReport:
        """Checks all targets for `linvit data check` with `workers` processes; `found` is the scan of the images."""
        return TargetReport([f"{self.source}: {found.images.total():,} images"])

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *_: Any, **__: Any) -> Self:
        """Raises a `UserError`: Lightning would unpickle the file, and it contains no data module."""
        raise UserError(f"'{checkpoint_path}' holds nothing of the data; build {cls.__name__} with its arguments")

    @property
    def preprocessing(self) -> dict[str, Any] | None:
        """Preprocessing of evaluation, as plain values; None if `eval_transform` has no `options`."""
        own = getattr(self.eval_transform, "options", None)
        if own is None:
            return None
        numbers, ranges = self.bands.numbers, self.bands.ranges
        return {
            **own,
            "mean": list(self.mean),
            "std": list(self.std),
            "bands": None if numbers is None else list(numbers),
            "value_range": None if ranges is None else [list(pair) for pair in ranges],
            "exif_orientation": self.images.exif_orientation,
            "max_pixels": self.images.max_pixels,
        }

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
        """Name of the data to predict: `predict_path`, or else the source."""
        return (self.predict_source or self.data_source).name

    def setup(self, stage: str) -> None:
        """Makes the sets that a stage needs: fit, validate, test or predict."""
        if self.trainer is not None and stage != "predict":
            model, data = self.trainer.lightning_module.hparams.get("num_classes"), self.num_classes
            if not self.subset and None not in (model, data) and model != data:
                raise UserError(
                    f"the model has {model} classes, but data source '{self.source}' has {data}. Build the model with "
                    f"num_classes={data}, or choose other data"
                )
        if stage == "fit":
            self.bad_images.report = None if self._folder is None else self._folder / "bad_images.csv"
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
        self.finish(batch)
        trainer = self.trainer
        return batch if trainer is None else trainer.precision_plugin.convert_input(batch)  # half precision wants half

    def finish(self, batch: dict[str, Any]) -> None:
        """Runs the remaining operations on the images of a batch, in place; see `Normalisation.finish`."""
        self.normalisation.finish(batch)

    def preview(self, count: int) -> dict[str, Tensor]:
        """Returns images (count, C, H, W) of training and validation in [0, 1], as the model gets them."""
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
            images = batch["image"]
            if isinstance(images, list):  # of several sizes: they are resized, whatever their aspect
                images = torch.cat([F.interpolate(image[None], self.size, mode="area") for image in images])
            shown[name] = self.normalisation.undo(batch.get("after_mixing", Tensor.detach)(images))
        return shown

    def drawn(self, sample: Sample) -> Sample:
        """Returns a sample with its targets drawn into its image, to be shown."""
        return sample

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes shuffled batches; the last incomplete one is dropped unless it is the only one."""
        sampler = None
        if isinstance(self.train_set, Images):
            options = (self._seed, *self._rank_and_world, self.repeated_aug, self.batch_size)
            groups = self.data_source.groups(self.train_set.chosen)
            sampler = TrainSampler(len(self.train_set), *options, groups)
        return make_loader(self.train_set, self.batch_size, self.num_workers, self.collate, sampler, training=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all validation samples, in order."""
        return self._in_order(self.val_set)

    def test_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all test samples, in order."""
        return self._in_order(self.test_set)

    def predict_dataloader(self) -> DataLoader[Any]:
        """Makes batches of all samples to predict, in order."""
        return self._in_order(self.predict_set)

    def evaluation_dataloader(self, split: str) -> DataLoader[Any]:
        """Makes batches of all samples of a split, in order and without augmentation."""
        return self._in_order(self._samples(split))

    @property
    def _seed(self) -> int:
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.seed is None else self.seed

    @property
    def _folder(self) -> Path | None:
        """Folder of the run; None without a logger, since Lightning then names the folder of all runs."""
        trainer = self.trainer
        return None if trainer is None or not trainer.loggers or trainer.log_dir is None else Path(trainer.log_dir)

    @property
    def _rank_and_world(self) -> tuple[int, int]:
        return (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)

    def _samples(self, split: str, training: bool = False, predict: bool = False) -> Images | Stream:
        """Makes the samples of a split. Only training skips bad images, and prediction needs no targets."""
        targets = self.predicted_targets() if predict else self.targets(split)
        source = self.predict_source if predict and self.predict_source else self.data_source
        rows, chosen, shards = source.rows_of(split, whole=predict)
        reader = source.reader(targets, self.train_transform if training else self.eval_transform)
        bad = self.bad_images if training else BadImages("raise")
        if shards is None or self.stream_options is None:
            images = Images(rows, reader, bad, source.trained_rows(chosen) if training else chosen)
            images.check_bands()
            return images
        seed = self._seed if training else None
        shared = (self.batch_size, self.num_workers, *self._rank_and_world, bad, self.source)
        return Stream(shards, reader, *shared, seed, *self.stream_options)

    def _in_order(self, samples: Images | Stream) -> DataLoader[Any]:
        if self.trainer is not None and isinstance(self.trainer.strategy, FSDPStrategy):
            total = None if isinstance(samples, Stream) else len(samples)
            check_equal_batches(total, self.trainer.world_size, self.batch_size)
        sampler = None if isinstance(samples, Stream) else EvalSampler(len(samples), *self._rank_and_world)
        return make_loader(samples, self.batch_size, self.num_workers, self.collate, sampler)
