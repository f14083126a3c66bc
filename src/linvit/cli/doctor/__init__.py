"""`linvit doctor`: what an installation and its machine have, what is wrong with them, and how to fix it."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from linvit import entries, machine
from linvit.cli.doctor import probe
from linvit.cli.doctor.probe import ProbeResult, Problem
from linvit.cli.import_check import REGISTRIES, TIMEOUT, check_plugins
from linvit.errors import UserError, check_number
from linvit.plain_text import printable
from linvit.runs.folder import check_writable
from linvit.terminal import argument_parser, entry

GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = GIB // 4  # two loader processes with batches of 128 images of 224 pixels
LEAST_DISK = 2 * GIB  # two checkpoints of a large model


def main(argv: list[str]) -> int:
    """Runs `linvit doctor`; returns 1 if something is wrong, else 0. No torch is imported in this process."""
    parser = argument_parser("linvit doctor", __doc__)
    parser.add_argument("--output", type=Path, default=Path("checkpoints"), metavar="FOLDER", help="where runs save")
    parser.add_argument(
        "--timeout", type=float, default=2 * TIMEOUT, metavar="SECONDS", help="for one import (default: %(default)g)"
    )
    args = parser.parse_args(argv)
    check_number("--timeout", args.timeout, above=0)
    problems = [*_installation(), *_machine(args.output)]
    report = probe.examine(args.timeout)
    problems += report.problems
    _devices(report)
    if report.torch:
        problems += _plugins(args.timeout)
    else:
        _show("plug-ins", "not looked at: they need torch")
    print(f"\n{len(problems)} found to be wrong" if problems else "\nnothing is wrong")
    for number, (what, remedy) in enumerate(problems, 1):
        _show(f"  {number}.", what, 6)
        _show("", remedy, 6)
    return int(bool(problems))


def _installation() -> Iterator[Problem]:
    """Shows Python and the packages; finds those that are missing or too old."""
    _show("linvit", f"{installed('linvit') or 'not installed'} in {Path(__file__).parents[2]}")
    _show("python", f"{platform.python_version()} on {platform.platform(terse=True)}, {sys.executable}")
    needed = requirements()
    if not needed:
        yield Problem("linvit itself is not installed, so its plug-ins and names are unknown", "pip install linvit")
        return
    _show("packages", ", ".join(f"{one.name} {installed(one.name) or 'missing'}" for one in needed[""]))
    for extra in sorted({*needed} - {""}):
        missing = [one.name for one in needed[extra] if installed(one.name) is None]
        _show(f"[{extra}]", f"missing: {', '.join(missing)}" if missing else "installed")
    least = metadata.metadata("linvit")["Requires-Python"] or ""
    if platform.python_version() not in SpecifierSet(least, prereleases=True):
        yield Problem(f"Python {platform.python_version()} is not what linvit needs ({least})", "use another one")
    for one in needed[""]:
        version, remedy = installed(one.name), f"pip install '{one.name}{one.specifier}'"
        if version is None:
            yield Problem(f"{one.name} is not installed", remedy)
        elif Version(version).base_version not in one.specifier:  # 2.11.0+cu132 and 2.11rc1 are taken for 2.11
            yield Problem(f"{one.name} {version} does not fit linvit, which needs {one.name}{one.specifier}", remedy)


def requirements() -> dict[str, list[Requirement]]:
    """What linvit's own metadata declares by optional group, of which "" is none; empty if it is not installed."""
    found: dict[str, list[Requirement]] = {}
    try:
        declared = [Requirement(line) for line in metadata.requires("linvit") or []]
    except metadata.PackageNotFoundError:
        return found
    extras = metadata.metadata("linvit").get_all("Provides-Extra") or []
    for one in declared:
        groups = [extra for extra in ("", *extras) if one.marker is None or one.marker.evaluate({"extra": extra})]
        for group in groups[:1]:
            found.setdefault(group, []).append(one)
    return found


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
            yield Problem(
                f"{SHARED_MEMORY} has {usage.free / 2**20:.0f} MiB free, in which loader processes hand over batches",
                "docker run --shm-size=8g, or --ipc=host; or set --data.num_workers=0",
            )
    try:
        temporary = Path(tempfile.gettempdir())
    except OSError:
        yield Problem("there is no folder for temporary files", "set TMPDIR to one that can be written to")
        temporary = output
    for name, folder in (("output", output), ("temporary", temporary)):
        free = machine.free_disk(folder)
        _show(name, f"{free / GIB:.1f} GiB free for {folder}")
        if free < LEAST_DISK:
            yield Problem(f"the disk of {folder} has {free / GIB:.1f} GiB free", "delete old runs, or use another disk")
        try:
            check_writable(folder)
        except UserError as error:
            yield Problem(str(error), "chmod u+w, or --trainer.default_root_dir=FOLDER")


def _devices(report: ProbeResult) -> None:
    """Shows torch and its devices."""
    _show("torch", report.torch or "cannot be imported")
    devices = report.devices or ["cpu; float32, bf16-mixed (often slower)"] * bool(report.torch)
    for number, device in enumerate(devices):
        _show("" if number else "devices", device)


def _plugins(timeout: float) -> Iterator[Problem]:
    """Shows what third parties offer, each imported in a process of its own; finds what cannot be used."""
    plugins = check_plugins(REGISTRIES.values(), timeout)
    for number, (registry, name, owner, reason) in enumerate(plugins):
        state = "broken, see below" if reason else "ok"
        _show("" if number else "plug-ins", f"{registry.kind} {name} ({owner}): {state}")
        if reason:
            yield Problem(f"{registry.kind} '{name}' of {owner}: {reason}", f"fix or uninstall {owner}")
    if not plugins:
        _show("plug-ins", "none")
    for where in sorted(entries.malformed):
        yield Problem(f"the entry_points.txt of {where} is malformed", "install that package again, or uninstall it")


def _show(name: str, text: str, column: int = 14) -> None:
    print("\n".join(entry(name, printable(text, lines=False), column)), flush=True)
