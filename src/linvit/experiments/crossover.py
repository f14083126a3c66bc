"""From which image size on a network is faster than another one: time and memory of both at several sizes."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from linvit.errors import UserError
from linvit.experiments.measure import interleaved, out_of_memory, peak_memory

TIMES = (1, 2, 3, 4)  # the sides that are measured, over that of the image
CALLS = 4  # of each network at one size, about
LONGEST = 4.0


class Cost(NamedTuple):
    """Of a forward pass of one square image: side in pixels, seconds, bytes."""

    side: int
    seconds: float
    bytes: int


class Crossover(NamedTuple):
    """From which image size on a student is faster than its teacher, among those that were measured.

    Attributes:
        side: The first side from which on it is, in pixels; None if it is not even at the largest.
        least: The smallest side.
        most: The largest one.
    """

    side: int | None
    least: int
    most: int

    @classmethod
    def of(cls, teacher: Sequence[Cost], student: Sequence[Cost]) -> "Crossover":
        """The crossover of costs at the same sides, the smallest first."""
        sides = [cost.side for cost in teacher]
        slower = [i for i, pair in enumerate(zip(teacher, student, strict=True)) if pair[1].seconds >= pair[0].seconds]
        faster = sides[slower[-1] + 1 if slower else 0 :]
        return cls(faster[0] if faster else None, sides[0], sides[-1])

    def __str__(self) -> str:
        """`64`, or `≤ 32` or `> 128` where it lies outside of what was measured."""
        return f"> {self.most}" if self.side is None else f"{'≤ ' * (self.side == self.least)}{self.side}"

    @property
    def in_words(self) -> str:
        """A sentence."""
        if self.side is None:
            return f"Up to {self.most} pixels the student is not faster."
        return f"The student is faster from {self.side} pixels on{', the smallest size' * (self.side == self.least)}."


@torch.no_grad()
def costs_by_size(
    networks: Mapping[str, nn.Module], image: torch.Tensor, device: torch.device, seconds: float
) -> dict[str, list[Cost]]:
    """Time and memory of networks at the size of an image and at multiples of it.

    Args:
        networks: Images (1, C, H, W) in, by name. They are timed in turns.
        image: (C, H, W).
        device: Where the networks lie.
        seconds: For the timing of all sizes. One that would take `LONGEST` times as long alone is left out, and those
            above it, as is what does not fit into memory or what a network refuses.
    """
    found: dict[str, list[Cost]] = {name: [] for name in networks}
    for times in TIMES:
        images = image[None].repeat(1, 1, times, times).to(device)
        works = {name: partial(network, images) for name, network in networks.items()}
        try:
            timing = interleaved(works, budget=seconds / len(TIMES), least=1, device=device)
            memory = {name: peak_memory(work, device) for name, work in works.items()}
        except Exception as error:
            if times > 1 and (out_of_memory(error) or isinstance(error, AssertionError | UserError)):
                break  # a network that takes one size alone
            raise
        for name in networks:
            found[name].append(Cost(images.shape[-1], timing[name].median, memory[name]))
        growth = ((times + 1) / times) ** 4  # that of softmax: the square of the tokens
        if CALLS * growth * sum(one.median for one in timing.values()) > LONGEST * seconds:
            break
    return found
