"""What a source distribution contains, and what a package index shows of it."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def metadata(tmp_path_factory):
    """The folder of what setuptools writes before it packs anything."""
    folder = tmp_path_factory.mktemp("metadata")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return folder / "linvit.egg-info"


def test_a_source_distribution_has_all_files_of_the_repository(metadata):
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git repository")
    packed = set((metadata / "SOURCES.txt").read_text(encoding="utf-8").splitlines())
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert tracked <= packed
    assert not [name for name in packed if name.endswith((".pyc", ".so", ".ckpt"))]


def test_what_make_docs_writes_is_not_packed():
    """A checkout in which the site was built makes the same distribution as a fresh one."""
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()
    left_out = {name for line in manifest if line.startswith(("prune ", "exclude ")) for name in line.split()[1:]}
    assert {line.rstrip("/") for line in ignored if line.startswith("docs/")} <= left_out


def test_the_page_of_an_index_has_no_links_to_files(metadata):
    page = (metadata / "PKG-INFO").read_text(encoding="utf-8").partition("\n\n")[2]
    assert page.lstrip().startswith("# ")
    targets = re.findall(r"\]\(([^)]*)\)", page)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "docs/architecture.md" in page  # the text of a link stays
