"""Images that cannot be decoded: they end the run, or others take their place and they are counted."""

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from filelock import FileLock
from torch.utils.data import get_worker_info

from linvit.data.loading.sampler import sample_seed
from linvit.data.sources.read import BadImageError
from linvit.errors import UserError, check_choice
from linvit.plain_text import CsvWriter, cell_of

ALWAYS_ALLOWED = 5  # images that any max_fraction above 0 allows to skip: one image is much of a small set
ATTEMPTS = 100  # replacements in a row that are tried before the data itself must be at fault
Policy = Literal["raise", "skip"]


class BadImages:
    """Refuses or replaces images that cannot be decoded, and counts them, at most a fraction of the set's.

    Each loader process counts in a tensor row of its own, in memory that all of them see. Every rank counts its own.
    """

    def __init__(self, policy: Policy, max_fraction: float = 0.0, num_workers: int = 0) -> None:
        check_choice("bad_images", policy, get_args(Policy))
        if not 0 <= max_fraction <= 1:
            raise UserError(f"max_bad_fraction must lie between 0 and 1, such as 0.001; got {max_fraction}")
        self.policy = policy
        self.max_fraction = max_fraction
        self.report: Path | None = None
        self.met = torch.zeros(num_workers + 1, dtype=torch.int64).share_memory_()  # how often a bad image was read
        self.start(0)
        self._reported = 0

    def start(self, images: int) -> None:
        """Starts counting again for a set of so many images."""
        self.images = images
        self.allowed = self.allowed_of(images)
        self.rows = torch.full((len(self.met), self.allowed + 1), -1).share_memory_()  # of each process, -1 for none

    def allowed_of(self, total: int) -> int:
        """How many of so many may be skipped."""
        return max(ALWAYS_ALLOWED if self.max_fraction else 0, math.floor(self.max_fraction * total))

    def record(self, bad: BadImageError, row: int) -> None:
        """Counts a bad image and writes it to the report."""
        if self.policy == "raise":
            raise UserError(f"image {bad.name} cannot be decoded: {bad.reason}. Replace or remove it") from bad
        self.met[_process()] += 1
        self._write(bad)
        if not (self.rows == row).any():
            mine = self.rows[_process()]
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
        """Returns how often this rank read a bad image since the last call."""
        before, self._reported = self._reported, int(self.met.sum())
        return self._reported - before

    def sample_or_other(self, sample: Callable[[int, int], Any], row: int, seed: int, length: int) -> Any:
        """The sample of a row or, after a `BadImageError`, of another of `length` rows that the seed chooses."""
        chosen = row
        for attempt in range(ATTEMPTS):
            try:
                return sample(chosen, seed)
            except BadImageError as error:
                self.record(error, chosen)
                chosen = sample_seed(seed, attempt) % length
        raise UserError(f"none of {ATTEMPTS} images, drawn in place of row {row}, can be decoded")

    def _write(self, bad: BadImageError) -> None:
        """Appends a line unless the file has the name already; the lock keeps other processes away meanwhile."""
        if self.report is None:
            return
        self.report.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.report.with_name(f".{self.report.name}.lock"))
        with lock, self.report.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            known = {line[0] for line in csv.reader(file) if line}
            if cell_of(bad.name) not in known:
                CsvWriter(file).writerows(([] if known else [("image", "reason")]) + [(bad.name, bad.reason)])


def _process() -> int:
    """Returns the row in which this process counts: 0 is the training process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.id + 1
