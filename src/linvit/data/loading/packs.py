"""Batches of images of several sizes by their number of tokens: the schedule of an epoch, a function of its seed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from linvit.data.loading.sampler import (
    EvalSampler,
    SeededIndex,
    TrainSampler,
    WorkerTopology,
    check_enough_samples,
    sample_seeds,
)
from linvit.errors import UserError

OPEN = 16  # packs that an image is tried for; the fullest is closed when there would be more


class Pack(NamedTuple):
    """The images of one batch, and its number of images over the mean of the epoch, by which its loss is weighted."""

    uses: tuple[SeededIndex, ...]
    weight: float = 1.0


def first_fit(lengths: np.ndarray, order: np.ndarray, budget: int) -> list[list[int]]:
    """Puts rows, in an order, each into the first open pack that has room; packs have at most `budget` tokens."""
    done: list[list[int]] = []
    packs: list[list[int]] = []
    rooms: list[int] = []
    for row, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = next((i for i, room in enumerate(rooms) if room >= length), None)
        if at is None:
            if len(packs) == OPEN:
                fullest = rooms.index(min(rooms))
                done.append(packs.pop(fullest))
                rooms.pop(fullest)
            at = len(packs)
            packs.append([])
            rooms.append(budget)
        packs[at].append(row)
        rooms[at] -= length
    return done + packs


class PackSampler(TrainSampler):
    """Shuffles images of given `lengths`, in tokens, into packs of at most `budget` tokens, again in every epoch.

    The schedule follows from (seed, epoch, ranks). Every epoch has the same number of packs, a multiple of the ranks,
    and every image once: if packs are missing, those with most images are halved. Only if packs hold single images,
    because nearly all are larger than half a budget, up to ranks - 1 images wait for another epoch. Packs of a step,
    one for each rank, have about equally many tokens. Progress is counted in packs.
    """

    def __init__(self, lengths: np.ndarray, budget: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        check_enough_samples(len(lengths), world_size)
        self.lengths, self.budget = lengths, budget
        needed = len(self._shuffled(np.random.default_rng([seed, 0])))
        total = min(-(-(needed + needed // 200 + 1) // world_size), len(lengths) // world_size) * world_size
        super().__init__(total, seed, rank, world_size)
        self.topology = WorkerTopology(world_size, 1, 1)
        self.mean_images = len(lengths) / self.total

    def packs(self) -> list[list[int]]:
        """Returns the packs of rows of the current epoch, for all ranks in turn."""
        rng = np.random.default_rng([self.seed, self.epoch])
        packs = self._shuffled(rng)
        for other in (rng, rng, rng, np.random.default_rng([self.seed, 0])):  # the last needs no more than `total`
            packs = self._shuffled(other) if len(packs) > self.total else packs
        while len(packs) < self.total:
            rows = sorted(packs.pop(packs.index(max(packs, key=len))), key=self.lengths.__getitem__)
            packs += [rows[::2], rows[1::2]]
        kept = [packs[i] for i in rng.permutation(len(packs))[: self.total]]
        kept.sort(key=lambda pack: int(self.lengths[pack].sum()))
        ranks = self.topology.ranks
        return [kept[step * ranks + rank] for step in rng.permutation(self.total // ranks) for rank in range(ranks)]

    def _shuffled(self, rng: np.random.Generator) -> list[list[int]]:
        return first_fit(self.lengths, rng.permutation(len(self.lengths)), self.budget)

    def __iter__(self) -> Iterator[Any]:
        """Yields the packs of this rank in the current epoch; after a resume, the remaining ones."""
        packs, start = self.packs(), self.samples_done
        mean = sum(map(len, packs)) / len(packs)
        for place in range(start + self.rank, start + self.samples_left, self.topology.ranks):
            rows = packs[place]
            seeds = sample_seeds(np.array(rows), self.seed, self.epoch).tolist()
            yield Pack(tuple(map(SeededIndex, rows, seeds)), len(rows) / mean)

    @property
    def identity(self) -> dict[str, int | str]:
        """Values that determine the order besides the epoch."""
        tokens = {"images": len(self.lengths), "tokens": int(self.lengths.sum()), "token_budget": self.budget}
        return {**super().identity, **tokens, "ranks": self.topology.ranks}


class EvalPackSampler(EvalSampler):
    """Distributes all images in order over the ranks, each image once, in packs of at most `budget` tokens."""

    def __init__(self, lengths: np.ndarray, budget: int, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(len(lengths), rank, world_size)
        self.packs: list[list[int]] = [[]]
        tokens = 0
        for row in self.indices:
            if self.packs[-1] and tokens + lengths[row] > budget:
                self.packs.append([])
                tokens = 0
            self.packs[-1].append(row)
            tokens += int(lengths[row])

    def __iter__(self) -> Iterator[Any]:
        """Yields the packs of this rank; the seeds are 0."""
        return (Pack(tuple(SeededIndex(row, 0) for row in pack)) for pack in self.packs)

    def __len__(self) -> int:
        return len(self.packs)


class Packs(Dataset[Any]):
    """The samples of packs of images; a single index is a pack of one."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, pack: Pack | int) -> tuple[list[Any], float]:
        """Makes the samples of a pack, and its weight."""
        uses, weight = pack if isinstance(pack, Pack) else ((pack,), 1.0)
        return [self.images[use] for use in uses], weight


def collate_pack(collate: Callable[[Sequence[Any]], Any], packs: Sequence[tuple[list[Any], float]]) -> dict[str, Any]:
    """Makes a batch from its only pack, whose weight becomes `loss_weight`."""
    ((samples, weight),) = packs
    return {**collate(samples), "loss_weight": weight}


def check_lengths(lengths: np.ndarray, budget: int) -> None:
    """Raises a `UserError` if an image has more tokens than a batch may have."""
    longest = int(lengths.max(initial=0))
    if longest > budget:
        raise UserError(
            f"an image has {longest} tokens, more than token_budget={budget} allows a whole batch; set "
            f"--data.max_tokens={budget} or less, which shrinks such images, or raise --data.token_budget"
        )
