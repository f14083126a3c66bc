"""Costs of hybrids: time or operations of each choice in each block, and the budget that a hybrid may use."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis.operations import count_operations
from linvit.errors import UserError, check_choice, check_number
from linvit.experiments.measure import interleaved
from linvit.image_size import image_size
from linvit.linearization.distillation import kind_of

UNITS = {"latency": "of the teacher's time", "macs": "of the teacher's MACs", "softmax": "blocks that keep softmax"}
TIMING = 20.0  # seconds to measure all blocks


class Budget(NamedTuple):
    """The most that a hybrid may cost.

    Attributes:
        kind: "latency", a share of the teacher's time for one image on this device; "macs", a share of its
            multiply-accumulates; "softmax", a number of blocks that keep the teacher's attention.
        most: The share, or the number.
        size: Image size (H, W) of the costs; None is the size of the images.
    """

    kind: str
    most: float
    size: tuple[int, int] | None = None

    @classmethod
    def read(cls, text: str) -> "Budget":
        """Reads a budget such as `latency=0.6`, `macs=0.6@518` (at 518 x 518 pixels) or `softmax=2`."""
        kind, _, given = text.partition("=")
        number, at, side = given.partition("@")
        check_choice("the budget's kind", kind, UNITS)
        whole = kind == "softmax"
        try:
            if whole and at:
                raise ValueError("a number of blocks has no size")
            most = float(number)
            sides = [int(one) for one in side.split("x")] if at else []
        except ValueError as error:
            way = f"{kind}=2" if whole else f"{kind}=0.6, or {kind}=0.6@518 for a size"
            raise UserError(f"budget '{text}' is not {kind}=NUMBER. Write {way}") from error
        check_number(f"budget {kind}", int(most) if whole and most % 1 == 0 else most, at_least=0, whole=whole)
        return cls(kind, most, image_size(sides[0] if len(sides) == 1 else sides) if sides else None)


class Costs(NamedTuple):
    """Costs of blocks.

    Attributes:
        blocks: The cost of each choice, by block; the first is that of the teacher's attention.
        rest: The cost of all other parts.
    """

    blocks: list[list[float]]
    rest: float

    def of(self, kinds: Sequence[int]) -> float:
        """The cost of a hybrid."""
        return self.rest + sum(own[kind] for own, kind in zip(self.blocks, kinds, strict=True))


@torch.no_grad()
def measure_costs(networks: Sequence[nn.Module], layers: Sequence[str], image: Tensor, kind: str) -> Costs:
    """Measures attention layers on the inputs that they get for an image (1, C, H, W).

    Args:
        networks: The teacher, then students with one choice in all blocks, in evaluation mode.
        layers: Names of the attention layers.
        image: The image, on the device of the networks.
        kind: "latency" or "macs", as in a budget.

    Returns:
        Costs as shares of the teacher's.
    """
    calls, names = dict[Any, tuple[nn.Module, tuple[Any, ...], dict[str, Any]]](), list[list[Any]]()
    for number, network in enumerate(networks):
        names.append([])
        for layer, args, kwargs in inputs_of(network, layers, image):
            given = [one.shape if isinstance(one, Tensor) else one for one in (*args, *kwargs.values())]
            shapes = [one.shape for one in layer.parameters()]
            alike = (number, str([given, shapes, kind_of(layer)]))  # such blocks are measured once
            calls.setdefault(alike, (layer, args, kwargs))
            names[-1].append(alike)
    calls["all"] = networks[0], (image,), {}
    if kind == "macs":
        values = {
            name: float(count_operations(one, *args, **kwargs).matmul) for name, (one, args, kwargs) in calls.items()
        }
    else:
        works = {name: partial(one, *args, **kwargs) for name, (one, args, kwargs) in calls.items()}
        alone = image.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        timings = interleaved(works, budget=TIMING, device=image.device, clock=clock)
        values = {name: timing.median for name, timing in timings.items()}
    total = values["all"]
    blocks = [[values[own[block]] / total for own in names] for block in range(len(layers))]
    return Costs(blocks, 1.0 - sum(own[0] for own in blocks))


@torch.no_grad()
def inputs_of(
    network: nn.Module, layers: Sequence[str], images: Tensor
) -> list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Attention layers and their arguments in a forward pass."""
    found: dict[nn.Module, Any] = {}

    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[layer] = layer, args, kwargs

    modules = [network.get_submodule(name) for name in layers]
    hooks = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in modules]
    call(network, images)
    for hook in hooks:
        hook.remove()
    return [found[layer] for layer in modules]


def call(network: Any, images: Tensor) -> None:
    """Calls a network, without the head of a dense task."""
    (network.feature_maps if hasattr(network, "feature_maps") else network)(images)
