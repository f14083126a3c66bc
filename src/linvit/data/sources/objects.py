"""Images with objects in COCO's files, tables or on the hub, and which of them are trained on."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pyarrow.compute
from lightning.pytorch.utilities import rank_zero_info
from tqdm import tqdm

from linvit.data.sources.coco import CocoTables, load_coco
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import SampleReader, Target, Transform
from linvit.data.sources.labels import Classes, features_of, undecoded
from linvit.data.sources.object_audit import MIN_SIDE, ObjectAudit, audit_objects, large_enough
from linvit.data.sources.object_column import ObjectColumn, ObjectReader, object_column
from linvit.data.sources.other_annotations import other_annotations
from linvit.data.sources.read import name_of
from linvit.data.sources.splits import load_splits, local_folder
from linvit.errors import UserError, did_you_mean

THREADS = 16


@dataclass(eq=False, kw_only=True)
class ObjectSource(DataSource):
    """A source with objects: COCO's files, or what `load_splits` knows; for the fields see `DetectionData`."""

    given_column: str | None
    box_format: str
    given_names: list[str] | None
    masks: bool

    @cached_property
    def coco(self) -> CocoTables | None:
        """The tables of COCO's files, if it has such."""
        folder = local_folder(self.name)
        return load_coco(folder, self.masks) if folder else None

    @cached_property
    def tables(self) -> Splits:
        """The rows of each split as they are stored."""
        return load_splits(self.name, classes=False) if self.coco is None else self.coco.splits

    @cache  # noqa: B019 (a source lives as long as its run)
    def audit(self, split: str) -> ObjectAudit:
        """Returns the audit of all objects of a split."""
        assert self.column is not None
        unread = [] if self.coco is None else self.coco.malformed[split]
        subset, labels = self.given_names is not None, self.classes.labels
        sizes, training = self.sizes(split), split == "train"
        return audit_objects(self.splits[split], self.column, sizes, labels, subset, self.masks, training, unread)

    def used(self, split: str) -> ObjectAudit:
        """Returns the audit of the objects that a split trains on or scores: a split may be a part of a table."""
        table, chosen = self.held_out(split)
        found = self.audit(table)._replace(training=split == "train")
        return found if chosen is None else found.of_rows(chosen)

    def counts(self, split: str) -> np.ndarray:
        """Returns how many objects of each class a split trains on or scores, int (K,); see `ObjectAudit`."""
        return self.used(split).per_class

    @cached_property
    def column(self) -> ObjectColumn | None:
        """The column of the objects; None if there is none."""
        column = object_column(features_of(self.tables), self.given_column, self.box_format, self.name)
        if column is not None and self.masks and "segmentation" not in column.fields:
            raise UserError(
                f"the objects of '{self.name}' have no masks ('segmentation'): leave --data.masks at false, and train "
                f"a head without masks"
            )
        return column

    @cached_property
    def classes(self) -> Classes:
        """The classes, in the order of their ids."""
        column, given = self.column, self.given_names
        if column is None:
            folder = local_folder(self.name)
            other = other_annotations(folder) if folder else ""
            why = f" that can be read: {other}" if other else ""
            raise UserError(
                f"data source '{self.name}' has no objects{why}; it has: {', '.join(features_of(self.tables))}"
            )
        if self.coco is not None:
            found: dict[Any, str] = dict(self.coco.categories)
        elif column.names is not None:
            found = dict(enumerate(column.names))
        else:
            rows = self.splits.get("train", next(iter(self.splits.values())))
            lists = [column.lists(cell, f"row {row}") for row, cell in enumerate(rows[column.name])]
            ids = sorted({key for own in lists for key in own["category"]} - {None})
            found = {key: str(key) for key in ids}
            if given is not None and not isinstance(next(iter(ids), ""), str):  # which it names in this order
                if len(given) != len(ids):
                    raise UserError(
                        f"class_names has {len(given)} names, but the objects of '{self.name}' are of {len(ids)} "
                        f"categories, {ids[:10]}"
                    )
                found = dict(zip(ids, given, strict=True))
        if not found:
            raise UserError(f"data source '{self.name}' has no categories")
        if unknown := [name for name in given or () if name not in found.values()]:
            hint = did_you_mean(unknown[0], found.values())
            raise UserError(f"'{self.name}' has no class '{unknown[0]}' (--data.class_names).{hint}")
        used = {key: name for key, name in found.items() if given is None or name in given}
        return Classes([*used.values()], [*used])

    @cache  # noqa: B019
    def sizes(self, split: str) -> np.ndarray:
        """(H, W) of all images, int (n, 2): as the table says, or by the headers of files; 0 where none can be read."""
        rows = self.splits[split]
        if {"height", "width"} <= rows.features.keys():
            table = rows.select_columns(["height", "width"]).with_format("arrow")[:]
            sides = [pyarrow.compute.fill_null(table[side], 0).to_numpy() for side in ("height", "width")]
            return np.stack(sides, 1).astype(np.int64)
        images = undecoded(rows, self.image_column)
        with ThreadPoolExecutor(THREADS) as pool:
            found = pool.map(lambda row: self.images.size(images[row][self.image_column]) or (0, 0), range(len(images)))
            return np.array([*tqdm(found, f"sizes of {split} images", len(images), delay=5)], np.int64).reshape(-1, 2)

    def trained_rows(self, chosen: np.ndarray | None) -> np.ndarray:
        """Returns numbers of the training rows except those without annotation or with a side below `MIN_SIDE`."""
        kept = large_enough(self.sizes("train")) & (self.audit("train").annotated > 0)
        chosen = np.arange(len(kept)) if chosen is None else chosen
        used: np.ndarray = chosen[kept[chosen]]
        if not len(used):
            raise UserError(f"all {len(chosen)} training images of '{self.name}' are without objects or too small")
        if len(used) < len(chosen):
            rank_zero_info(
                f"training leaves out {len(chosen) - len(used)} of {len(chosen)} images of '{self.name}', which have "
                f"no object or a side of less than {MIN_SIDE} pixels"
            )
        return used

    def groups(self, chosen: np.ndarray) -> np.ndarray:
        """Returns 1 for images that are wider than high, else 0, int (n,): a batch has images of one group."""
        height, width = self.sizes("train")[chosen].T
        wide: np.ndarray = (width > height).astype(int)
        return wide

    def name_of(self, split: str, row: int) -> str:
        """Returns the name of the image of a row in messages."""
        return name_of(undecoded(self.splits[split], self.image_column)[row][self.image_column], f"row {row}")

    def reader(self, targets: Mapping[str, Target], transform: Transform) -> SampleReader:
        """Returns the reader that makes samples of rows; see `DataSource.reader`."""
        found = (self.column, self.classes.labels, self.masks) if "objects" in targets else ()
        return ObjectReader(transform, self.image_column, targets, self.images, *found)
