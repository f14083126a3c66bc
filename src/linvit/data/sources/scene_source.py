"""Scenes of digits as a data source: its rows are numbers of scenes, which are made when they are read."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import datasets

from linvit.data.loading.seeds import sample_seed
from linvit.data.sources.class_names import Classes
from linvit.data.sources.data_source import DataSource, Splits
from linvit.data.sources.images import Reader, Target, Transform
from linvit.data.sources.read import RGB, ImageReader
from linvit.data.sources.scenes import CLASSES, SCENE_SPLITS, Scenes, scene
from linvit.data.sources.splits import SCENES, Rows
from linvit.errors import UserError


@dataclass
class SceneReader(Reader):
    """Makes the sample of a row of `SceneSource`, a scene of a size (H, W) with some entries besides the image."""

    size: tuple[int, int]
    options: Scenes
    entries: tuple[str, ...]

    def columns_of(self, rows: Rows) -> Rows:
        """The columns that say which scene it is."""
        return rows.with_format("arrow")

    def __call__(self, row: Mapping[str, Any], number: int, place: str, seed: int) -> dict[str, Any]:
        """Makes a scene; a training scene follows from the seed of the sample, too, if each epoch has new ones."""
        split = row["split"]
        fresh = seed if self.options.fresh and split == SCENE_SPLITS[0] else 0
        made_from = sample_seed(self.options.seed, SCENE_SPLITS.index(split), row["scene"], fresh)
        made: dict[str, Any] = scene(split, made_from, self.size, self.options)
        made["objects"] = {name: made[name].numpy() for name in ("boxes", "labels", "masks")}
        made["image_id"] = row["scene"]
        sample = {name: made[name] for name in ("image", *self.entries)}
        return self.transform(sample, seed) | {"index": number, "id": f"{split}_{row['scene']}"}


class SceneSource(DataSource):
    """The data source `digit_scenes`: scenes of a size (H, W), of three bands of 8 bits."""

    image_column = "scene"
    classes = Classes(CLASSES[1:], [*range(10)])

    def __init__(self, images: ImageReader, options: Scenes, size: tuple[int, int]) -> None:
        super().__init__(SCENES, images)
        if images.bands != RGB:
            raise UserError(
                f"the scenes of {SCENES} have three bands of 8 bits; leave --data.bands and value_range out"
            )
        self.options = options
        self.size = size

    @cached_property
    def splits(self) -> Splits:
        """Numbers of the scenes of each split."""
        return {
            name: datasets.Dataset.from_dict({"split": [name] * count, "scene": list(range(count))})
            for name, count in ((name, getattr(self.options, name)) for name in SCENE_SPLITS)
        }

    def reader(self, targets: Mapping[str, Target], transform: Transform) -> Reader:
        """Makes scenes instead of decoding images; see `DataSource.reader`."""
        return SceneReader(transform, self.size, self.options, tuple(targets))
