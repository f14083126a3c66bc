"""The order of samples: a function of (seed, epoch, rank layout); their seeds: of (seed, epoch, index) alone.

No global generator is read or seeded, so neither the number of workers nor the order of loading nor other code that
draws random numbers changes anything.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from linvit.errors import UserError


class SeededIndex(NamedTuple):
    """One use of the sample of a row; all of its augmentation follows from the seed, 63 bits."""

    row: int
    seed: int


def sample_seed(*parts: int) -> int:
    """Returns 63 bits that look independent for different parts; callers always give the same number of parts."""
    state = np.random.SeedSequence(parts).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def sample_seeds(indices: np.ndarray, *parts: int) -> np.ndarray:
    """Seeds for many indices at once, int64 (n,): two rounds of SplitMix64 (Steele et al. 2014) from one base."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(indices.astype(np.uint64) + np.uint64(sample_seed(*parts))))
    return (mixed >> np.uint64(1)).astype(np.int64)


def generator(seed: int) -> np.random.Generator:
    """Returns a random generator for one sample on the CPU."""
    return np.random.Generator(np.random.PCG64(seed))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Returns the finaliser of SplitMix64 on uint64."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


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
        """Returns how many of `total` samples an epoch has: whole steps, or one incomplete step if there are fewer."""
        return total // self.step * self.step or total // self.ranks * self.ranks


class EpochProgress(NamedTuple):
    """Number of samples of an epoch that all ranks together have trained on."""

    epoch: int
    samples: int


class TrainOrder:
    """The order of training samples, of a sampler or a stream, which can be continued in the middle of an epoch."""

    epoch: Any
    total: int
    topology: WorkerTopology
    progress: EpochProgress | None = None  # where the epoch continues that this process resumes; None is no such

    @property
    def identity(self) -> dict[str, int | str]:
        """Values that determine the order besides the epoch; an epoch is resumed only if they are equal."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of the next pass."""
        self.epoch = epoch

    @property
    def samples_done(self) -> int:
        """Samples of the current epoch that all ranks were trained on before this process resumed it."""
        return self.progress.samples if self.progress is not None and self.progress.epoch == int(self.epoch) else 0

    @property
    def samples_left(self) -> int:
        """Number of remaining samples of the epoch, over all ranks."""
        if not self.samples_done:
            return self.topology.epoch_samples(self.total)
        return max(self.total - self.samples_done, 0) // self.topology.step * self.topology.step

    @property
    def batches_done(self) -> int:
        """Batches of each rank in the current epoch that are skipped, since they were trained on before."""
        step = self.topology.step
        return max(self.total // step, 1) - -(-self.samples_left // step)


class TrainSampler(TrainOrder, DistributedSampler[SeededIndex]):
    """Shuffles the samples again in every epoch and distributes them over the ranks; every rank gets equally many.

    Repeated augmentation (Hoffer et al. 2020; Touvron et al. 2021) puts each index `repeated_aug` times in a row into
    the shuffled list before it is distributed, so that the copies land on different ranks, and ends the epoch after as
    many samples as without. It is cut to whole batches, unless a rank has less than one.

    With `groups`, int (total,), all samples of a step, on all ranks, are of one group; the remainder forms mixed steps.

    It is a `DistributedSampler` so that Lightning leaves it in place and sets its epoch.
    """

    def __init__(
        self,
        total: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        repeated_aug: int = 1,
        batch_size: int = 1,
        groups: np.ndarray | None = None,
    ) -> None:
        check_enough_samples(total, world_size)
        self.total = total
        self.seed = seed
        self.rank = rank
        self.repeated_aug = repeated_aug
        self.groups = groups
        self.epoch = 0
        self.topology = WorkerTopology(world_size, 1, batch_size)

    def __iter__(self) -> Iterator[SeededIndex]:
        """Yields the samples of this rank in the current epoch; after a resume, the remaining ones."""
        start, ranks = self.samples_done, self.topology.ranks
        places = np.arange(start + self.rank, start + self.samples_left, ranks)
        uses = self.order()[places]
        seeds = sample_seeds(uses, self.seed, self.epoch)
        rows = uses // self.repeated_aug
        return (SeededIndex(row, seed) for row, seed in zip(rows.tolist(), seeds.tolist(), strict=True))

    def order(self) -> np.ndarray:
        """Returns the order of the epoch over all ranks; each entry is row x copies + copy."""
        rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.total)
        copies = np.arange(self.repeated_aug)
        uses: np.ndarray = (rows[: -(-self.total // self.repeated_aug), None] * self.repeated_aug + copies).ravel()
        uses, step = uses[: self.total], self.topology.step
        if self.groups is None:
            return uses
        rng = np.random.default_rng([self.seed, self.epoch, 0])
        groups = self.groups[uses // self.repeated_aug]
        parts = [uses[groups == group] for group in np.unique(groups)]
        whole = [len(part) // step * step for part in parts]
        rest = rng.permutation(np.concatenate([part[end:] for part, end in zip(parts, whole, strict=True)]))
        mixed = len(rest) // step * step
        full = np.concatenate([*(part[:end] for part, end in zip(parts, whole, strict=True)), rest[:mixed]])
        return np.concatenate([rng.permutation(full.reshape(-1, step)).ravel(), rest[mixed:]])

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.topology.epoch_samples(self.total) // self.topology.ranks

    @property
    def identity(self) -> dict[str, int | str]:
        """Values that determine the order besides the epoch; with groups also the ranks and the batch size."""
        own: dict[str, int | str] = {"samples": self.total, "seed": self.seed, "repeated_aug": self.repeated_aug}
        if self.groups is None:
            return own
        counts = {f"group {group}": int(count) for group, count in enumerate(np.bincount(self.groups))}
        return own | counts | self.topology._asdict()


class EvalSampler(DistributedSampler[SeededIndex]):
    """Distributes all samples in order over the ranks, each once, without padding; ranks may differ by one sample."""

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        check_enough_samples(length, world_size)
        self.indices = range(rank, length, world_size)

    def __iter__(self) -> Iterator[SeededIndex]:
        """Yields the samples of this rank, with the seed 0."""
        return (SeededIndex(row, 0) for row in self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def check_enough_samples(length: int, world_size: int) -> None:
    """Raises a `UserError` if some of the ranks would get no sample."""
    if length < world_size:
        raise UserError(f"{length} images cannot be shared by {world_size} devices; lower --trainer.devices")


def check_equal_batches(length: int | None, world_size: int, batch_size: int) -> None:
    """Raises a `UserError` if one rank would evaluate a batch more than another: FSDP would wait for ever."""
    if world_size == 1:
        return
    way = "use --trainer.strategy=ddp, or another number of --trainer.devices"
    if length is None:
        raise UserError(f"FSDP needs to know how many samples each rank evaluates, which a stream does not say; {way}")
    low, high = length // world_size, -(-length // world_size)
    if -(-low // batch_size) != -(-high // batch_size):
        raise UserError(
            f"of {world_size} devices some would evaluate a batch more than others ({length} samples in batches of "
            f"{batch_size}), for which FSDP waits for ever; set another --data.batch_size, or {way}"
        )
