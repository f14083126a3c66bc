"""Time and memory of callables, measured side by side."""

import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory
from torch.profiler import ProfilerActivity, profile

SAMPLE = 2e-3  # seconds that one sample takes at least: a short call is repeated, and divided by the number of calls
LONG = 0.1  # seconds of a call that is made but once to warm up
LEAST, MOST = 3, 100  # samples of each callable
BUSY = 0.8  # the share of the processor below which a machine is busy

Work = Callable[[], Any]
Name = TypeVar("Name", bound=Hashable)


class Estimate(NamedTuple):
    """The median of some samples, with its 95 % interval, which is 0 to infinity below six samples."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Estimate":
        """Returns the interval by ranks: the number of samples below the true median is binomial.

        It assumes nothing about the noise but that samples are independent. Six samples give 96.9 %, by their extremes.
        """
        ordered, outside, beyond = sorted(samples), 0.0, -1
        while 2 * (outside := outside + math.comb(len(ordered), beyond + 1) / 2 ** len(ordered)) <= 0.05:
            beyond += 1
        low, high = (ordered[beyond], ordered[-1 - beyond]) if beyond >= 0 else (0.0, math.inf)
        return cls(statistics.median(ordered) if ordered else math.nan, low, high, len(ordered))


class Timing(NamedTuple):
    """Seconds of one call, a sample per round; those of one round of two callables were taken one after the other."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Half of the samples are below it."""
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """A quarter of the samples are below the first, a quarter above the second: the spread."""
        if len(self.samples) < 2:
            return self.samples[0], self.samples[0]
        low, _, high = statistics.quantiles(self.samples, method="inclusive")
        return low, high

    def over(self, other: "Timing") -> Estimate:
        """Returns the ratios to another of the same round: what lasts longer than a round slows down both."""
        return Estimate.of([a / b for a, b in zip(self.samples, other.samples, strict=False)])


class Turns(Generic[Name]):
    """Takes samples of callables in rounds, so that other work of the machine slows all of them.

    A sample is the mean of as many calls as take 2 ms. Each round begins with another callable.

    Attributes:
        times: Seconds per call, a sample per round, by name.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        clock: Callable[[], float] = time.perf_counter,
        times: dict[Name, list[float]] | None = None,
    ) -> None:
        self.device, self.clock = torch.device(device), clock
        self.times = {} if times is None else times
        self.calls: dict[Name, int] = {}
        self._works: dict[Name, Work] = {}
        self._rounds = 0

    def add(self, name: Name, work: Work) -> float:
        """Adds a callable after one call to warm up, or two of a short one; returns the seconds of the last."""
        self.times[name] = []
        seconds = self._seconds(work, 1)
        if seconds < LONG:  # else the first call tells enough, and a second one takes too long
            seconds = self._seconds(work, 1)
        self.calls[name] = max(1, math.ceil(SAMPLE / max(seconds, 1e-9)))
        self._works[name] = work
        return seconds

    def round(self, names: Sequence[Name]) -> Iterator[Name]:
        """Takes a sample of each, and yields its name."""
        first = self._rounds % max(len(names), 1)
        self._rounds += 1
        for name in (*names[first:], *names[:first]):
            self.times[name].append(self._seconds(self._works[name], self.calls[name]))
            yield name

    def _seconds(self, work: Work, calls: int) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        start = self.clock()
        for _ in range(calls):
            work()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return (self.clock() - start) / calls


def interleaved(
    works: Mapping[Name, Work],
    *,
    budget: float,
    least: int = LEAST,
    device: str | torch.device = "cpu",
    times: dict[Name, list[float]] | None = None,
    on_sample: Callable[[float], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Name, Timing]:
    """Times callables in at most 100 rounds of `Turns`.

    A callable that has had its share of the budget (seconds), and its `least` samples, leaves the rounds. `times` is
    filled as samples come; `on_sample` is told an estimate of the seconds that are left.
    """
    turns = Turns[Name](device, clock, times)
    for name, work in works.items():
        turns.add(name, work)
    share, spent = budget / max(len(works), 1), dict.fromkeys(works, 0.0)

    def unfinished(name: Name) -> bool:
        taken = len(turns.times[name])
        return taken < least or (spent[name] < share and taken < MOST)

    while running := [name for name in works if unfinished(name)]:
        for name in turns.round(running):
            spent[name] += turns.calls[name] * turns.times[name][-1]
            if on_sample is not None:
                on_sample(sum(max(0.0, share - spent[name]) for name in works if unfinished(name)))
    return {name: Timing(tuple(turns.times[name])) for name in works}


def processor_share(seconds: float = 0.1) -> float:
    """Returns the processor time of torch's threads over the time by the clock: about 1 on an idle machine.

    Multiplies matrices for so many seconds. Below `BUSY`, times by the clock are too long, and differ by chance.
    """
    matrix = torch.ones(512, 512)
    wall, used = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - wall) < seconds:
        matrix @ matrix
    return (time.process_time() - used) / passed / torch.get_num_threads()


def peak_memory(work: Work, device: str | torch.device = "cpu") -> int:
    """Returns the peak of bytes that torch's allocator held during a call, beyond those held before it.

    On the CPU it uses torch's profiler, which is slow, and does not see allocations of libraries such as oneDNN.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler prints two lines per call
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()  # negative where memory is released
        most = max(most, allocated)
    return most


def out_of_memory(error: BaseException) -> bool:
    """True if an exception reports that the memory of the device or of the machine is used up."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_out_of_cpu_memory(error)
