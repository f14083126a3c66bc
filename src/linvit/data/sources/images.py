"""Rows of a table as samples, and samples as batches."""

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import numpy as np
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from linvit.data.loading.seeds import SeededIndex
from linvit.data.sources.bad_images import BadImages, name_of, read
from linvit.data.transforms.ops import BatchDeviceOps

Sample = dict[str, Any]
"""image: 8-bit (3, H, W); index: in the split; id: path or index; label: class, if known; device_ops: in training."""


class Images(Dataset[Sample]):
    """Rows of a `datasets.Dataset` as samples.

    Args:
        rows: The table.
        transform: 8-bit pixels (3, h, w) and a seed to entries of the sample.
        image: Column of the images.
        label: Column of the labels, or None.
        bad: What becomes of images that cannot be decoded.
        chosen: Numbers of the rows that are meant, int (N,); None means all. `select` would write them beside the
            table, where another user may own the folder.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        transform: Callable[[Tensor, int], Sample],
        image: str,
        label: str | None,
        bad: BadImages,
        chosen: np.ndarray | None = None,
    ) -> None:
        undecoded = rows.cast_column(image, datasets.Image(decode=False))  # decoded here, where the path is at hand
        self.rows = undecoded.select_columns([image] if label is None else [image, label]).with_format("arrow")
        self.transform = transform
        self.image = image
        self.label = label
        self.bad = bad
        self.chosen = np.arange(len(rows)) if chosen is None else chosen
        bad.expect(len(self.chosen))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, at: SeededIndex | int) -> Sample:
        """Loads, decodes and transforms one image, or another one in its place; a bare index has the seed 0.

        Raises:
            UserError: If the image cannot be decoded and may not be skipped; names its file.
        """
        index, seed = at if isinstance(at, SeededIndex) else (at, 0)
        sample: Sample = self.bad.first_good(self._sample, index, seed, len(self))
        return sample

    def _sample(self, index: int, seed: int) -> Sample:
        number = int(self.chosen[index])
        row = self.rows[number]  # a table of one row
        stored = row[self.image][0].as_py()
        picture = read(stored, name_of(stored, f"row {number}"), self.bad.max_pixels)
        sample = self.transform(picture, seed) | {"index": index, "id": stored["path"] or str(index)}
        if self.label is not None:
            sample["label"] = row[self.label][0].as_py()
        return sample


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch: tensors stacked, ids a list; in training also their `device_ops`, and `seed`, 63 bits for the batch.

    The batch's seed is that of its first sample. It stays an int, so that reading it waits for no device.
    """
    plans = [sample["device_ops"] for sample in samples if "device_ops" in sample]
    batch: dict[str, Any] = default_collate(
        [{name: value for name, value in sample.items() if name != "device_ops"} for sample in samples]
    )
    return batch | {"seed": plans[0].seed, "device_ops": BatchDeviceOps(plans)} if plans else batch
