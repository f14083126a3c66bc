"""Images that cannot be used: found, named, and refused or replaced."""

import csv
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import torch
from filelock import FileLock
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import get_worker_info

from linvit.data.loading.seeds import sample_seed
from linvit.data.transforms.decode import decode
from linvit.errors import UserError, check_choice

ALWAYS_ALLOWED = 5  # images that any max_fraction above 0 allows to skip: one image is much of a small set
ATTEMPTS = 100  # replacements in a row that are tried before the data itself must be at fault
MAX_ASPECT = 200  # a strip that is thinner would fill the memory when its short side is resized
MAX_PIXELS = 89_478_485  # from here on PIL warns of decompression bombs: a quarter of a gigabyte as RGB
Policy = Literal["raise", "skip"]
Stored = dict[str, Any] | None
"""An undecoded image: {"bytes": ..., "path": ...}, either of which may be None; or nothing."""


class BadImageError(Exception):
    """An image that cannot be decoded, or is too large.

    Args:
        name: Its path, or where it is stored.
        reason: What is wrong with it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name = name
        self.reason = reason


class BadImages:
    """What becomes of bad images, how many there are, and how often one was met.

    With several loader processes each counts in a place of its own that all can see. Every rank keeps its own account.

    Args:
        policy: raise ends the run at the first one; skip puts another image in its place.
        max_fraction: Largest fraction of the set's images that may be skipped; beyond it the run ends.
        max_pixels: An image with more is refused before it is decoded.
        num_workers: Loader processes.
    """

    def __init__(
        self, policy: Policy, max_fraction: float = 0.0, max_pixels: int = MAX_PIXELS, num_workers: int = 0
    ) -> None:
        check_choice("bad_images", policy, ["raise", "skip"])
        if not 0 <= max_fraction <= 1:
            raise UserError(f"max_bad_fraction must lie between 0 and 1, such as 0.001; got {max_fraction}")
        if max_pixels < 1 or max_pixels > 2 * MAX_PIXELS:
            raise UserError(f"max_pixels must lie between 1 and {2 * MAX_PIXELS}, where PIL refuses; got {max_pixels}")
        self.policy = policy
        self.max_fraction = max_fraction
        self.max_pixels = max_pixels
        self.report: Path | None = None
        self.met = torch.zeros(num_workers + 1, dtype=torch.int64).share_memory_()  # how often a bad image came
        self.expect(0)
        self._told = 0

    def expect(self, images: int) -> None:
        """Says of how many images the set is; begins the account of those that are bad anew."""
        self.images = images
        self.allowed = max(ALWAYS_ALLOWED if self.max_fraction else 0, math.floor(self.max_fraction * images))
        self.rows = torch.full((len(self.met), self.allowed + 1), -1).share_memory_()  # of each process, -1 for none

    def refuse(self, bad: BadImageError, row: int) -> None:
        """Names a bad image in the report, if the policy and max_fraction allow to go on.

        Raises:
            UserError: If they do not.
        """
        if self.policy == "raise":
            raise UserError(f"image {bad.name} cannot be decoded: {bad.reason}. Replace or remove it") from bad
        self.met[_place()] += 1
        self._write(bad)
        if not (self.rows == row).any():
            mine = self.rows[_place()]
            mine[int((mine >= 0).sum())] = row
        different = len(self.rows[self.rows >= 0].unique())
        if different > self.allowed:
            listed = f" They are listed in '{self.report}'." if self.report else ""
            raise UserError(
                f"{different} of the {self.images} training images cannot be decoded, and more may follow; the last "
                f"is {bad.name} ({bad.reason}). At most {self.allowed} are skipped "
                f"(--data.max_bad_fraction={self.max_fraction}).{listed} Replace or remove them (linvit data check "
                f"PATH finds them all), or raise the fraction"
            ) from bad

    def since_last(self) -> int:
        """How often this rank met a bad image since this was last asked."""
        before, self._told = self._told, int(self.met.sum())
        return self._told - before

    def first_good(self, sample: Callable[[int, int], Any], row: int, seed: int, length: int) -> Any:
        """The sample of a row, or of one that the seed chooses in its place.

        Args:
            sample: Row and seed to a sample; raises `BadImageError`.
            row: Of the table.
            seed: The sample's seed.
            length: Rows of the table.

        Raises:
            UserError: If the image is bad and policy or max_fraction forbid to go on.
        """
        chosen = row
        for attempt in range(ATTEMPTS):
            try:
                return sample(chosen, seed)
            except BadImageError as error:
                self.refuse(error, chosen)
                chosen = sample_seed(seed, attempt) % length
        raise UserError(f"none of {ATTEMPTS} images, drawn in place of row {row}, can be decoded")

    def _write(self, bad: BadImageError) -> None:
        """Appends a line unless the file has the name already; the lock keeps other processes away meanwhile."""
        if self.report is None:
            return
        self.report.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.report.with_name(f".{self.report.name}.lock"))
        with lock, self.report.open("a+", newline="") as file:
            file.seek(0)
            known = {line[0] for line in csv.reader(file) if line}
            if bad.name not in known:
                csv.writer(file).writerows(([] if known else [("image", "reason")]) + [(bad.name, bad.reason)])


def name_of(stored: Stored, place: str) -> str:
    """What messages call an image: its path, or where a table stores it ("row 3"), since paths may repeat there."""
    data, path = _parts(stored)
    return path if path and data is None else f"{place} ({path or 'stored in the table'})"


def load(stored: Stored) -> bytes:
    """The file of an image; a path may be an address that fsspec knows.

    Raises:
        OSError: If it cannot be read, is empty, or there is none.
    """
    data, path = _parts(stored)
    if data is None:
        if not path:
            raise OSError("no image: the cell is empty")
        with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file:
            data = file.read()
    if not data:
        raise OSError("an empty file")
    return data


def reason_of(error: Exception) -> str:
    """What an error of loading or decoding says is wrong with the image, in one line."""
    if isinstance(error, BadImageError):
        return error.reason
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    told = error.strerror if isinstance(error, OSError) else None
    return " ".join((told or str(error) or type(error).__name__).split())


def read(stored: Stored, name: str, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Loads and decodes an image to 8-bit RGB (3, H, W).

    Raises:
        BadImageError: If it cannot be read, is no whole image, or is too large or too thin.
    """
    try:
        data = load(stored)
        with Image.open(io.BytesIO(data)) as picture:  # reads no more than the header
            width, height = picture.size
        if width * height > max_pixels:
            raise OSError(f"{width} x {height} pixels are more than the limit, {max_pixels}")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise OSError(f"{width} x {height} pixels: one side is more than {MAX_ASPECT} times the other")
        return decode(data)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files: SyntaxError, struct.error, ...
        raise BadImageError(name, reason_of(error)) from error


def _parts(stored: Stored) -> tuple[bytes | None, str | None]:
    return (stored["bytes"], stored["path"]) if stored else (None, None)


def _place() -> int:
    """Where this process counts: 0 is the training process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.id + 1
