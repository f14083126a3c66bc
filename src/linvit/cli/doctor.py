"""`linvit doctor`: what an installation and its machine have, what is wrong with them, and how to fix it."""

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from linvit import machine
from linvit.errors import UserError, check_number
from linvit.plain_text import printable
from linvit.registry import Registry, attention_kernels, attentions, backbones, heads
from linvit.runs.folder import check_writable
from linvit.terminal import argument_parser, entry

TIMEOUT = 60.0  # seconds for one import
REGISTRIES = {registry.kind: registry for registry in (attentions, attention_kernels, backbones, heads)}

CHECK = """
import sys
from linvit.cli.doctor import REGISTRIES, UserError
try:
    REGISTRIES[sys.argv[1]].get(sys.argv[2])
except UserError as error:
    cause = error.__cause__
    sys.exit((f"{type(cause).__name__}: {cause}" if cause else str(error)).partition("\\n")[0])
"""
DONE = "linvit: done"  # the last line of a program that has come to its end
GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = GIB // 4  # two loader processes with batches of 128 images of 224 pixels
LEAST_DISK = 2 * GIB  # two checkpoints of a large model
MODULES = {"torch": "; torch.ones(1)", "torchvision": "", "timm": "", "lightning": "", "datasets": ""}
EVERYTHING = """
import linvit.cli.doctor, linvit.cli.training.command_line
from linvit.cli.doctor import REGISTRIES
for registry in REGISTRIES.values():
    for name, owners in registry.entries().items():
        if [entry.owner for entry in owners] == ["linvit"]:
            registry.get(name)
linvit.cli.doctor.print_devices()
"""


Problem = tuple[str, str]
"""Something that is wrong, and how to fix it, in words or as a command."""


def main(argv: list[str]) -> int:
    """Runs `linvit doctor`; returns 1 if something is wrong, else 0. No torch is imported in this process."""
    parser = argument_parser("linvit doctor", __doc__)
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), metavar="FOLDER", help="where runs save")
    parser.add_argument("--timeout", type=float, default=2 * TIMEOUT, metavar="SECONDS", help="for one import (120)")
    args = parser.parse_args(argv)
    check_number("--timeout", args.timeout, above=0)
    problems = [*_installation(), *_machine(args.output)]
    if broken := list(_imports(args.timeout)):
        problems += broken
        _show("plug-ins", "not looked at: they need torch and linvit")
    else:
        problems += _plugins(args.timeout)
    print(f"\n{len(problems)} found to be wrong" if problems else "\nnothing is wrong")
    for number, (what, remedy) in enumerate(problems, 1):
        _show(f"  {number}.", what, 6)
        _show("", remedy, 6)
    return int(bool(problems))


def _installation() -> Iterator[Problem]:
    """Shows Python and the packages; finds those that are missing or too old."""
    _show("linvit", f"{installed('linvit') or 'not installed'} in {Path(__file__).parents[1]}")
    _show("python", f"{platform.python_version()} on {platform.platform(terse=True)}, {sys.executable}")
    needed = requirements()
    if not needed:
        yield ("linvit itself is not installed, so its plug-ins and names are unknown", "pip install linvit")
        return
    _show("packages", ", ".join(f"{one.name} {installed(one.name) or 'missing'}" for one in needed))
    for one in needed:
        version, remedy = installed(one.name), f"pip install '{one.name}{one.specifier}'"
        if version is None:
            yield (f"{one.name} is not installed", remedy)
        elif Version(version).base_version not in one.specifier:  # 2.11.0+cu132 and 2.11rc1 are taken for 2.11
            yield (f"{one.name} {version} does not fit linvit, which needs {one.name}{one.specifier}", remedy)


def requirements() -> list[Requirement]:
    """What linvit's own metadata requires without an extra; empty if it is not installed."""
    try:
        declared = map(Requirement, metadata.requires("linvit") or [])
    except metadata.PackageNotFoundError:
        return []
    return [one for one in declared if one.marker is None or one.marker.evaluate({"extra": ""})]


def installed(name: str) -> str | None:
    """The version of a distribution, or None if there is none or its metadata cannot be read."""
    try:
        return str(Version(metadata.version(name)))
    except Exception:  # files of any content
        return None


def _machine(output: Path) -> Iterator[Problem]:
    """Shows processors, memory and disks; finds what is too little."""
    memory = machine.memory()
    amount = f"{memory[0] / GIB:.1f} GiB of memory, {memory[1] / GIB:.1f} free" if memory else "memory unknown"
    _show("machine", f"{machine.cpus():g} of {os.cpu_count()} processors, {amount}")
    if SHARED_MEMORY.exists():
        usage = shutil.disk_usage(SHARED_MEMORY)
        _show(str(SHARED_MEMORY), f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} free")
        if usage.free < LEAST_SHARED:
            yield (
                f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} MiB free, in which loader processes hand over batches",
                "docker run --shm-size=8g, or --ipc=host; or set --data.num_workers=0",
            )
    for name, folder in (("output", output), ("temporary", Path(tempfile.gettempdir()))):
        free = machine.free_disk(folder)
        _show(name, f"{free / GIB:.1f} GiB free for {folder}")
        if free < LEAST_DISK:
            yield (f"the disk of {folder} has {free / GIB:.1f} GiB free", "delete old runs, or use another disk")
        try:
            check_writable(folder)
        except UserError as error:
            yield (str(error), "chmod u+w, or --trainer.default_root_dir=FOLDER")


def _imports(timeout: float) -> Iterator[Problem]:
    """Imports linvit and what it needs in a process of its own, which may crash or hang, and shows torch's devices."""
    lines, reason = run_apart(EVERYTHING, timeout=timeout)
    for name, line in zip(["torch", "devices", *[""] * len(lines)], lines, strict=False):
        _show(name, line)
    for name, use in MODULES.items() if reason else ():
        if found := run_apart(f"import {name}{use}", timeout=timeout)[1]:
            spec = importlib.util.find_spec(name)  # it may be a file of the user's that has the same name
            where = f" from {spec.origin}" if spec else ""
            packages = "torch torchvision" if name in ("torch", "torchvision") else name
            remedy = f"pip install --force-reinstall {packages}; what needs it was not looked at"
            yield (f"{name} cannot be imported{where}: {found}", remedy)
            return
    if reason and lines:
        yield (f"the devices of torch: {reason}", "look at nvidia-smi, CUDA_VISIBLE_DEVICES, https://pytorch.org")
    elif reason:
        yield (f"linvit cannot be imported: {reason}", "pip install --force-reinstall linvit, or report it")


def print_devices() -> None:
    """Prints a line about torch, and one about each device; ends the process by an error if one cannot be used."""
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    print(f"built for {built}, {torch.backends.cpu.get_cpu_capability()} on the processor")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if shutil.which("nvidia-smi") and not count:
        sys.exit(f"there is a GPU driver, but torch, built for {built}, cannot use the GPU")
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        kinds = ["float32", *["tf32"] * (facts.major >= 8), *["bf16-mixed"] * bf16, "16-mixed"]
        square = torch.ones(16, 16, device=f"cuda:{index}", dtype=torch.bfloat16 if bf16 else torch.half)
        (square @ square).sum().item()  # raises where this torch has no kernels for the device
        print(f"cuda:{index} {facts.name}, {total / GIB:.0f} GiB, {free / GIB:.0f} free; {', '.join(kinds)}")
    if not count:
        print("cpu; float32, bf16-mixed (often slower)")


def _plugins(timeout: float) -> Iterator[Problem]:
    """Shows what third parties offer, each imported in a process of its own; finds what cannot be used."""
    plugins = check_plugins(timeout)
    for number, (registry, name, owner, reason) in enumerate(plugins):
        state = "broken, see below" if reason else "ok"
        _show("" if number else "plug-ins", f"{registry.kind} {name} ({owner}): {state}")
        if reason:
            yield (f"{registry.kind} '{name}' of {owner}: {reason}", f"fix or uninstall {owner}")
    if not plugins:
        _show("plug-ins", "none")


def _show(name: str, text: str, column: int = 14) -> None:
    print("\n".join(entry(name, printable(text, lines=False), column)), flush=True)


def run_apart(program: str, *arguments: str, timeout: float) -> tuple[list[str], str]:
    """The lines that a program of Python prints in a fresh process, and why it failed, in words, or ""."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"{program}\nprint('\\n{DONE}', flush=True)", *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # so that it sees the same packages
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return [], f"its import takes more than {timeout:g} s (--timeout)"
    lines = done.stdout.decode(errors="replace").splitlines()
    if lines[-1:] == [DONE]:
        return lines[:-2], ""
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode == 1 and last:
        return lines, last
    code = signal.Signals(-done.returncode).name if done.returncode < 0 else f"code {done.returncode}"
    return lines, f"its import ends the process with {code}{last and f': {last}'}"


def check_plugins(timeout: float) -> list[tuple[Registry, str, str, str]]:
    """What third parties have registered, a few imported at a time: registry, name, owners, and why it is broken."""
    foreign = [
        (registry, name, " / ".join(entry.owner for entry in owners))
        for registry in REGISTRIES.values()
        for name, owners in registry.entries().items()
        if any(entry.owner != "linvit" for entry in owners)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = pool.map(lambda plugin: run_apart(CHECK, plugin[0].kind, plugin[1], timeout=timeout), foreign)
        return [(*plugin, reason) for plugin, (_, reason) in zip(foreign, found, strict=True)]


def check_import(registry: Registry, name: str, timeout: float) -> None:
    """Raises a `UserError` if a plug-in's name cannot be imported in time; nothing is done for any other name."""
    owners = [entry.owner for entry in registry.entries().get(name, []) if entry.registered is None]
    if len(owners) == 1 and owners != ["linvit"]:
        _, reason = run_apart(CHECK, registry.kind, name, timeout=timeout)
        if reason:
            raise UserError(f"{registry.kind} '{name}' of {owners[0]} cannot be imported: {reason}")
