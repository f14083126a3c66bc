"""The order of samples: a function of (seed, epoch, rank layout)."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from linvit.data.loading.position import Layout, Position, remaining, resumed
from linvit.data.loading.seeds import SeededIndex, sample_seeds
from linvit.errors import UserError


class TrainSampler(DistributedSampler[SeededIndex]):
    """Shuffles the samples anew every epoch and distributes them over the ranks; every rank gets equally many.

    Repeated augmentation (Hoffer et al. 2020; Touvron et al. 2021) puts each index `repeated_aug` times in a row into
    the shuffled list before it is distributed, so that the copies land on different ranks, and ends the epoch after as
    many samples as without.

    It is a `DistributedSampler` so that Lightning leaves it in place and sets its epoch.

    Args:
        length: Samples of the data set.
        seed: Of the order and of all augmentation.
        rank: This process.
        world_size: Processes.
        repeated_aug: Copies of each sample; 1 is plain shuffling.
        batch_size: Samples per step and rank. The epoch is cut to whole batches, unless a rank has less than one.

    Attributes:
        layout: Ranks and batch size.
        position: Where the epoch goes on that this process resumes; None starts every epoch at its beginning.
    """

    def __init__(
        self, length: int, seed: int, rank: int = 0, world_size: int = 1, repeated_aug: int = 1, batch_size: int = 1
    ) -> None:
        check_enough_samples(length, world_size)
        self.length = length
        self.seed = seed
        self.rank = rank
        self.num_replicas = world_size
        self.repeated_aug = repeated_aug
        self.epoch = 0
        self.layout = Layout(world_size, 1, batch_size)
        self.position: Position | None = None

    def __iter__(self) -> Iterator[SeededIndex]:
        """Yields the samples of this rank in the current epoch, those that are left of one that is resumed."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        start, left, done = self._rest()
        places = np.arange(start + self.rank, start + left, self.num_replicas)[done * self.layout.batch_size :]
        rows = order[places // self.repeated_aug]
        seeds = sample_seeds(rows * self.repeated_aug + places % self.repeated_aug, self.seed, self.epoch)
        return (SeededIndex(row, seed) for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True))

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.layout.samples(self.length) // self.num_replicas

    @property
    def identity(self) -> dict[str, int]:
        """What the order follows from, besides the epoch and the layout."""
        return {"samples": self.length, "seed": self.seed, "repeated_aug": self.repeated_aug}

    @property
    def batches_done(self) -> int:
        """Of the batches of this rank in the current epoch, those that are left out because they had their turn."""
        _, left, done = self._rest()
        return self.layout.steps(self.layout.samples(self.length)) - self.layout.steps(left) + done

    def _rest(self) -> tuple[int, int, int]:
        """The place in the epoch at which this layout starts, its samples from there, and its batches so far."""
        phases, done = resumed(self.position, self.epoch, self.layout)
        return *remaining(self.length, phases, self.layout), done


class EvalSampler(DistributedSampler[SeededIndex]):
    """Distributes all samples in order over the ranks, without padding: none comes twice, so ranks may differ by one.

    Args:
        length: Samples of the data set.
        rank: This process.
        world_size: Processes.
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        check_enough_samples(length, world_size)
        self.indices = range(rank, length, world_size)

    def __iter__(self) -> Iterator[SeededIndex]:
        """Yields the samples of this rank, with the seed 0."""
        return (SeededIndex(row, 0) for row in self.indices)

    def __len__(self) -> int:
        return len(self.indices)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the order is always the same."""


def check_enough_samples(length: int, world_size: int) -> None:
    """Raises a `UserError` if some of the ranks would get no sample."""
    if length < world_size:
        raise UserError(f"{length} images cannot be shared by {world_size} devices; lower --trainer.devices")


def check_equal_batches(length: int | None, world_size: int, batch_size: int) -> None:
    """Raises a `UserError` if one rank would evaluate a batch more than another: a sharded model would wait for ever.

    Args:
        length: Samples of the set; None if the files do not say.
        world_size: Processes.
        batch_size: Samples per batch and process.
    """
    if world_size == 1:
        return
    way = "use --trainer.strategy=ddp, or another number of --trainer.devices"
    if length is None:
        raise UserError(f"FSDP needs to know how many samples it evaluates, which these files do not say; {way}")
    low, high = length // world_size, -(-length // world_size)
    if -(-low // batch_size) != -(-high // batch_size):
        raise UserError(
            f"of {world_size} devices some would evaluate a batch more than others ({length} samples in batches of "
            f"{batch_size}), for which FSDP waits for ever; set another --data.batch_size, or {way}"
        )
