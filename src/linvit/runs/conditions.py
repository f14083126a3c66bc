"""Conditions of a measurement: machine, load, versions."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from linvit.io import machine

GIB = 2**30
PROCESSORS = Path("/proc/cpuinfo")
DRIVER = Path("/proc/driver/nvidia/version")


def conditions(device: str = "cpu") -> dict[str, str]:
    """Returns the conditions of a measurement on a device, in the order in which they are printed."""
    memory = machine.memory()
    amount = "unknown" if memory is None else f"{memory[0] / GIB:.0f} GiB, {memory[1] / GIB:.0f} free"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {machine.cpus():g} cores, {platform.system()}",
        "memory": amount,
        "device": f"{torch.cuda.get_device_name(device)}, {_driver()}"
        if torch.device(device).type == "cuda"
        else "cpu",
        "threads": str(torch.get_num_threads()),
        "load": cpu_load(),
        "versions": f"linvit {version('linvit')}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def cpu_load() -> str:
    """Returns the load average of the last minute as text, also where the system does not report it."""
    return f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"


def _processor() -> str:
    """Returns the model of the processor, where the system reports it."""
    text = PROCESSORS.read_text(encoding="utf-8") if PROCESSORS.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str:
    """Returns the versions of the GPU driver, where the system reports it, and of CUDA."""
    found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text(encoding="utf-8")) if DRIVER.exists() else None
    return f"driver {found[0] if found else 'unknown'}, CUDA {torch.version.cuda}"
