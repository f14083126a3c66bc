"""Imports what a plug-in registers in a process of its own: it may exit, hang or crash."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from linvit.errors import UserError
from linvit.registry import Registry, attentions, backbones, heads

TIMEOUT = 60.0  # seconds for one import
REGISTRIES = {registry.kind: registry for registry in (attentions, backbones, heads)}

CHECK = """
import sys
from linvit.cli.import_check import REGISTRIES, UserError
try:
    REGISTRIES[sys.argv[1]].get(sys.argv[2])
except UserError as error:
    cause = error.__cause__
    sys.exit((f"{type(cause).__name__}: {cause}" if cause else str(error)).partition("\\n")[0])
"""
DONE = "linvit: done"  # the last line of a program that has come to its end


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
