"""Looks at every image of a set: what it is, whether it can be decoded, whether it is there twice."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import datasets
import numpy as np
from PIL import ExifTags
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from linvit.data.sources.read import RGB, ImageReader, Stored, name_of, reason_of
from linvit.data.transforms.bands import TIFF
from linvit.data.transforms.decode import header, open_image

CHUNK = 32  # images that a process hands over at once


class ImageFinding(NamedTuple):
    """One image of a split, by its path or row, and why it is bad, or what it is: its kind, (width, height), a hash."""

    split: str
    name: str
    reason: str = ""
    digest: bytes = b""
    kinds: tuple[str, ...] = ()
    size: tuple[int, int] = (0, 0)


class ScanResult:
    """The sums of what was found in all images: how many are of each split and kind, those that are bad, and copies."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.bad: list[ImageFinding] = []
        self.kinds: Counter[str] = Counter()
        self.copies: list[tuple[str, str]] = []
        self._sizes: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[str, str]] = {}  # digest -> split and name of the first

    def add(self, found: ImageFinding) -> None:
        """Counts one image."""
        self.images[found.split] += 1
        if found.reason:
            self.bad.append(found)
            return
        self.kinds.update(found.kinds)
        self._sizes.append(found.size)
        split, name = self._first.setdefault(found.digest, (found.split, found.name))
        if split != found.split:
            self.copies.append((f"{split}: {name}", f"{found.split}: {found.name}"))

    def lines(self) -> list[str]:
        """What kinds of images there are and how large, in lines."""
        sizes = np.array(self._sizes or [(0, 0)]).T
        kinds = ", ".join(f"{name} {count:,}" for name, count in self.kinds.most_common()) or "none"
        return [f"  {'formats':<10}{kinds}"] + [
            f"  {side:<10}{own.min()} to {own.max()}, median {int(np.median(own))}"
            for side, own in zip(("width", "height"), sizes, strict=True)
        ]


class _Rows(Dataset[ImageFinding]):
    """The rows of one split; an image is examined when its row is read."""

    def __init__(self, rows: datasets.Dataset, image: str, split: str, reader: ImageReader) -> None:
        self.rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image, self.split, self.reader = image, split, reader

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ImageFinding:
        stored = self.rows[index][self.image]
        return examine(stored, self.split, name_of(stored, f"row {index}"), self.reader)


def scan(splits: Mapping[str, datasets.Dataset], image: str, reader: ImageReader, workers: int) -> ScanResult:
    """Examines every image, in so many processes besides this one; splits are compared for copies in their order."""
    found = ScanResult()
    with tqdm(total=sum(map(len, splits.values())), unit=" images") as bar:
        for split, rows in splits.items():
            examined = _Rows(rows, image, split, reader)
            for findings in DataLoader(examined, CHUNK, num_workers=workers, collate_fn=list):
                for finding in findings:
                    found.add(finding)
                bar.update(len(findings))
    return found


def examine(stored: Stored, split: str, name: str, reader: ImageReader) -> ImageFinding:
    """Looks at one image with the decoder of training, and at what its file says beyond the pixels."""
    digest = b""
    try:
        data = reader.load(stored)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's about large images and odd metadata
            reader.read({"bytes": data, "path": None}, name)
            if data[:4] in TIFF and reader.bands != RGB:  # PIL may not open it
                kind = header(data)
                kinds: tuple[str, ...] = (f"{kind.format} of {kind.bands} x {kind.dtype}",)
                return ImageFinding(split, name, "", digest, kinds, (kind.width, kind.height))
            with open_image(data) as picture:
                kinds = (f"{picture.format} {picture.mode}",)
                if picture.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
                    kinds += ("turned by EXIF",)
                if getattr(picture, "is_animated", False):
                    kinds += ("of several frames",)
                return ImageFinding(split, name, "", digest, kinds, picture.size)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes PIL raise nearly anything, in reading its frames and tags too
        return ImageFinding(split, name, reason_of(error), digest)
