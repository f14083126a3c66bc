"""Images that cannot be used: found, named, and refused or replaced."""

import csv
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import fsspec
import torch
from filelock import FileLock
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import get_worker_info

from linvit.data.decode import decode
from linvit.data.draws import key
from linvit.errors import UserError, check_choice

FLOOR = 5  # bad images that a budget above 0 always allows: at the start of a run one image is a large share
ATTEMPTS = 100  # replacements in a row that are tried before the data itself must be at fault
MAX_PIXELS = 89_478_485  # from here on PIL warns of decompression bombs: a quarter of a gigabyte as RGB
Policy = Literal["raise", "skip"]


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
    """What becomes of bad images, and how many there were.

    With several loader processes each counts in a place of its own that all can see. Every rank keeps its own account.

    Args:
        policy: raise ends the run at the first one; skip puts another image in its place.
        budget: Largest share of the images so far that may be skipped; beyond it the run ends.
        max_pixels: An image with more is refused before it is decoded.
        num_workers: Loader processes.
    """

    def __init__(self, policy: Policy, budget: float = 0.0, max_pixels: int = MAX_PIXELS, num_workers: int = 0) -> None:
        check_choice("bad_images", policy, ["raise", "skip"])
        if not 0 <= budget <= 1:
            raise UserError(f"bad_budget must lie between 0 and 1, such as 0.001; got {budget}")
        if max_pixels < 1 or max_pixels > 2 * MAX_PIXELS:
            raise UserError(f"max_pixels must lie between 1 and {2 * MAX_PIXELS}, where PIL refuses; got {max_pixels}")
        self.policy = policy
        self.budget = budget
        self.max_pixels = max_pixels
        self.report: Path | None = None
        self.counts = torch.zeros(num_workers + 1, 2, dtype=torch.int64).share_memory_()  # good, bad
        self._told = 0

    def count(self) -> None:
        """Counts a good image, if there is a budget to keep."""
        if self.policy == "skip":
            self.counts[_place(), 0] += 1

    def refuse(self, bad: BadImageError) -> None:
        """Names a bad image in the report, if the policy and the budget allow to go on.

        Raises:
            UserError: If they do not.
        """
        if self.policy == "raise":
            raise UserError(f"image {bad.name} cannot be decoded: {bad.reason}. Replace or remove it") from bad
        self.counts[_place(), 1] += 1
        self._write(bad)
        skipped = self.skipped
        total = int(self.counts.sum())
        if skipped > max(FLOOR if self.budget else 0, self.budget * total):
            listed = f" They are listed in '{self.report}'." if self.report else ""
            raise UserError(
                f"{skipped} of {total} training images so far cannot be decoded, the last of them {bad.name} "
                f"({bad.reason}); at most a share of {self.budget} is skipped (--data.bad_budget).{listed} Replace or "
                f"remove them (linvit data check PATH finds them all), or raise the budget"
            ) from bad

    @property
    def skipped(self) -> int:
        """Bad images of this rank since the start."""
        return int(self.counts[:, 1].sum())

    def since_last(self) -> int:
        """Bad images of this rank since this was last asked."""
        before, self._told = self._told, self.skipped
        return self._told - before

    def first_good(self, sample: Callable[[int, int], Any], row: int, draw: int, length: int) -> Any:
        """The sample of a row, or of one that the key chooses in its place.

        Args:
            sample: Row and key to a sample; raises `BadImageError`.
            row: Of the table.
            draw: The sample's key.
            length: Rows of the table.

        Raises:
            UserError: If the image is bad and policy or budget forbid to go on.
        """
        chosen = row
        for attempt in range(ATTEMPTS):
            try:
                good = sample(chosen, draw)
            except BadImageError as error:
                self.refuse(error)
                chosen = key(draw, attempt) % length
            else:
                self.count()
                return good
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


def load(stored: dict[str, Any]) -> bytes:
    """The file of an image, `{"bytes": ..., "path": ...}`; a path may be an address that fsspec knows."""
    data: bytes | None = stored["bytes"]
    if data is None:
        path = stored["path"]
        with fsspec.open(path, "rb") if "://" in path else open(path, "rb") as file:
            data = file.read()
    return data


def read(stored: dict[str, Any], name: str, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Loads and decodes an image, `{"bytes": ..., "path": ...}`, to 8-bit RGB (3, H, W).

    Raises:
        BadImageError: If it cannot be read, is no whole image, or is too large.
    """
    try:
        data = load(stored)
        with Image.open(io.BytesIO(data)) as picture:  # reads no more than the header
            width, height = picture.size
        if width * height > max_pixels:
            raise OSError(f"{width} x {height} pixels are more than the limit, {max_pixels}")
        return decode(data)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise nearly anything on damaged files: SyntaxError, struct.error, ...
        if isinstance(error, UnidentifiedImageError):
            reason = "not an image" if data else "an empty file"
        else:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BadImageError(name, " ".join(str(reason or type(error).__name__).split())) from error


def _place() -> int:
    """Where this process counts: 0 is the training process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.id + 1
