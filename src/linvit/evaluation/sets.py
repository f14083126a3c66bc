"""Sets of images on disk, and the classes of a network that are right for each image."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow.compute

from linvit.data import ClassificationData
from linvit.data.sources.data_source import DataSource
from linvit.data.sources.images import Images, Sample, Transform
from linvit.data.sources.labels import places_of
from linvit.data.sources.read import BadImages
from linvit.errors import UserError
from linvit.io.reading import read_text

BORDER = {"objectnet": 2}  # pixels to cut off on each side: the images have a red frame
Kind = tuple[str, int] | None  # a corruption and its severity
Answers = Sequence[Sequence[int]]
"""The right classes by image; images without any are left out."""


class ImageSet(NamedTuple):
    """Rows of a table, right classes of each, classes to choose from, and the corruption of the images."""

    name: str
    source: DataSource
    rows: datasets.Dataset
    chosen: np.ndarray
    answers: Answers
    classes: Sequence[int]
    kind: Kind = None

    def images(self, transform: Transform) -> Images:
        """Returns the images as a transform prepares them."""
        border = BORDER.get(self.name)
        cut = transform if border is None else partial(_without_border, transform, border)
        return Images(self.rows, self.source.reader({}, cut), BadImages("raise"), self.chosen)


def read_set(
    name: str, data: ClassificationData, classes: Sequence[str], mapping: Path | None = None, whole: bool = True
) -> ImageSet:
    """Returns the test images of data, all of a folder without splits if `whole`, and their places among `classes`.

    The mapping is a JSON file with one or several of the network's classes, by name or number, for each of the data's
    classes. Images of missing classes are left out.
    """
    source = data.data_source
    if source.streaming:
        raise UserError(f"images of a stream are not evaluated: --sets {name}={source.name} reads them as a table")
    split = source.evaluated({*data.splits} if whole else {*data.splits, "val"})
    data.targets(split)  # checks the labels
    rows, chosen, _ = source.rows_of(split, whole)
    names = data.class_names or [*map(str, range(data.num_classes or 0))]
    if mapping is None:
        places = [[place] for place in places_of(names, classes, source.name)]
    else:
        known = _read(mapping, dict)
        if not known.keys() & {*names}:
            raise UserError(f"'{mapping}' contains no class of '{source.name}', such as '{names[0]}'")
        several = [each if isinstance(each, list) else [each] for each in map(known.get, names, [[]] * len(names))]
        places = [places_of([*map(str, each)], classes, str(mapping)) for each in several]
    labels = np.array(rows.select_columns([data.label_column]).with_format("arrow")[:][data.label_column])
    chosen = np.arange(len(rows)) if chosen is None else chosen
    chosen = chosen[np.array([len(places[label]) > 0 for label in labels[chosen]], bool)]
    answers = [places[label] for label in labels[chosen]]
    return ImageSet(name, source, rows, chosen, answers, sorted({place for own in places for place in own}))


def real_labels(path: Path, clean: ImageSet, classes: int) -> Answers:
    """Returns ReaL's labels (Beyer et al. 2020): a list per image, in the order of file names, or of a table's rows."""
    lists = _read(path, list)
    if len(lists) != len(clean.chosen):
        raise UserError(f"'{path}' has labels of {len(lists)} images, but the clean set has {len(clean.chosen)}")
    if not all(isinstance(own, list) and all(type(i) is int and 0 <= i < classes for i in own) for own in lists):
        raise UserError(f"'{path}' must hold a list for each image, of numbers from 0 to {classes - 1}")
    images = clean.rows.with_format("arrow")[:][clean.source.image_column]
    paths = pyarrow.compute.struct_field(images, "path").take(clean.chosen)  # copies no bytes of images
    names = [Path(path or "").name for path in paths.to_pylist()]
    order = np.argsort(names, kind="stable") if len({*names}) == len(names) else np.arange(len(names))
    return [lists[place] for place in np.argsort(order)]


def _read(path: Path, kind: type) -> Any:
    try:
        found = json.loads(read_text(path.expanduser()))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read '{path}' as JSON: {error}") from error
    if not isinstance(found, kind):
        raise UserError(f"'{path}' must hold a JSON {'object' if kind is dict else 'list'}")
    return found


def _without_border(transform: Transform, width: int, sample: Mapping[str, Any], seed: int) -> Sample:
    return transform({**sample, "image": sample["image"][..., width:-width, width:-width]}, seed)
