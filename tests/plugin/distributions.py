"""Makes real distributions, metadata and all, for tests of plug-ins, and runs Python where they are installed."""

import os
import subprocess
import sys
from pathlib import Path


def write_distribution(folder: Path, name: str, version: str, entry_points: str, **modules: str) -> None:
    """Installs a distribution into a folder as pip leaves it: modules beside a `.dist-info`."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None, timeout: float = 300):
    """Runs the interpreter of the tests on arguments, with `path` first on its PYTHONPATH."""
    search = [str(path)] if path else []
    search += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(search)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=cwd, capture_output=True, text=True, timeout=timeout
    )
