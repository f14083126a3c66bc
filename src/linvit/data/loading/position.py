"""How far an epoch of training has come, in a form that another number of ranks or loader processes can go on from."""

from collections.abc import Sequence
from typing import NamedTuple


class Layout(NamedTuple):
    """Who shares the samples of an epoch.

    Attributes:
        ranks: Processes that train.
        workers: Loader processes of each rank, where the order depends on them; otherwise 1.
        batch_size: Samples per step and rank.
    """

    ranks: int
    workers: int
    batch_size: int

    @property
    def step(self) -> int:
        """Samples per step of all ranks."""
        return self.ranks * self.batch_size

    def samples(self, total: int) -> int:
        """How many of `total` samples an epoch has: whole steps, or one incomplete one if there are fewer."""
        per_rank = total // self.ranks
        return (per_rank // self.batch_size * self.batch_size or per_rank) * self.ranks

    def steps(self, samples: int) -> int:
        """The steps that so many samples take."""
        return -(-samples // self.step)

    def rest(self, left: int, total: int) -> int:
        """How many of the `left` samples of an epoch that began in another layout this layout uses.

        All of them, also in an incomplete step; but an epoch has no more steps than one that began in this layout, and
        no rank has a step of one sample, on which BatchNorm may not be able to train, unless all steps are of one.
        """
        left = min(left, self.steps(self.samples(total)) * self.step)
        incomplete = left % self.step
        return left - incomplete if incomplete < 2 * self.ranks else left


class Phase(NamedTuple):
    """A part of an epoch: so many batches of each rank in one layout."""

    layout: Layout
    batches: int


class Position(NamedTuple):
    """What of an epoch was trained on, from its first phase to its last.

    Attributes:
        epoch: Number of the epoch.
        phases: A new one began where a run was resumed in another layout.
    """

    epoch: int
    phases: tuple[Phase, ...]

    @classmethod
    def read(cls, epoch: int, phases: Sequence[Sequence[int]]) -> "Position":
        """From plain numbers, as a checkpoint has them: ranks, workers, batch size and batches of each phase."""
        return cls(epoch, tuple(Phase(Layout(*layout), batches) for *layout, batches in phases))

    def plain(self) -> list[list[int]]:
        """The phases as plain numbers."""
        return [[*phase.layout, phase.batches] for phase in self.phases]


def resumed(position: Position | None, epoch: int, layout: Layout) -> tuple[tuple[Phase, ...], int]:
    """The phases of an epoch before the present one, and the batches that this one had already in another process.

    Args:
        position: Where this process was resumed, if it was.
        epoch: The present one.
        layout: The present one.
    """
    if position is None or position.epoch != epoch or not position.phases:
        return (), 0
    *before, last = position.phases
    return (tuple(before), last.batches) if last.layout == layout else (position.phases, 0)


def remaining(total: int, phases: Sequence[Phase], layout: Layout) -> tuple[int, int]:
    """How many of the epoch's samples the phases before had, and how many are left for one in the given layout.

    Args:
        total: Samples of the data set.
        phases: Those before.
        layout: Of the phase that follows.
    """
    had, left = 0, (phases[0].layout if phases else layout).samples(total)
    for before, batches in phases:
        left = before.rest(left, total)
        done = min(batches * before.step, left)
        had, left = had + done, left - done
    return had, layout.rest(left, total)
