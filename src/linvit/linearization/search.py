"""Which blocks of a trained network can take another attention, found without training (JetViT, 2026)."""

from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

from linvit.linearization.distillation import HOSTS, matched_layers
from linvit.linearization.student import linearize
from linvit.registry import Spec


class Conversions:
    """A copy of a trained network in which chosen blocks have another attention, and the others that of the teacher.

    New parameters have initial values, and the same ones whichever blocks are chosen.

    Args:
        teacher: The trained network, whose attention layers the copy shares. It is put into evaluation mode.
        attention: What replaces its attention.
        img_size: As in `linvit.linearize`.

    Attributes:
        layers: Names of the attention layers, in order: an attention list with one spec per block has their specs.
        blocks: Numbers of those that the attention would change.
    """

    def __init__(self, teacher: nn.Module, attention: Spec, img_size: int | Sequence[int] = 224) -> None:
        self.attention = attention
        self._network = linearize(teacher.eval(), attention, img_size)
        inside = "backbone." if hasattr(teacher, "backbone") else ""
        hosts = ((name, layer) for name, layer in self._network.named_modules() if isinstance(layer, HOSTS))
        self.layers = [name for name, _ in hosts if name.startswith(inside)]
        changed = matched_layers(teacher, self._network)
        self.blocks = [block for block, name in enumerate(self.layers) if name in changed]
        self._choices = {name: (teacher.get_submodule(name), self._network.get_submodule(name)) for name in self.layers}

    def network(self, converted: Collection[int]) -> nn.Module:
        """The network with these blocks converted. It is one network: the next call changes it."""
        for block in self.blocks:
            name = self.layers[block]
            self._network.set_submodule(name, self._choices[name][block in converted])
        return self._network

    def specs(self, converted: Collection[int]) -> list[Spec | None]:
        """The attention of each block, with these converted; None keeps what a block has."""
        return [self.attention if block in converted else None for block in range(len(self.layers))]


def greedy_order(blocks: Collection[int], error: Callable[[Collection[int]], float]) -> Iterator[int]:
    """Yields blocks in the order of their conversion: next is the one with the least error given those before it.

    Args:
        blocks: Their numbers.
        error: Of the network with some of them converted. It is asked n (n + 1) / 2 times for n blocks.
    """
    order: list[int] = []
    while left := [block for block in blocks if block not in order]:
        order.append(min(left, key=lambda block: error([*order, block])))
        yield order[-1]
