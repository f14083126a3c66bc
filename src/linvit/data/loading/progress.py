"""How far an epoch of training has come, so that a resumed run continues there."""

from typing import Any, NamedTuple


class WorkerTopology(NamedTuple):
    """Who shares the samples of an epoch; `workers` of each rank is 1 where the order does not depend on them."""

    ranks: int
    workers: int
    batch_size: int

    @property
    def step(self) -> int:
        """Samples per step of all ranks."""
        return self.ranks * self.batch_size

    def epoch_samples(self, total: int) -> int:
        """How many of `total` samples an epoch has: whole steps, or one incomplete one if there are fewer."""
        return total // self.step * self.step or total // self.ranks * self.ranks


class EpochProgress(NamedTuple):
    """How many samples of an epoch all ranks together have trained on."""

    epoch: int
    samples: int


class TrainOrder:
    """The order of training samples, of a sampler or a stream, which can be continued in the middle of an epoch.

    `progress` is where the epoch continues that this process resumes; None starts every epoch at its beginning.
    """

    epoch: Any
    total: int
    topology: WorkerTopology
    progress: EpochProgress | None = None

    @property
    def identity(self) -> dict[str, int]:
        """What the order follows from, besides the epoch. Another one cannot continue the epoch."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    @property
    def samples_done(self) -> int:
        """Samples of the current epoch that all ranks had before this process resumed it."""
        return self.progress.samples if self.progress is not None and self.progress.epoch == int(self.epoch) else 0

    @property
    def samples_left(self) -> int:
        """Samples of all ranks in what is left of the epoch."""
        if not self.samples_done:
            return self.topology.epoch_samples(self.total)
        return max(self.total - self.samples_done, 0) // self.topology.step * self.topology.step

    @property
    def batches_done(self) -> int:
        """Batches of each rank in the current epoch that are left out since they had their turn."""
        step = self.topology.step
        return max(self.total // step, 1) - -(-self.samples_left // step)
