"""Adds what `pyproject.toml` cannot say: configurations in the package, a description for indexes, plain archives."""

import gzip
import os
import re
import shutil
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

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


class Sdist(sdist):
    """Packs a source distribution whose bytes follow from the contents of its files: no owners, one time for all."""

    def make_archive(
        self,
        base_name: str,
        format: str,
        root_dir: str | None = None,
        base_dir: str | None = None,
        owner: str | None = None,
        group: str | None = None,
    ) -> str:
        """Writes `base_name`.tar.gz of the folder `base_dir`, sorted by name, of the time SOURCE_DATE_EPOCH."""
        if format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        time = int(os.environ.get("SOURCE_DATE_EPOCH", 0))

        def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
            mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            return member.replace(uid=0, gid=0, uname="", gname="", mtime=time, mode=mode, deep=False)

        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as file,
            gzip.GzipFile("", "wb", fileobj=file, mtime=time) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as archive,
        ):
            archive.add(base_dir, filter=plain)
        return path


def description() -> str:
    """README without relative pictures, and with the text of relative links: they lead nowhere on an index's page."""
    return re.sub(LINK, r"\1", re.sub(PICTURE, "", (ROOT / "README.md").read_text(encoding="utf-8")))


setup(
    cmdclass={"build_py": BuildPy, "sdist": Sdist},
    long_description=description(),
    long_description_content_type="text/markdown",
)
