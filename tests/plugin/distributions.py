"""Makes real distributions, metadata and all, for tests of plug-ins, and runs Python where they are installed."""

import importlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from linvit.registry import entries
from tests.cli.forked import Forked


def write_distribution(folder: Path, name: str, version: str, entry_points: str, **modules: str) -> None:
    """Installs a distribution into a folder as pip leaves it: modules beside a `.dist-info`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")


def forget_packages() -> None:
    """Lets linvit look for installed packages again."""
    entries.installed.cache_clear()
    entries.announced.cache_clear()


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None, timeout: float = 900):
    """Runs the interpreter of the tests on arguments, with `path` first on its PYTHONPATH."""
    search = [str(path)] if path else []
    search += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )


class Done(NamedTuple):
    """How a program has ended, and what it has printed."""

    returncode: int | None
    stdout: str


def forked(code: str, path: Path | None = None) -> Done:
    """Runs a program in a fork of this process that forgets linvit and its plug-ins, and sees `path` first.

    It stands for a new process where nothing is asked of torch's own import, which takes seconds.
    """

    def run() -> int:
        for name in [name for name in sys.modules if name.partition(".")[0].startswith("linvit")]:
            del sys.modules[name]
        sys.path[:0] = [str(path)] if path else []
        importlib.invalidate_caches()
        exec(code, {"__name__": "__main__"})
        return 0

    descriptor, name = tempfile.mkstemp()  # at the exit of the fork, temporary folders are removed
    os.close(descriptor)
    process = Forked(run, Path.cwd(), Path(name), dict(os.environ))
    code_of_exit = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    said = Path(name).read_text(encoding="utf-8")
    Path(name).unlink()
    return Done(code_of_exit, said)
