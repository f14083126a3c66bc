"""Imports what a plug-in registers in a process of its own: it may exit, hang or crash."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from linvit.errors import UserError
from linvit.registry import Registry, attentions, backbones, heads

TIMEOUT = 60.0  # seconds for one import
REGISTRIES = {registry.kind: registry for registry in (attentions, backbones, heads)}

# The answer is the last line that it prints.
CHECK = """
import json, sys
from linvit.cli.import_check import REGISTRIES, reason_to_reject
reason = reason_to_reject(REGISTRIES[sys.argv[1]], sys.argv[2])
print()
print(json.dumps({"reason": reason}), flush=True)
"""


def reason_to_reject(registry: Registry, name: str) -> str | None:
    """Imports a registered name; returns why it cannot be used, or None if it can."""
    try:
        registry.get(name)
    except UserError as error:
        cause = error.__cause__
        reason = f"{type(cause).__name__}: {cause}" if cause else str(error)
        return reason.partition("\n")[0]
    return None


def run_apart(program: str, *arguments: str, timeout: float) -> tuple[list[str], str]:
    """The lines that a program of Python prints in a fresh process, and how that ended, in words.

    Args:
        program: Its text.
        arguments: Of the program.
        timeout: Seconds after which it is ended.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program, *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # so that it sees the same packages
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace").splitlines(), f"takes more than {timeout:g} s (--timeout)"
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    code = signal.Signals(-done.returncode).name if done.returncode < 0 else f"code {done.returncode}"
    return done.stdout.decode(errors="replace").splitlines(), f"ends the process with {code}{last and f': {last}'}"


def why_not(registry: Registry, name: str, timeout: float) -> str | None:
    """Why a fresh process cannot import a name within so many seconds, or None."""
    lines, ending = run_apart(CHECK, registry.kind, name, timeout=timeout)
    try:
        reason: str | None = json.loads(lines[-1])["reason"]
    except (ValueError, IndexError, KeyError, TypeError):
        return f"its import {ending}"
    return reason


def check_plugins(
    registries: Iterable[Registry], timeout: float, pattern: str = "*"
) -> list[tuple[Registry, str, str, str | None]]:
    """What third parties have registered, a few imported at a time: registry, name, owners, and why it is broken."""
    foreign = [
        (registry, name, " / ".join(entry.owner for entry in registry.entries()[name]))
        for registry in registries
        for name in registry.names(pattern)
        if any(entry.owner != "linvit" for entry in registry.entries()[name])
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        reasons = pool.map(lambda plugin: why_not(plugin[0], plugin[1], timeout), foreign)
        return [(*plugin, reason) for plugin, reason in zip(foreign, reasons, strict=True)]


def check_import(registry: Registry, name: str, timeout: float) -> None:
    """Raises a `UserError` if a plug-in's name cannot be imported in time; nothing is done for any other name."""
    owners = [entry.owner for entry in registry.entries().get(name, []) if entry.registered is None]
    if len(owners) == 1 and owners != ["linvit"] and (reason := why_not(registry, name, timeout)):
        raise UserError(f"{registry.kind} '{name}' of {owners[0]} cannot be imported: {reason}")
