"""Time and memory of callables, measured side by side."""

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from lightning.pytorch.utilities.memory import is_out_of_cpu_memory
from torch.profiler import ProfilerActivity, profile

SAMPLE = 2e-3  # seconds that one sample takes at least: a short call is repeated, and divided by the number of calls
LONG = 0.1  # seconds of a call that is made but once to warm up
LEAST, MOST = 3, 100  # samples of each callable
BUSY = 0.8  # the share of the processor below which a machine is busy

Work = Callable[[], Any]
Name = TypeVar("Name")


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

    def over(self, other: "Timing") -> float:
        """The median, over the rounds, of the ratio to another: what lasts longer than a round slows down both."""
        return statistics.median(a / b for a, b in zip(self.samples, other.samples, strict=False))


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
    """Times callables in turns, so that other work of the machine slows all of them.

    Each of at most 100 rounds takes a sample of every callable, the mean of as many calls as take 2 ms. A callable that
    has had its share of the budget (seconds), and its `least` samples, leaves the rounds. `times` is filled as samples
    come; `on_sample` is told an estimate of the seconds that are left.
    """
    cuda = torch.device(device).type == "cuda"
    times = {} if times is None else times

    def sample(work: Work, calls: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        start = clock()
        for _ in range(calls):
            work()
        if cuda:
            torch.cuda.synchronize(device)
        return (clock() - start) / calls

    calls = {}
    for name, work in works.items():
        times[name] = []
        seconds = sample(work, 1)
        if seconds < LONG:  # else the first call tells enough, and a second one takes too long
            seconds = sample(work, 1)
        calls[name] = max(1, math.ceil(SAMPLE / max(seconds, 1e-9)))
    share, spent = budget / max(len(works), 1), dict.fromkeys(works, 0.0)

    def unfinished(name: Name) -> bool:
        return len(times[name]) < least or (spent[name] < share and len(times[name]) < MOST)

    while running := [name for name in works if unfinished(name)]:
        for name in running:
            times[name].append(sample(works[name], calls[name]))
            spent[name] += calls[name] * times[name][-1]
            if on_sample is not None:
                on_sample(sum(max(0.0, share - spent[name]) for name in works if unfinished(name)))
    return {name: Timing(tuple(times[name])) for name in works}


def processor_share(seconds: float = 0.1) -> float:
    """Returns which share of the time that torch's threads need a processor they get: about 1 on an idle machine.

    Multiplies matrices for so many seconds. Below `BUSY`, times by the clock are too long, and differ by chance.
    """
    matrix = torch.ones(512, 512)
    wall, used = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - wall) < seconds:
        matrix @ matrix
    return (time.process_time() - used) / passed / torch.get_num_threads()


def peak_memory(work: Work, device: str | torch.device = "cpu") -> int:
    """The most bytes that a call has allocated at one time, beyond what was allocated before it, by torch's allocator.

    On the CPU torch's profiler tells, which is slow, and does not see what a library such as oneDNN allocates.
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
    """Whether an exception says that the memory of the device or of the machine is used up."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or is_out_of_cpu_memory(error)
