"""Operations of a network with and without the cores of its attention, counted in one pass on the meta device."""

import math
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from linvit.advice.ceiling import InterceptedAttention


class Counted(NamedTuple):
    """FLOPs of matrix products and convolutions of one image's forward pass.

    Attributes:
        cores: Of `q k^T` and of the weights times v, in all layers.
        others: Of all other parts of the network.
        tokens: Queries of the layer that has most, windows and images together.
        layers: Cores that were counted.
        intercepted: Those of them that are calls of torch's SDPA.
    """

    cores: int
    others: int
    tokens: int
    layers: int
    intercepted: int

    @property
    def bound(self) -> float:
        """`1 + cores / others`: how many times as fast the network is without them if time goes with FLOPs.

        `1 + N / (6 C)` for the blocks of a plain ViT with MLPs of ratio 4. It has no noise and does not bound the time:
        where softmax is written out, memory decides.
        """
        return 1 + self.cores / self.others


def count(network: nn.Module, size: tuple[int, int], in_chans: int = 3, device: str = "meta") -> Counted:
    """Counts a network on one image of a size (H, W), and moves it to the device, "meta" or "cpu".

    Cores are those that `linvit.replace_attention` has replaced by `Values`, and calls of torch's SDPA.
    """
    tokens: list[int] = []

    def core(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
        batch, heads, queries, width = q
        tokens.append(batch * queries)
        return 2 * batch * heads * queries * v[2] * (width + v[3])

    ours = torch.ops.linvit.copy_of_values
    counter = FlopCounterMode(display=False, custom_mapping={ours: core})
    network = network.to(device).eval().requires_grad_(False)
    intercepted = InterceptedAttention()
    with torch.no_grad(), counter, intercepted:
        network(torch.zeros(1, in_chans, *size, device=device))
    cores = counter.get_flop_counts()["Global"].get(ours, 0)
    others = max(counter.get_total_flops() - cores, 1)
    return Counted(cores, others, max(tokens, default=0), len(tokens), intercepted.calls)


def square_root_steps(side: int, largest: int, multiple: int) -> list[int]:
    """Returns sides from the network's to the largest in steps of sqrt(2), in multiples such as of the patch."""
    steps = max(0, math.floor(2 * math.log2(largest / side) + 1e-9))
    sides = (max(multiple, round(side * 2 ** (i / 2) / multiple) * multiple) for i in range(steps + 1))
    return list(dict.fromkeys(sides))
