"""Costs of modules: time, memory and operations of passes and training steps, over sizes; crossings of curves."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import linear_regression
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis.operations import count_on_meta, kept_for_backward
from linvit.backbones.replace_attention import softmax_blocks
from linvit.errors import UserError
from linvit.experiments.bench.runner import Build, Mode, Runner, Settings
from linvit.experiments.measure import Timing, interleaved, out_of_memory, peak_memory
from linvit.io import machine

TIMES = (1, 2, 3, 4)  # the sides that are measured, over that of the image
CALLS = 6  # of each network at one size, about
LONGEST = 6.0
PASSES = {
    "forward": ("forward pass", "fwd"),
    "forward_backward": ("forward and a backward pass", "fwd+bwd"),
    "training_step": ("training step", "step"),
}
"""Methods of `Runner`, and what tables and narrow columns call them."""


@dataclass
class Cost:
    """Costs of one module at one size. Values that could not be measured are None, and `note` has the reason."""

    name: str
    size: tuple[int, int]  # of the patch grid or image, (H, W)
    mode: Mode = "eager"
    build: Build | None = None  # makes the module
    parameters: int | None = None
    macs: int | None = None  # of the forward pass on one image; see `Operations`
    flops: int | None = None
    softmax_blocks: int | None = None
    seconds: dict[str, Timing] = field(default_factory=dict)  # of each of the passes, of the whole batch
    peak: dict[str, int] = field(default_factory=dict)  # most bytes at one time, beyond inputs, weights, an optimizer's
    kept: int | None = None  # bytes for backward, without weights
    note: str = ""

    @property
    def amount(self) -> int:
        """Tokens or pixels."""
        return math.prod(self.size)

    @property
    def label(self) -> str:
        """The name and, unless the module ran as it is, the mode."""
        return self.name if self.mode == "eager" else f"{self.name}, {self.mode}"

    @contextmanager
    def noting_failures(self, name: str = "") -> Iterator[None]:
        """Skips a pass, or all of them, that cannot be measured, and notes the reason."""
        try:
            yield
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            reason = first if isinstance(error, UserError) else f"failed: {type(error).__name__}: {first}"
            if out_of_memory(error):
                reason = f"out of memory ({first})" if isinstance(error, MemoryError) and first else "out of memory"
            self.note = "; ".join(filter(None, [self.note, f"{PASSES[name][0]}: {reason}" if name else reason]))
            self.peak.pop(name, None)


def costs_over_sizes(
    builders: Mapping[str, Build],
    sizes: Sequence[tuple[int, int]],
    settings: Settings,
    *,
    skipped: Collection[str],
    budget: float,
    **measuring: Any,
) -> tuple[list[Cost], bool]:
    """`measure_costs` of modules at every size (H, W), the small ones first; modes of attention are not `skipped`'s."""
    costs: list[Cost] = []
    for size in sorted(sizes, key=math.prod):
        own = [
            Cost(name, size, mode, build)
            for name, build in builders.items()
            for mode in settings.modes
            if not (name in skipped and (mode == "no recompute" or mode in settings.kernels))
        ]
        costs += own
        if measure_costs(own, settings, budget=budget / len(sizes), **measuring):
            return costs, True
    return costs, False


def measure_costs(
    costs: Sequence[Cost],
    settings: Settings,
    *,
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
    report: Callable[[str], None] = lambda progress: None,
) -> bool:
    """Measures operations and memory of each module, then the time of all in turns; True if Ctrl-C has ended it.

    A pass that fails, or needs more than the available memory (on a CPU 80 % of the free memory), has a note.
    """
    times: dict[tuple[int, str], list[float]] = {}
    works: dict[tuple[int, str], Callable[[], Any]] = {}
    limit = machine.memory_limit() if torch.device(settings.device).type == "cpu" else nullcontext()
    interrupted = True
    with limit, suppress(KeyboardInterrupt):
        for i, cost in enumerate(costs):
            what = "compiling" if cost.mode == "compiled" else "memory"
            report(f"{i / len(costs):4.0%} {what}: {cost.label}, {format_size(cost.size)}")
            with cost.noting_failures():
                assert cost.build is not None
                runner = Runner(*cost.build(cost.size), settings, cost.mode)
                _memory(cost, runner)
                found = count_on_meta(runner.evaluated, *runner.inputs, **runner.options)
                cost.parameters, cost.macs = found.parameters, found.matmul // settings.batch
                cost.flops = found.flops // settings.batch
                cost.softmax_blocks = softmax_blocks(runner.evaluated)
            for name in cost.peak:
                works[i, name] = partial(_timed, cost, name, getattr(runner, name))

        def on_sample(left: float) -> None:
            report(f"timing, {left:.0f} s left")

        interleaved(works, budget=budget, device=settings.device, times=times, on_sample=on_sample, clock=clock)
        interrupted = False
    for (i, name), samples in times.items():
        if samples and name in costs[i].peak:
            costs[i].seconds[name] = Timing(tuple(samples))
    return interrupted


def format_size(size: tuple[int, int]) -> str:
    """Returns a size as one writes it: "14x28"."""
    return f"{size[0]}x{size[1]}"


def _memory(cost: Cost, runner: Runner) -> None:
    """Measures the passes' peak memory, and the memory kept for backward; the passes are warm afterwards."""
    for name in runner.settings.passes:
        with cost.noting_failures(name):
            work = getattr(runner, name)
            if name != "forward_backward" or runner.mode == "compiled":
                work()  # one-time allocations do not count
            kept = None if name == "forward" else kept_for_backward(runner.training_forward, runner.trained)
            cost.peak[name] = peak_memory(work, runner.settings.device)
            cost.kept = kept


def _timed(cost: Cost, name: str, work: Callable[[], Any]) -> None:
    """A pass that is skipped once memory does not suffice, for example if another process takes it."""
    if name in cost.peak:
        with cost.noting_failures(name):
            work()


def costs_by_size(networks: Mapping[str, nn.Module], image: Tensor, device: torch.device, seconds: float) -> list[Cost]:
    """Measures a forward pass of one image (C, H, W), and of multiples of it that fit memory and time."""
    found: list[Cost] = []
    for times in TIMES:
        images = image[None].repeat(1, 1, times, times).to(device)
        costs = [of_images(name, network, images) for name, network in networks.items()]
        measure_costs(costs, Settings(str(device), backward=False), budget=seconds / len(TIMES))
        if not all(cost.seconds for cost in costs):
            break
        found += costs
        growth = ((times + 1) / times) ** 4  # that of softmax: the square of the tokens
        if CALLS * growth * sum(cost.seconds["forward"].median for cost in costs) > LONGEST * seconds:
            break
    return found


def of_images(name: str, network: nn.Module, images: Tensor) -> Cost:
    """Returns the cost, to be measured, of a network on images (B, C, H, W)."""
    return Cost(name, (images.shape[-2], images.shape[-1]), build=lambda _: (network, (images,), {}))


def times_of(costs: Iterable[Cost], name: str) -> dict[float, float]:
    """Returns the seconds of one network's forward pass by size."""
    return {float(cost.size[1]): cost.seconds["forward"].median for cost in costs if cost.name == name}


def growth_exponent(costs: Mapping[float, float]) -> float | None:
    """Fits `cost = a * size^b` by least squares of the logarithms, to the upper half of the sizes on a log axis."""
    known = {math.log(size): math.log(cost) for size, cost in costs.items() if 0 < cost < math.inf}
    middle = (min(known) + max(known)) / 2 - 1e-9 if len(known) > 2 else -math.inf
    upper = {x: y for x, y in known.items() if x >= middle}
    return linear_regression([*upper], [*upper.values()]).slope if len(upper) > 1 else None


class Crossover(NamedTuple):
    """The size from which on a cost stays at or below that of a baseline."""

    size: float
    """Between two measured sizes; 0 if this is so at all of them, infinity if it is not so at the largest."""
    measured: tuple[float, ...]
    """The sizes at which both were measured, the smallest first."""

    def __str__(self) -> str:
        """Returns the size as tables have it: "1,432", or "≤ 196" or "> 3,136" of the measured sizes."""
        low, high = (f"{self.measured[end]:,.0f}" for end in (0, -1))
        return {0.0: f"≤ {low}", math.inf: f"> {high}"}.get(self.size, f"{self.size:,.0f}")


def crossover(costs: Mapping[float, float], baseline: Mapping[float, float]) -> Crossover | None:
    """Returns where a cost crosses that of a baseline; None without a common size.

    Between two sizes the ratio is a straight line on log axes. An infinite cost marks sizes that could not run.
    """
    both = costs.keys() & baseline.keys()
    sizes = sorted(size for size in both if 0 < min(costs[size], baseline[size]) < math.inf)
    above = [k for k, size in enumerate(sizes) if costs[size] > baseline[size]]
    if not above:
        return Crossover(0.0, tuple(sizes)) if sizes else None
    if above[-1] == len(sizes) - 1:
        return Crossover(math.inf, tuple(sizes))
    low, high = sizes[above[-1]], sizes[above[-1] + 1]
    if math.inf in (costs[low], baseline[high]):
        return Crossover(high, tuple(sizes))
    before, after = (math.log(costs[size] / baseline[size]) for size in (low, high))
    return Crossover(float(low * (high / low) ** (before / (before - after))), tuple(sizes))
