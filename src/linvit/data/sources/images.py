"""Rows of a table as samples, and samples as batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, default_collate

from linvit.data.loading.sampler import SeededIndex
from linvit.data.sources.read import BadImageError, BadImages, ImageReader, name_of
from linvit.data.transforms.decode import BandsError, header
from linvit.data.transforms.on_device import BatchDeviceOps
from linvit.errors import UserError

if TYPE_CHECKING:
    import datasets

    from linvit.data.sources.splits import Rows

Sample = dict[str, Any]
"""image: (C, H, W), 8-bit, or float32 from 0 to 255 with a value range; index: in the split; id: path or index; the
targets of its task; device_ops: in training."""
Transform = Callable[[Sample, int], Sample]
"""A sample and its seed to the sample that is used."""


def whole_cell(cell: Any, name: str) -> Any:
    """Returns a cell as it is."""
    return cell


class Target(NamedTuple):
    """Target of an image: its column, and the function that reads a cell, given the image's name in messages."""

    column: str
    read: Callable[[Any, str], Any] = whole_cell


@dataclass
class SampleReader:
    """Turns a row into a sample: decodes the image in a column, reads its targets, transforms both together."""

    transform: Transform
    image: str
    targets: Mapping[str, Target]
    images: ImageReader

    def columns_of(self, rows: "Rows") -> "Rows":
        """Selects the columns that samples need; images stay undecoded, since `datasets` would not name a bad one."""
        import datasets  # here, since linvit.load needs it not

        names = [self.image, *(target.column for target in self.targets.values())]
        for name in names:
            if isinstance(rows.features[name], datasets.Image):
                rows = rows.cast_column(name, datasets.Image(decode=False))
        return rows.select_columns(names).with_format("arrow")

    def __call__(self, row: Mapping[str, Any], number: int, place: str, seed: int) -> Sample:
        """Makes the sample of a row, whose `index` is `number`; messages call it by its path or else by `place`."""
        stored = row[self.image]
        name = name_of(stored, place)
        sample = {"image": self.images.read(stored, name)}
        sample |= {entry: target.read(row[target.column], name) for entry, target in self.targets.items()}
        self.complete(sample, name)
        return self.transform(sample, seed) | {"index": number, "id": stored["path"] or str(number)}

    def complete(self, sample: Sample, name: str) -> None:
        """Checks the image and targets of a row, before the transform."""
        check_target_sizes(sample, name)


class Images(Dataset[Sample]):
    """Rows of a table as samples: those `chosen`, int (N,), or all. `select` would write files beside the table."""

    def __init__(
        self, rows: "datasets.Dataset", reader: SampleReader, bad: BadImages, chosen: np.ndarray | None = None
    ) -> None:
        self.rows = reader.columns_of(rows)
        self.reader = reader
        self.bad = bad
        self.chosen = np.arange(len(rows)) if chosen is None else chosen
        bad.start(len(self.chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    def check_bands(self) -> None:
        """Raises a `UserError` if bands or bits of the first image would be lost, as then of others."""
        try:
            _ = self._sample(0, 0) if len(self) else None
        except BadImageError as error:
            if isinstance(error.__cause__, BandsError):
                raise UserError(f"image {error.name}: {error.reason}") from error

    def sizes(self) -> list[tuple[int, int]]:
        """Size (H, W) of each image from its file's header; an unreadable image gets the size of another one."""
        stored = self.rows.select_columns([self.reader.image])

        def size(number: int) -> tuple[int, int] | None:
            try:
                kind = header(self.reader.images.load(stored[number][self.reader.image][0].as_py()))
            except (OSError, ValueError, BadImageError):
                return None
            return kind.height, kind.width

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(size, self.chosen.tolist()))
        last = next(filter(None, found), (1, 1))
        return [last := last if one is None else one for one in found]

    def __getitem__(self, at: SeededIndex | int) -> Sample:
        """Makes the sample of one image, or of another one in its place; a bare index has the seed 0."""
        index, seed = at if isinstance(at, SeededIndex) else (at, 0)
        sample: Sample = self.bad.sample_or_other(self._sample, index, seed, len(self))
        return sample

    def _sample(self, index: int, seed: int) -> Sample:
        number = int(self.chosen[index])
        table = self.rows[number]  # of one row
        row = {name: table[name][0].as_py() for name in table.column_names}
        return self.reader(row, index, f"row {number}", seed)


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
    """Returns the error message for a `what` of a size (H, W) other than the image's."""
    turned = "; with --data.exif_orientation=false they agree" if tuple(image[::-1]) == tuple(size) else ""
    return f"{what} {size[1]} x {size[0]} pixels, the image has {image[1]} x {image[0]}{turned}"


class NotTransferred:
    """Entries of a batch that Lightning neither moves nor rounds; it would search a mapping or a dataclass."""

    def __init__(self, entries: dict[str, list[Any]]) -> None:
        self.entries = entries


def collate(
    samples: Sequence[Sample], list_keys: Collection[str] = (), cpu_keys: Collection[str] = ()
) -> dict[str, Any]:
    """Makes a batch: what has one shape is stacked, `cpu_keys` are in `not_transferred`; training has a `seed`."""
    shapes = {name: {getattr(sample[name], "shape", None) for sample in samples} for name in samples[0]}
    lists = {*list_keys, *(name for name, own in shapes.items() if len(own) > 1)} - {"device_ops", *cpu_keys}
    apart = {"device_ops", *lists, *cpu_keys}
    batch: dict[str, Any] = default_collate(
        [{name: value for name, value in sample.items() if name not in apart} for sample in samples]
    )
    batch |= {name: [sample[name] for sample in samples] for name in lists if name in samples[0]}
    if cpu_keys:
        batch["not_transferred"] = NotTransferred(
            {name: [sample[name] for sample in samples] for name in cpu_keys if name in samples[0]}
        )
    ops = [sample["device_ops"] for sample in samples if "device_ops" in sample]
    return batch | {"seed": ops[0].seed, "device_ops": BatchDeviceOps(ops)} if ops else batch
