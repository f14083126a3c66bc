"""One data source with all of its splits: which rows are trained on, validated, tested and predicted."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from linvit.data.sources.images import SampleReader, Target, Transform
from linvit.data.sources.labels import as_images, features_of, find_column
from linvit.data.sources.read import ImageReader
from linvit.data.sources.splits import DIGITS, HUB, SCENES, hold_out, load_splits
from linvit.data.sources.stream import Shards, load_streams
from linvit.errors import UserError

Splits = dict[str, datasets.Dataset]


@dataclass(eq=False)
class DataSource:
    """The splits of a data source: `load` finds the tables, `prepare` gives targets the form that training needs."""

    name: str
    images: ImageReader
    given_image_column: str | None = None
    val_fraction: float = 0.0
    streaming: bool = False
    prepare: Callable[[Splits], Splits] = dict
    load: Callable[[str], Splits] = load_splits
    options: Any = None  # of generated data: what its samples follow from

    def __post_init__(self) -> None:
        self.images = replace(self.images, on_hub=self.name.startswith(HUB))
        if self.name == (DIGITS if self.options is None else SCENES) and Path(self.name).is_dir():
            rank_zero_warn(
                f"data source '{self.name}' is the dataset of linvit, not the folder of this name: for that, write "
                f"'./{self.name}'"
            )

    @cached_property
    def tables(self) -> Splits:
        """The rows of each split as they are stored."""
        return {name: part.rows for name, part in self.shards.items()} if self.streaming else self.load(self.name)

    @cached_property
    def shards(self) -> dict[str, Shards]:
        """The splits as streams."""
        return load_streams(self.name)

    @cached_property
    def image_column(self) -> str:
        """Name of the column of images."""
        features = features_of(self.tables)
        found = find_column(features, self.given_image_column, datasets.Image, ["image", "img"], self.name)
        if found is None:
            raise UserError(
                f"data source '{self.name}' has no image column among {', '.join(features)}; "
                f"name it with --data.image_column"
            )
        return found

    @cached_property
    def splits(self) -> Splits:
        """The rows of each split, images and targets in the form that training needs."""
        return self.prepare(as_images(self.tables, self.image_column, self.name))

    def table_of(self, split: str) -> str:
        """Returns the split whose table has the rows of a split: train for val, if val is a held-out part of train."""
        return split if split in self.splits else "train"

    def rows_of(self, split: str, whole: bool = False) -> tuple[datasets.Dataset, np.ndarray | None, Shards | None]:
        """Returns table or stream of a split, numbers of the used rows, int (N,) or None for all, and its shards.

        Without a validation split, train and val are parts of train unless `whole` is set.
        """
        table, chosen = (split, None) if whole else self.held_out(split)
        if chosen is not None and split == "val":
            rank_zero_info(
                f"data source '{self.name}' has no validation split; a fraction of {self.val_fraction} of its "
                f"train split is held out (--data.val_fraction)"
            )
        if table not in self.splits:
            add = "; a stream is not cut in two: add one, or set --data.streaming=false"
            way = add if self.streaming and split == "val" else ""
            raise UserError(f"data source '{self.name}' has no {split} split; it has: {', '.join(self.splits)}{way}")
        rows = self.splits[table]
        if self.image_column not in rows.features:
            raise UserError(
                f"the {split} split of data source '{self.name}' has no column '{self.image_column}', where the others "
                f"have their images; it has: {', '.join(rows.features)}. Rename its column"
            )
        shards = self.shards[table]._replace(rows=rows) if self.streaming else None
        return rows, chosen, shards

    def held_out(self, split: str) -> tuple[str, np.ndarray | None]:
        """Returns the table of a split and its rows there: without a validation split, a part of train; None is all."""
        cut = not self.streaming and "val" not in self.splits and "train" in self.splits
        if not cut or split not in ("train", "val"):
            return split, None
        return "train", hold_out(len(self.splits["train"]), self.val_fraction, self.name)[split]

    def trained_rows(self, chosen: np.ndarray | None) -> np.ndarray | None:
        """Returns the numbers of the used training rows, among the `chosen` ones; None means all."""
        return chosen

    def groups(self, chosen: np.ndarray) -> np.ndarray | None:
        """Returns the group of each chosen training row, int (N,), if the samples of a batch are of one; else None."""
        return None

    def reader(self, targets: Mapping[str, Target], transform: Transform) -> SampleReader:
        """Returns the reader that makes samples of rows, with the targets as entries besides the image."""
        return SampleReader(transform, self.image_column, targets, self.images)

    def evaluated(self, available: Collection[str]) -> str:
        """Returns the split that is tested or predicted: test, or the next best of those that are available."""
        split = next(name for name in ("test", "val", "train") if name in available)
        if split != "test" and {*available} != {"train"}:  # a folder of photos is no split of anything
            rank_zero_info(f"data source '{self.name}' has no test split; using its {split} split")
        return split
