"""Imports a plug-in in a process of its own, which may crash or hang, before `linvit check` does."""

import os
import signal
import subprocess
import sys

from linvit.errors import UserError
from linvit.registry import Registry

TIMEOUT = 60.0  # seconds for one import
CHECK = """
import sys
from linvit.errors import UserError
from linvit.registry import attentions, backbones
registries = {registry.kind: registry for registry in (attentions, backbones)}
try:
    registries[sys.argv[1]].get(sys.argv[2])
except UserError as error:
    cause = error.__cause__
    sys.exit((f"{type(cause).__name__}: {cause}" if cause else str(error)).partition("\\n")[0])
"""
DONE = "linvit: done"  # the last line of a program that has come to its end


def check_import(registry: Registry, name: str, timeout: float) -> None:
    """Raises a `UserError` if a plug-in's name cannot be imported in time; nothing is done for any other name."""
    owners = [entry.owner for entry in registry.entries().get(name, []) if entry.registered is None]
    third_party = len(owners) == 1 and owners != ["linvit"]
    if third_party and (reason := import_error(registry.kind, name, timeout)):
        raise UserError(f"{registry.kind} '{name}' of {owners[0]} cannot be imported: {reason}")


def import_error(kind: str, name: str, timeout: float) -> str:
    """Returns why a name cannot be imported in a fresh process within so many seconds, or ""."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", f"{CHECK}\nprint('\\n{DONE}', flush=True)", kind, name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},  # so that it sees the same packages
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {timeout:g} s (--timeout)"
    if done.stdout.decode(errors="replace").splitlines()[-1:] == [DONE]:
        return ""
    last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode == 1 and last:
        return last
    code = signal.Signals(-done.returncode).name if done.returncode < 0 else f"code {done.returncode}"
    return f"its import ends the process with {code}{last and f': {last}'}"
