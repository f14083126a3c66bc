"""Imports what a plug-in registers in a process of its own: it may exit, hang or crash."""

import json
import os
import subprocess
import sys

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


def why_not(registry: Registry, name: str, timeout: float) -> str | None:
    """Why a fresh process cannot import a name within so many seconds, or None."""
    paths = os.pathsep.join(sys.path)  # so that it sees the packages that are seen here
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", CHECK, registry.kind, name],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
        )
        reason: str | None = json.loads(process.stdout.splitlines()[-1])["reason"]
    except subprocess.TimeoutExpired:
        return f"its import takes more than {timeout:g} s (--timeout)"
    except (ValueError, IndexError, KeyError, TypeError):
        last = process.stderr.strip().rpartition("\n")[2]
        return f"its import ends the process with code {process.returncode}{last and f': {last}'}"
    return reason


def check_import(registry: Registry, name: str, timeout: float) -> None:
    """Raises a `UserError` if a plug-in's name cannot be imported in time; nothing is done for any other name."""
    owners = [entry.owner for entry in registry.entries().get(name, []) if entry.registered is None]
    if len(owners) == 1 and owners != ["linvit"] and (reason := why_not(registry, name, timeout)):
        raise UserError(f"{registry.kind} '{name}' of {owners[0]} cannot be imported: {reason}")
