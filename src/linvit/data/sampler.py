"""The order of samples: a function of (seed, epoch, rank layout)."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from linvit.data.draws import Draw, keys


class TrainSampler(DistributedSampler[Draw]):
    """Shuffles anew every epoch and deals the samples out to the ranks; every rank gets equally many.

    Repeated augmentation (Hoffer et al. 2020; Touvron et al. 2021) puts each index `repeats` times in a row into the
    shuffled list before it is dealt out, so that the copies land on different ranks, and ends the epoch after as many
    samples as without.

    Args:
        length: Samples of the data set.
        seed: Of the order and of all augmentation.
        rank: This process.
        world_size: Processes.
        repeats: Copies of each sample; 1 is plain shuffling.
        batch_size: Samples per step and rank; the epoch is cut to whole batches. 0 does not cut.
    """

    def __init__(
        self, length: int, seed: int, rank: int = 0, world_size: int = 1, repeats: int = 1, batch_size: int = 0
    ) -> None:
        self.length = length
        self.seed = seed
        self.rank = rank
        self.num_replicas = world_size
        self.repeats = repeats
        self.epoch = 0
        share = length // world_size
        whole = share // batch_size * batch_size if batch_size else share
        self.num_samples = whole or share  # a set smaller than a batch is one incomplete batch

    def __iter__(self) -> Iterator[Draw]:
        """This rank's samples of the epoch."""
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.length)
        needed = self.num_samples * self.num_replicas
        dealt = np.repeat(order[: -(-needed // self.repeats)], self.repeats)[:needed]
        copy = np.arange(needed) % self.repeats
        mine = slice(self.rank, None, self.num_replicas)
        drawn = keys(dealt[mine] * self.repeats + copy[mine], self.seed, self.epoch)
        return (Draw(int(row), int(key)) for row, key in zip(dealt[mine], drawn, strict=True))

    def __len__(self) -> int:
        return self.num_samples


class EvalSampler(DistributedSampler[Draw]):
    """All samples in order, dealt out to the ranks without padding: none twice, so ranks may differ by one.

    Args:
        length: Samples of the data set.
        rank: This process.
        world_size: Processes.
    """

    def __init__(self, length: int, rank: int = 0, world_size: int = 1) -> None:
        self.mine = range(rank, length, world_size)
        self.epoch = 0

    def __iter__(self) -> Iterator[Draw]:
        """This rank's samples."""
        return (Draw(row, 0) for row in self.mine)

    def __len__(self) -> int:
        return len(self.mine)
