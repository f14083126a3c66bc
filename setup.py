"""Adds what `pyproject.toml` cannot say: a wheel has the folder `configs` within the package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies `configs` to `linvit/configs`; an editable install reads the folder where it is."""

    def run(self) -> None:
        """Builds the package, then adds the configurations."""
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib, "linvit", "configs")
            shutil.rmtree(packaged, ignore_errors=True)
            shutil.copytree(Path(__file__).parent / "configs", packaged)


setup(cmdclass={"build_py": BuildPy})
