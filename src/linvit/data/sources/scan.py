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

from linvit.data.sources.read import RGB, Stored, load, name_of, read, reason_of
from linvit.data.transforms.bands import TIFF, Bands
from linvit.data.transforms.decode import header, open_image

CHUNK = 32  # images that a process hands over at once


class Finding(NamedTuple):
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
    """The sums of what was found in all images.

    Attributes:
        images: Images of each split.
        bad: Findings that are bad, in the order of the set.
        kinds: Formats and how often.
        modes: Modes and how often.
        turned: Images that EXIF turns.
        animated: Images of several frames.
    """

    def __init__(self) -> None:
        self.images: Counter[str] = Counter()
        self.bad: list[Finding] = []
        self.kinds: Counter[str] = Counter()
        self.modes: Counter[str] = Counter()
        self.turned = 0
        self.animated = 0
        self._sizes: list[tuple[int, int]] = []
        self._first: dict[bytes, tuple[str, str]] = {}  # digest -> split and name of the first
        self.copies: list[tuple[str, str]] = []

    def add(self, found: Finding) -> None:
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

    def sizes(self) -> np.ndarray:
        """Smallest, median and largest (rows) width and height (columns), int (3, 2); zeros without images."""
        sizes = np.array(self._sizes or [(0, 0)])
        return np.stack([sizes.min(0), np.median(sizes, 0).astype(int), sizes.max(0)])


class _Rows(Dataset[Finding]):
    """The rows of one split; an image is examined when its row is read."""

    def __init__(
        self, rows: datasets.Dataset, image: str, split: str, max_pixels: int, on_hub: bool, bands: Bands
    ) -> None:
        self.rows = rows.select_columns([image]).cast_column(image, datasets.Image(decode=False))
        self.image = image
        self.split = split
        self.max_pixels = max_pixels
        self.on_hub = on_hub
        self.bands = bands

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Finding:
        stored = self.rows[index][self.image]
        return examine(stored, self.split, name_of(stored, f"row {index}"), self.max_pixels, self.on_hub, self.bands)


def scan(
    splits: Mapping[str, datasets.Dataset],
    image: str,
    max_pixels: int,
    workers: int,
    progress: bool = True,
    on_hub: bool = False,
    bands: Bands = RGB,
) -> ScanResult:
    """Examines every image, in several processes.

    Args:
        splits: Tables; those that are compared for copies come in this order.
        image: Column of the images.
        max_pixels: An image with more is bad.
        workers: Processes besides this one; 0 does everything here.
        progress: Whether to show a bar.
        on_hub: Whether the tables are of the hub, where their images may lie, too.
        bands: What is taken of an image.
    """
    found = ScanResult()
    with tqdm(total=sum(map(len, splits.values())), unit=" images", disable=not progress) as bar:
        for split, rows in splits.items():
            examined = _Rows(rows, image, split, max_pixels, on_hub, bands)
            loader: Iterable[list[Finding]] = DataLoader(examined, CHUNK, num_workers=workers, collate_fn=list)
            for findings in loader:
                for finding in findings:
                    found.add(finding)
                bar.update(len(findings))
    return found


def examine(
    stored: Stored, split: str, name: str, max_pixels: int, on_hub: bool = False, bands: Bands = RGB
) -> Finding:
    """Looks at one image with the decoder of training, and at what its file says beyond the pixels."""
    digest = b""
    try:
        data = load(stored, max_pixels, on_hub)
        digest = hashlib.blake2b(data, digest_size=16).digest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL's about large images and odd metadata
            read({"bytes": data, "path": None}, name, max_pixels, bands=bands)
            if data[:4] in TIFF and bands != RGB:  # PIL may not open it
                kind = header(data)
                mode = f"{kind.bands} x {kind.dtype}"
                return Finding(split, name, "", digest, kind.format, mode, kind.width, kind.height)
            with open_image(data) as picture:
                turned = picture.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1)
                animated = getattr(picture, "is_animated", False)
                named = picture.format or "", picture.mode
                return Finding(split, name, "", digest, *named, *picture.size, turned, animated)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file makes PIL raise nearly anything, in reading its frames and tags too
        return Finding(split, name, reason_of(error), digest)
