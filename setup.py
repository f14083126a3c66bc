"""Adds what `pyproject.toml` cannot say: configurations within the package, a description for package indexes."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
PICTURE, LINK = r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n?", r"\[([^\]]*)\]\((?!https?:)[^)]*\)"


class BuildPy(build_py):
    """Copies `configs` to `linvit/configs`; an editable install reads the folder where it is."""

    def run(self) -> None:
        """Builds the package, then adds the configurations."""
        super().run()
        if not self.editable_mode:
            packaged = Path(self.build_lib, "linvit", "configs")
            shutil.rmtree(packaged, ignore_errors=True)
            shutil.copytree(ROOT / "configs", packaged)


def description() -> str:
    """README without relative pictures, and with the text of relative links: they lead nowhere on an index's page."""
    return re.sub(LINK, r"\1", re.sub(PICTURE, "", (ROOT / "README.md").read_text(encoding="utf-8")))


setup(
    cmdclass={"build_py": BuildPy},
    long_description=description(),
    long_description_content_type="text/markdown",
)
