"""The student: a copy of a trained network with another attention, in all blocks or in those that can take it best."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import nn

from linvit.backbones.replace_attention import replace_attention
from linvit.linearization.distillation import HOSTS, matched_layers
from linvit.registry import Spec


def linearize(
    model: nn.Module, attention: Spec | Sequence[Spec | None], img_size: int | Sequence[int] = 224
) -> nn.Module:
    """Returns a copy of a trained network with another attention and all weights that this attention can use.

    The projections, feed-forward layers, norms, embeddings and the classifier are the network's; the parameters of
    another mechanism are new. The network itself stays as it is, so it can be the teacher of a `Distillation`.

    Args:
        model: A backbone of linvit or timm, or a network with a `backbone`, such as `linvit.create_segmentor` makes.
        attention: One spec, or a list with one per stage or per block; None in a list keeps the attention of a block.
        img_size: Side, or (H, W), that mechanisms with parameters per token are built for, in a timm model that takes
            any size.

    Returns:
        The student, in the mode (training or evaluation) of the model. All its parameters are trainable, also those of
        a frozen model.

    Example:
        >>> teacher = timm.create_model("vit_small_patch14_dinov2", pretrained=True)
        >>> student = linvit.linearize(teacher, "focused")
    """
    student = copy.deepcopy(model).requires_grad_(True)
    replace_attention(getattr(student, "backbone", student), attention, img_size)
    return student


class Conversions:
    """A copy of a trained network in which chosen blocks have another attention, with the same new parameters always.

    `layers` are the names of all attention layers; `blocks` are the numbers of those that the attention would change.
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
        """Returns the network with these blocks converted. It is one network: the next call changes it."""
        for block in self.blocks:
            name = self.layers[block]
            self._network.set_submodule(name, self._choices[name][block in converted])
        return self._network

    def specs(self, converted: Collection[int]) -> list[Spec | None]:
        """Returns the attention of each block, with these converted; None keeps a block's attention."""
        return [self.attention if block in converted else None for block in range(len(self.layers))]


def greedy_order(blocks: Collection[int], error: Callable[[Collection[int]], float]) -> Iterator[int]:
    """Yields blocks in the order of their conversion: next is the one with the least error given those before it.

    JetViT (2026) also searches without training.
    """
    order: list[int] = []
    while left := [block for block in blocks if block not in order]:
        order.append(min(left, key=lambda block: error([*order, block])))
        yield order[-1]
