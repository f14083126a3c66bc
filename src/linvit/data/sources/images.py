"""Rows of a table as samples, and samples as batches."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
from torch.utils.data import Dataset, default_collate

from linvit.data.loading.seeds import SeededIndex
from linvit.data.sources.bad_images import BadImages
from linvit.data.sources.read import BadImageError, ImageFile, ImageReader, name_of
from linvit.data.sources.splits import Rows
from linvit.data.transforms.bands import BandsError
from linvit.data.transforms.on_device import BatchDeviceOps
from linvit.errors import UserError

Sample = dict[str, Any]
"""image: (C, H, W), 8-bit, or float32 from 0 to 255 with a value range; index: in the split; id: path or index; the
targets of its task; device_ops: in training."""
Transform = Callable[[Sample, int], Sample]
"""A sample and its seed to the sample that is used."""

Loaded = dict[int, Mapping[str, Any] | BadImageError]
"""Rows that were loaded, by index, or why they cannot be."""
AHEAD = 2**23  # bytes of the files that are loaded before the first of them is decoded


class Target(NamedTuple):
    """Something that belongs to an image, such as its class.

    Attributes:
        column: Of the table.
        read: A cell of the column, and what messages call the image, to what the transform is given.
    """

    column: str
    read: Callable[[Any, str], Any]


@dataclass
class Reader(ABC):
    """What makes samples of the rows of a table.

    Attributes:
        transform: A sample and its seed to the sample that is used.
    """

    transform: Transform

    @abstractmethod
    def columns_of(self, rows: Rows) -> Rows:
        """Selects the columns that samples need."""

    def load(self, row: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        """What is done first for all of several rows: the row, with an `ImageFile` in place of a stored image.

        `place` is what messages call an image without a path.
        """
        return row

    @abstractmethod
    def sample(self, row: Mapping[str, Any], number: int, seed: int) -> Sample:
        """Makes the sample of a loaded row; `number` is its `index`, and its `id` if it has no path."""

    def __call__(self, row: Mapping[str, Any], number: int, place: str, seed: int) -> Sample:
        """Makes the sample of a row; see `load` and `sample`."""
        return self.sample(self.load(row, place), number, seed)


@dataclass
class SampleReader(Reader):
    """How a row becomes a sample: the image in a column is decoded, its targets are read, both transformed together."""

    image: str
    targets: Mapping[str, Target]
    images: ImageReader

    def columns_of(self, rows: Rows) -> Rows:
        """Selects the columns that samples need; images stay undecoded, since `datasets` would not name a bad one."""
        names = [self.image, *(target.column for target in self.targets.values())]
        for name in names:
            if isinstance(rows.features[name], datasets.Image):
                rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows.select_columns(names).with_format("arrow")

    def load(self, row: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        """Loads the image file; see `Reader`."""
        stored = row[self.image]
        return {**row, self.image: self.images.file(stored, name_of(stored, place))}

    def sample(self, row: Mapping[str, Any], number: int, seed: int) -> Sample:
        """Decodes the image, reads the targets, and transforms both; see `Reader`."""
        file: ImageFile = row[self.image]
        sample = {"image": file.decode()}
        sample |= {entry: target.read(row[target.column], file.name) for entry, target in self.targets.items()}
        self.complete(sample, file.name)
        return self.transform(sample, seed) | {"index": number, "id": file.path or str(number)}

    def complete(self, sample: Sample, name: str) -> None:
        """Checks what was read of a row, before the transform."""
        check_target_sizes(sample, name)


class Images(Dataset[Sample]):
    """Rows of a `datasets.Dataset` as samples.

    `chosen` has the numbers of the rows that are used, int (N,); None means all. `select` would write them beside the
    table, where another user may own the folder.
    """

    def __init__(
        self, rows: datasets.Dataset, reader: Reader, bad: BadImages, chosen: np.ndarray | None = None
    ) -> None:
        self.rows = reader.columns_of(rows)
        self.reader = reader
        self.bad = bad
        self.chosen = np.arange(len(rows)) if chosen is None else chosen
        bad.start(len(self.chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    def check_bands(self) -> None:
        """Raises a `UserError` if the first image has bands or bits that would be lost, since then all may have."""
        found = self._load(0) if len(self) else None
        if isinstance(found, BadImageError) and isinstance(found.__cause__, BandsError):
            raise UserError(f"image {found.name}: {found.reason}") from found

    def __getitem__(self, at: SeededIndex | int) -> Sample:
        """Loads, decodes and transforms one image, or another one in its place; a bare index has the seed 0."""
        return self.__getitems__([at])[0]

    def __getitems__(self, ats: Sequence[SeededIndex | int]) -> list[Sample]:
        """Does the same for a batch; torch's loader calls it.

        Files are loaded before images are decoded, which saves 7 to 11 % of the time of ImageNet's recipes: each kind
        of work is faster where it follows upon itself, because the processor has its code and data in the cache.
        """
        samples: list[Sample] = []
        for places, loaded in self._loaded(at if isinstance(at, SeededIndex) else SeededIndex(at, 0) for at in ats):
            make = partial(self._sample, loaded)
            samples += [self.bad.sample_or_other(make, index, seed, len(self)) for index, seed in places]
        return samples

    def _loaded(self, places: Iterable[SeededIndex]) -> Iterator[tuple[list[SeededIndex], Loaded]]:
        """Yields some places at a time with what was loaded for them, which has about `AHEAD` bytes."""
        some: list[SeededIndex] = []
        loaded: Loaded = {}
        size = 0
        for place in places:
            some.append(place)
            if place.row not in loaded:
                loaded[place.row] = row = self._load(place.row)
                cells = () if isinstance(row, BadImageError) else row.values()
                size += sum(len(cell.data) for cell in cells if isinstance(cell, ImageFile))
            if size >= AHEAD:
                yield some, loaded
                some, loaded, size = [], {}, 0
        yield some, loaded

    def _load(self, index: int) -> Mapping[str, Any] | BadImageError:
        """Loads one row, or says why that is impossible."""
        number = int(self.chosen[index])
        table = self.rows[number]  # of one row
        row = {name: table[name][0].as_py() for name in table.column_names}
        try:
            return self.reader.load(row, f"row {number}")
        except BadImageError as error:
            return error

    def _sample(self, loaded: Loaded, index: int, seed: int) -> Sample:
        row = loaded[index] if index in loaded else self._load(index)
        if isinstance(row, BadImageError):
            raise row
        return self.reader.sample(row, index, seed)


def check_target_sizes(sample: Sample, name: str) -> None:
    """Raises a `BadImageError` if the mask of an image, or what its `height` and `width` say, has another size."""
    height, width = sample["image"].shape[-2:]
    for what, size in (
        ("its mask has", sample["mask"].shape[-2:] if "mask" in sample else None),
        ("its annotations are for", (sample.get("height"), sample.get("width")) if "height" in sample else None),
    ):
        if size is not None and tuple(size) != (height, width):
            raise BadImageError(name, wrong_size(what, size, (height, width)))


def wrong_size(what: str, size: Sequence[int | None], image: Sequence[int]) -> str:
    """What to say of a size (H, W) that is not that of the image; `what` has it."""
    turned = "; without --data.exif_orientation they agree" if tuple(image[::-1]) == tuple(size) else ""
    return f"{what} {size[1]} x {size[0]} pixels, the image has {image[1]} x {image[0]}{turned}"


class NotTransferred:
    """Entries of a batch, as lists, which Lightning neither moves to the device nor converts to half precision.

    Half precision would round coordinates of boxes to whole pixels and more; evaluation needs the truth on the CPU.
    It is neither a mapping nor a dataclass: Lightning would search those.
    """

    def __init__(self, entries: dict[str, list[Any]]) -> None:
        self.entries = entries


def collate(
    samples: Sequence[Sample],
    list_keys: Collection[str] = (),
    list_if_ragged: Collection[str] = (),
    cpu_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Makes a batch: tensors are stacked, ids are a list; training adds `device_ops` and `seed`, 63 bits for the batch.

    The batch's seed is that of its first sample. It stays an int, so that reading it does not wait for the device. For
    the keys see `ImageData`; `cpu_keys` are in `not_transferred`, a `NotTransferred`.
    """
    differ = {name for name in list_if_ragged if len({sample[name].shape for sample in samples if name in sample}) > 1}
    apart = {"device_ops", *list_keys, *cpu_keys, *differ}
    batch: dict[str, Any] = default_collate(
        [{name: value for name, value in sample.items() if name not in apart} for sample in samples]
    )
    batch |= {name: [sample[name] for sample in samples] for name in {*list_keys, *differ} if name in samples[0]}
    if cpu_keys:
        batch["not_transferred"] = NotTransferred(
            {name: [sample[name] for sample in samples] for name in cpu_keys if name in samples[0]}
        )
    ops = [sample["device_ops"] for sample in samples if "device_ops" in sample]
    return batch | {"seed": ops[0].seed, "device_ops": BatchDeviceOps(ops)} if ops else batch
