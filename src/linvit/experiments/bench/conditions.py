"""Under which conditions something was measured: machine, load, versions, date."""

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from linvit import machine

GIB = 2**30
PROCESSORS = Path("/proc/cpuinfo")
TIMES = Path("/proc/stat")


@dataclass
class OtherLoad:
    """Processors that other processes took on average; None where the system does not say, and until it is measured."""

    processors: float | None = None


def conditions(device: str = "cpu") -> dict[str, str]:
    """What a reader of a measurement must know, in the order in which to print it.

    Args:
        device: Where was measured.
    """
    memory = machine.memory()
    amount = "unknown" if memory is None else f"{memory[0] / GIB:.0f} GiB, {memory[1] / GIB:.0f} free"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {machine.cpus():g} cores, {platform.system()}",
        "memory": amount,
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu",
        "threads": str(torch.get_num_threads()),
        "load": cpu_load(),
        "versions": f"linvit {version('linvit')}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def cpu_load() -> str:
    """The average number of processes that wanted a processor in the last minute, or that the system does not say."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


@contextmanager
def other_load() -> Iterator[OtherLoad]:
    """Measures what other processes take while a block runs, this one's threads and children left out."""
    load, start, began = OtherLoad(), _others(), time.monotonic()
    yield load
    end, seconds = _others(), time.monotonic() - began
    if start is not None and end is not None and seconds > 0:
        load.processors = max(0.0, end - start) / seconds


def _others() -> float | None:
    """Seconds of processors that other processes have used since the machine started."""
    if not TIMES.exists():
        return None
    user, nice, system, _, _, irq, soft_irq, *_ = map(
        int, TIMES.read_text(encoding="ascii").split()[1:11]
    )  # idle and waiting left out
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def _processor() -> str:
    """The model of the processor, where the system tells."""
    text = PROCESSORS.read_text(encoding="utf-8") if PROCESSORS.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
