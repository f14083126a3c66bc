"""Looks at every image of a set: what it is, whether it can be decoded, whether it is there twice."""

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
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
    """One image.

    Attributes:
        split: Where it belongs.
        name: Its path, or its row.
        reason: Why it is bad, or "".
        digest: Of the bytes of its file, or b"" if they cannot be read.
        kind: Format, such as JPEG, or "".
        mode: PIL's, such as RGB, or "".
        width: As stored, in pixels; 0 if unknown.
        height: As stored, in pixels; 0 if unknown.
        turned: Whether EXIF says that it is to be turned.
        animated: Whether there are several frames, of which the first is taken.
    """

    split: str
    name: str
    reason: str = ""
    digest: bytes = b""
    kind: str = ""
    mode: str = ""
    width: int = 0
    height: int = 0
    turned: bool = False
    animated: bool = False


class ScanResult:
    """The sums of what was found in all images: how many are of each split, format and mode, and those that are bad."""

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.bad: list[ImageFinding] = []
        self.kinds: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.turned = 0
        self.animated = 0
        self._sizes: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[str, str]] = {}  # digest -> split and name of the first
        self.copies: list[tuple[str, str]] = []

    def add(self, found: ImageFinding) -> None:
        """Counts one image."""
        self.images[found.split] += 1
        if found.reason:
            self.bad.append(found)
            return
        self.kinds[found.kind] += 1
        self.modes[found.mode] += 1
        self.turned += found.turned
        self.animated += found.animated
        self._sizes.append((found.width, found.height))
        split, name = self._first.setdefault(found.digest, (found.split, found.name))
        if split != found.split:
            self.copies.append((f"{split}: {name}", f"{found.split}: {found.name}"))

    def lines(self) -> list[str]:
        """What kinds of images there are and how large, in lines."""
        sizes = np.array(self._sizes or [(0, 0)])
        smallest, median, largest = sizes.min(0), np.median(sizes, 0).astype(int), sizes.max(0)
        lines = [
            f"  {'formats':<10}{_counted(self.kinds)}",
            f"  {'modes':<10}{_counted(self.modes)}",
            *(
                f"  {side:<10}{smallest[i]} to {largest[i]}, median {median[i]}"
                for i, side in enumerate(("width", "height"))
            ),
        ]
        if self.turned:
            lines.append(f"  turned as their EXIF entry says: {self.turned:,}")
        if self.animated:
            lines.append(f"  with several frames, of which the first is taken: {self.animated:,}")
        return lines


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common()) or "none"


class _Rows(Dataset[ImageFinding]):
    """The rows of one split; an image is examined when its row is read."""

    def __init__(self, rows: datasets.Dataset, image: str, split: str, reader: ImageReader) -> None:
        self.rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image = image
        self.split = split
        self.reader = reader

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> ImageFinding:
        stored = self.rows[index][self.image]
        return examine(stored, self.split, name_of(stored, f"row {index}"), self.reader)


def scan(
    splits: Mapping[str, datasets.Dataset], image: str, reader: ImageReader, workers: int, progress: bool = True
) -> ScanResult:
    """Examines every image, in so many processes besides this one; splits are compared for copies in their order."""
    found = ScanResult()
    with tqdm(total=sum(map(len, splits.values())), unit=" images", disable=not progress) as bar:
        for split, rows in splits.items():
            examined = _Rows(rows, image, split, reader)
            loader: Iterable[list[ImageFinding]] = DataLoader(examined, CHUNK, num_workers=workers, collate_fn=list)
            for findings in loader:
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
                mode = f"{kind.bands} x {kind.dtype}"
                return ImageFinding(split, name, "", digest, kind.format, mode, kind.width, kind.height)
            with open_image(data) as picture:
                turned = picture.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
                animated = getattr(picture, "is_animated", False)
                named = picture.format or "", picture.mode
                return ImageFinding(split, name, "", digest, *named, *picture.size, turned, animated)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes PIL raise nearly anything, in reading its frames and tags too
        return ImageFinding(split, name, reason_of(error), digest)
