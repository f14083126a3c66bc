"""From which size on a network costs less than another one, and how costs grow with the size."""

import math
from collections.abc import Iterable, Mapping
from functools import partial
from statistics import linear_regression
from typing import Any

import torch
from torch import Tensor, nn

from linvit.experiments.bench.costs import Cost, measure_costs
from linvit.experiments.bench.runner import Candidate, Settings

TIMES = (1, 2, 3, 4)  # the sides that are measured, over that of the image
CALLS = 6  # of each network at one size, about
LONGEST = 6.0


def costs_by_size(networks: Mapping[str, nn.Module], image: Tensor, device: torch.device, seconds: float) -> list[Cost]:
    """Time and memory of a forward pass of one image (C, H, W), and of multiples of its size, by the width in pixels.

    The seconds are for the timing of all sizes. One that would take `LONGEST` times as long alone is left out, and
    those above it, as is what does not fit into memory or what a network refuses.
    """
    found: list[Cost] = []
    for times in TIMES:
        images = image[None].repeat(1, 1, times, times).to(device)
        height, width = images.shape[-2:]
        build = {name: partial(_with_images, network, images) for name, network in networks.items()}
        candidates = [Candidate(name, (height, width), own) for name, own in build.items()]
        costs, _ = measure_costs(candidates, Settings(str(device), backward=False), budget=seconds / len(TIMES))
        if not all(cost.seconds for cost in costs):
            break
        found += costs
        growth = ((times + 1) / times) ** 4  # that of softmax: the square of the tokens
        if CALLS * growth * sum(cost.seconds["forward"].median for cost in costs) > LONGEST * seconds:
            break
    return found


def _with_images(network: nn.Module, images: Tensor, _: Any) -> tuple[nn.Module, tuple[Tensor], dict[str, Any]]:
    return network, (images,), {}


def times_of(costs: Iterable[Cost], name: str) -> dict[float, float]:
    """The seconds of one network's forward pass by size."""
    return {float(cost.size[1]): cost.seconds["forward"].median for cost in costs if cost.name == name}


def growth_exponent(costs: Mapping[float, float]) -> float | None:
    """Fits `cost = a * size^b` by least squares of the logarithms, to the upper half of the sizes on a log axis.

    At the lower end what a call costs at any size flattens the curve. Costs that are not positive or finite are left
    out. None if fewer than two are left.
    """
    known = {math.log(size): math.log(cost) for size, cost in costs.items() if 0 < cost < math.inf}
    middle = (min(known) + max(known)) / 2 - 1e-9 if len(known) > 2 else -math.inf
    upper = {x: y for x, y in known.items() if x >= middle}
    return linear_regression([*upper], [*upper.values()]).slope if len(upper) > 1 else None


def crossover(costs: Mapping[float, float], baseline: Mapping[float, float]) -> float | None:
    """From which size on a cost stays at or below that of a baseline, up to the largest size that was measured.

    Between two sizes the ratio is a straight line on log axes, which passes 1 there. 0 is at all sizes, infinity at
    none; None if no size has both. A cost of infinity stands for what could not run.
    """
    both = costs.keys() & baseline.keys()
    sizes = sorted(size for size in both if 0 < min(costs[size], baseline[size]) < math.inf)
    above = [k for k, size in enumerate(sizes) if costs[size] > baseline[size]]
    if not above:
        return 0.0 if sizes else None
    if above[-1] == len(sizes) - 1:
        return math.inf
    low, high = sizes[above[-1]], sizes[above[-1] + 1]
    if math.inf in (costs[low], baseline[high]):
        return high
    before, after = (math.log(costs[size] / baseline[size]) for size in (low, high))
    return float(low * (high / low) ** (before / (before - after)))


def crossover_text(size: float | None) -> str:
    """A crossover as tables have it: "1,432", "always", "never", or "-" if it is not known."""
    return "-" if size is None else {0.0: "always", math.inf: "never"}.get(size, f"{size:,.0f}")
