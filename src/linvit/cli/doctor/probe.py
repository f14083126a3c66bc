"""Imports what linvit needs, and asks torch for its devices, in a process of its own: either may crash or hang."""

import importlib.util
import json
import shutil
from typing import Any, NamedTuple

from linvit.cli.import_check import REGISTRIES, run_apart

MODULES = ("torch", "torchvision", "timm", "lightning", "datasets")
TRAINING = "linvit.cli.training.command_line"
DEVICES, NAMES = "the devices of torch", "linvit's own attentions and backbones"
MARK = "linvit doctor: "  # begins the lines that are meant for us: others may print, too
PROGRAM = "from linvit.cli.doctor.probe import probe; probe()"


class Problem(NamedTuple):
    """Something that is wrong, and how to fix it, in words or as a command."""

    what: str
    remedy: str


class ProbeResult(NamedTuple):
    """What the other process found: of torch in a line, empty if it cannot be imported; its devices; problems."""

    torch: str
    devices: list[str]
    problems: list[Problem]


def examine(timeout: float) -> ProbeResult:
    """Runs `probe` in another process, for so many seconds at most."""
    lines, ending = run_apart(PROGRAM, timeout=timeout)
    messages = [json.loads(line.removeprefix(MARK)) for line in lines if line.startswith(MARK)]
    problems = [Problem(*message["problem"]) for message in messages if "problem" in message]
    stage = next((message["stage"] for message in reversed(messages) if "stage" in message), "python")
    if stage != "done":
        problems.append(Problem(f"{_named(stage)}: {messages[-1].get('failed', f'it {ending}')}", _remedy(stage)))
    torch = next((message["torch"] for message in messages if "torch" in message), "")
    return ProbeResult(torch, [message["device"] for message in messages if "device" in message], problems)


def probe() -> None:
    """Imports one after the other, and prints what it finds as it goes; the first failure ends it."""
    try:
        for name in (*MODULES, TRAINING):
            _say(stage=name)
            importlib.import_module(name)
            if name == "torch":
                _say(stage=DEVICES)
                _devices()
        _say(stage=NAMES)
        for registry in REGISTRIES.values():
            for name, owners in registry.entries().items():
                if [entry.owner for entry in owners] == ["linvit"]:
                    registry.get(name)
        _say(stage="done")
    except BaseException as error:  # a broken installation can do anything
        _say(failed=f"{type(error).__name__}: {error}".partition("\n")[0])


def _devices() -> None:
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    _say(torch=f"built for {built}, {torch.backends.cpu.get_cpu_capability()} on the processor")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if shutil.which("nvidia-smi") and not count:
        _say(problem=_no_cuda(torch))
    for index in range(count):
        _say(stage=f"the device cuda:{index}")
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds = ["float32", *["tf32"] * (facts.major >= 8), *["bf16-mixed"] * bf16, "16-mixed"]
        square = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16 if bf16 else torch.half)
        (square @ square).sum().item()  # raises where this torch has no kernels for the device
        gib = f"{total / 2**30:.0f} GiB, {free / 2**30:.0f} free"
        _say(device=f"cuda:{index} {facts.name}, {gib}; {', '.join(kinds)}")
    if torch.backends.mps.is_available():
        _say(device="mps; float32, 16-mixed")


def _no_cuda(torch: Any) -> Problem:
    """Why torch does not see the GPU whose driver is installed."""
    index = "https://pytorch.org/get-started"
    if torch.version.cuda is None:
        return Problem("there is a GPU driver, but this torch is built without CUDA", f"install another one: {index}")
    try:
        torch.cuda.init()
        reason = "no device is visible"
    except Exception as error:
        reason = str(error).partition("\n")[0]
    remedy = f"look at nvidia-smi and CUDA_VISIBLE_DEVICES; an old driver needs an older CUDA: {index}"
    return Problem(f"there is a GPU driver, but torch cannot use the GPU: {reason}", remedy)


def _named(stage: str) -> str:
    """What failed, with the file if it is a package: it may be one of the user's that has the same name."""
    if stage not in (*MODULES, TRAINING):
        return stage
    found = importlib.util.find_spec(stage.partition(".")[0])
    return f"{stage} cannot be imported{f' from {found.origin}' if found and found.origin else ''}"


def _remedy(stage: str) -> str:
    if stage in MODULES:
        others = {"torch": " torchvision", "torchvision": " torch"}.get(stage, "")
        return f"pip install --force-reinstall {stage}{others}; what needs it was not looked at"
    if "device" in stage:
        return "the driver and the CUDA version of torch may not fit: https://pytorch.org/get-started"
    return "pip install --force-reinstall linvit, or report it, if all packages are as linvit needs them"


def _say(**facts: Any) -> None:
    print(f"\n{MARK}{json.dumps(facts)}", flush=True)
