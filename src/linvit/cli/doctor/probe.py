"""Imports what linvit needs, and asks torch for its devices, in a process of its own: either may crash or hang."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from linvit.cli.doctor.problem import Problem
from linvit.registry import attentions, backbones, heads

MODULES = ("torch", "torchvision", "timm", "lightning", "datasets")
TRAINING = "linvit.cli.training.command_line"
DEVICES, NAMES = "the devices of torch", "linvit's own attentions and backbones"
MARK = "linvit doctor: "  # begins the lines that are meant for us: others may print, too
PROBE = "from linvit.cli.doctor.probe import probe; probe()"


@dataclass
class Findings:
    """What the other process found.

    Attributes:
        torch: Its version and CUDA's, and its processor instructions; empty if it cannot be imported.
        devices: Lines of words.
        problems: What is wrong.
    """

    torch: str = ""
    devices: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def examine(timeout: float) -> Findings:
    """Runs `probe` in another process, for so many seconds at most."""
    paths = os.pathsep.join(sys.path)  # so that it sees the packages that are seen here
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", PROBE],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
        output, code = done.stdout, done.returncode
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        ending = f"ends the process with {_name(code)}{last and f': {last}'}"
    except subprocess.TimeoutExpired as error:
        output, ending = error.stdout or b"", f"takes more than {timeout:g} s (--timeout)"
    lines = output.decode(errors="replace").splitlines()
    messages = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    findings = Findings()
    stage = "python"
    for message in messages:
        stage = message.get("stage", stage)
        findings.torch = message.get("torch", findings.torch)
        findings.devices += message.get("devices", [])
        findings.problems += [Problem(*problem) for problem in message.get("problems", [])]
    if stage != "done":
        reason = messages[-1].get("failed") if messages else None
        findings.problems.append(Problem(f"{_named(stage)}: {reason or f'it {ending}'}", _remedy(stage)))
    return findings


def probe() -> None:
    """Imports one after the other, and prints what it finds as it goes; the first failure ends it."""
    try:
        for name in MODULES:
            _say(stage=name)
            importlib.import_module(name)
            if name == "torch":
                _say(stage=DEVICES)
                _devices()
        _say(stage=TRAINING)
        importlib.import_module(TRAINING)
        _say(stage=NAMES)
        for registry in (attentions, backbones, heads):
            for name, owners in registry.entries().items():
                if [entry.owner for entry in owners] == ["linvit"]:
                    registry.get(name)
        _say(stage="done")
    except BaseException as error:  # whatever an installation can do
        _say(failed=f"{type(error).__name__}: {error}".partition("\n")[0])


def _devices() -> None:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    _say(torch=f"built for {built}, {torch.backends.cpu.get_cpu_capability()} on the processor")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if shutil.which("nvidia-smi") and not count:
        _say(problems=[_no_cuda(torch)])
    for index in range(count):
        _say(stage=f"the device cuda:{index}")
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds = ["float32", *["tf32"] * (facts.major >= 8), *["bf16-mixed"] * bf16, "16-mixed"]
        square = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16 if bf16 else torch.half)
        (square @ square).sum().item()  # raises where this torch has no kernels for the device
        gib = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} free"
        _say(devices=[f"cuda:{index} {facts.name}, {gib}; {', '.join(kinds)}"])
    if torch.backends.mps.is_available():
        _say(devices=["mps; float32, 16-mixed"])


def _no_cuda(torch: Any) -> Problem:
    """Why torch does not see the GPU whose driver is installed."""
    index = "https://pytorch.org/get-started"
    if torch.version.cuda is None:
        return Problem("a GPU driver is there, but this torch is built without CUDA", f"install another one: {index}")
    try:
        torch.cuda.init()
        reason = "no device is visible"
    except Exception as error:
        reason = str(error).partition("\n")[0]
    way = f"look at nvidia-smi and CUDA_VISIBLE_DEVICES; an old driver needs an older CUDA: {index}"
    return Problem(f"a GPU driver is there, but torch cannot use the GPU: {reason}", way)


def _named(stage: str) -> str:
    """What failed, with the file if it is a package: it may be one of the user's that has the same name."""
    if stage not in (*MODULES, TRAINING):
        return stage
    found = importlib.util.find_spec(stage.partition(".")[0])
    return f"{stage} cannot be imported{f' from {found.origin}' if found and found.origin else ''}"


def _remedy(stage: str) -> str:
    if stage in MODULES:
        others = " torchvision" if stage == "torch" else " torch" if stage == "torchvision" else ""
        return f"pip install --force-reinstall {stage}{others}; what needs it was not looked at"
    if "device" in stage:
        return "the driver and the CUDA version of torch may not fit: https://pytorch.org/get-started"
    return (
        "pip install --force-reinstall linvit, or tell us: it is our mistake if all packages are as linvit needs them"
    )


def _name(code: int) -> str:
    """An exit code, or the signal behind it."""
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"code {code}"


def _say(**facts: Any) -> None:
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
