"""What a release holds, that two builds of it are equal, and what `make release` checks before it builds."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from safetensors import safe_open

from linvit.registry import attentions, backbones
from tests.helpers import own_names

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
NOT_PACKED = (
    "docs/_build/html/index.html",
    "docs/reference/attentions.md",
    ".venv/bin/python",
    "checkpoints/a/last.ckpt",
)


@pytest.fixture
def release(monkeypatch):
    """The script of `make release`."""
    monkeypatch.syspath_prepend(ROOT / ".ci")
    import release

    return release


def test_the_notice_names_every_program_that_golden_files_are_from():
    lines = (ROOT / "NOTICE").read_text(encoding="utf-8").splitlines()
    named = [line.split(maxsplit=1) for line in lines if re.match(r"[\w-]+/[\w.-]+ ", line)]
    assert all(len(one) == 2 for one in named)
    sources = set()
    for path in sorted((ROOT / "tests/golden").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            reference = json.loads(file.metadata()["golden"])["reference"]
        for one in reference if isinstance(reference, list) else [reference]:
            sources.add(one if isinstance(one, str) else one.get("source") or one["repository"])
    programs = {one.partition(" ")[0] for one in sources if "/" in one}  # others are listings of papers
    assert len(programs) > 40
    assert programs - {name for name, _ in named} == set()


def test_the_citation_names_the_papers_of_the_docstrings(release):
    """`python .ci/release.py --citation` writes what this asks for."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["references"] == release.references()
    titles = {paper["title"] for paper in citation["references"]}
    for registry in (attentions, backbones):
        for name in own_names(registry):
            if cited := registry.describe(name).citation:
                assert ast.literal_eval(cited[cited.index('"') :]) in titles, name


def test_the_citation_is_valid():
    """By the schema of CFF 1.2.0, of what it uses."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    for paper in citation["references"]:
        assert paper.keys() == {"type", "title", "authors", "year"}
        assert (paper["type"], type(paper["year"])) == ("article", int)
        assert all(author.keys() in ({"name"}, {"family-names"}) for author in paper["authors"])


@pytest.fixture
def versions(tmp_path):
    """A repository whose three files agree: the folder, and a function that changes one of them."""
    write = {
        "pyproject.toml": '[project]\nversion = "1.2"\n',
        "CITATION.cff": "version: 1.2\ndate-released: 2026-01-02\n",
        "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n## 1.2 - 2026-01-02\n- Something.\n",
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    commit(tmp_path)
    return tmp_path, lambda name, old, new: (tmp_path / name).write_text(
        write[name].replace(old, new), encoding="utf-8"
    )


def commit(folder):
    """Makes a repository of a folder, or one more commit."""
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false", *words],
            cwd=folder,
            check=True,
        )


@pytest.mark.parametrize(
    ("name", "old", "new", "said"),
    [
        ("pyproject.toml", "1.2", "1.3", "CITATION.cff is of 1.2, pyproject.toml of 1.3"),
        ("CHANGELOG.md", "Unreleased\n", "Unreleased\n- New.\n", "lines under Unreleased"),
        ("CHANGELOG.md", "1.2 -", "1.1 -", "is not '## 1.2 - 2026-01-02'"),
        ("CITATION.cff", "01-02", "01-03", "is not '## 1.2 - 2026-01-03'"),
    ],
)
def test_a_version_is_the_same_everywhere(release, versions, name, old, new, said):
    folder, change = versions
    assert list(release.version_problems(folder)) == []
    change(name, old, new)
    assert said in "\n".join(release.version_problems(folder))


def test_a_version_is_released_once(release, versions):
    folder, _ = versions
    subprocess.run(["git", "tag", "v1.2"], cwd=folder, check=True)
    assert list(release.version_problems(folder)) == []
    commit(folder)
    assert "v1.2 is of another commit" in "\n".join(release.version_problems(folder))


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    """Two copies of the project without golden files, which take long; with files that are not to be packed.

    Their files have other times and rights.
    """
    places = [tmp_path_factory.mktemp("project") / "linvit" for _ in range(2)]
    left_out = shutil.ignore_patterns(".*", "golden", "__pycache__", "_build", "build", "dist", "*.egg-info", "*.ckpt")
    for place in places:
        shutil.copytree(ROOT, place, ignore=left_out)
        for name in (".ci", ".github"):
            shutil.copytree(ROOT / name, place / name, ignore=left_out)
        for name in (".gitignore", ".pre-commit-config.yaml"):
            shutil.copy(ROOT / name, place)
        for name in NOT_PACKED:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).touch()
    for path in (places[1] / "src").rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (0, 1e9))
    return places


@pytest.fixture(scope="module")
def built(copies, tmp_path_factory):
    """The folder of what one build makes, and the checksums of both builds."""
    sys.path.insert(0, str(ROOT / ".ci"))
    from release import build

    sys.path.pop(0)
    folders = [tmp_path_factory.mktemp("dist") for _ in copies]
    return folders[0], [build(copy, folder, "1700000000") for copy, folder in zip(copies, folders, strict=True)]


@pytest.mark.slow
def test_two_builds_are_equal(built):
    _, (first, second) = built
    stem = f"linvit-{PROJECT['version']}"
    assert first.keys() == {f"{stem}.tar.gz", f"{stem}-py3-none-any.whl"}
    assert first == second


@pytest.mark.slow
def test_a_source_distribution_has_what_a_reader_needs(built):
    (path,) = built[0].glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "NOTICE",
        "LICENSE",
        "CITATION.cff",
        "Makefile",
        "docs/conf.py",
        "tests/test_release.py",
        ".ci/run",
    } <= names
    assert names & {*NOT_PACKED} == set()
    assert [name for name in names if name.startswith((".venv", "docs/_build", "checkpoints/a"))] == []


@pytest.mark.slow
def test_a_wheel_has_all_files_of_the_package(built):
    (path,) = built[0].glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        metadata = archive.read(f"linvit-{PROJECT['version']}.dist-info/METADATA").decode()
    inside = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/linvit").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    inside |= {f"linvit/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*") if path.is_file()}
    assert {"linvit/py.typed", "linvit/backbones/models.csv", "linvit/configs/quickstart.yaml"} <= inside <= names
    info = f"linvit-{PROJECT['version']}.dist-info"
    outside = {name for name in names - inside if not name.startswith(f"{info}/")}
    assert outside == set()
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= names
    assert "License-File: NOTICE" in metadata


@pytest.mark.slow
def test_an_installed_wheel_works(built, release, tmp_path):
    """Its commands, away from the source."""
    (wheel,) = built[0].glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    for command in release.SMOKE:
        words = [sys.executable, "-m", *command.split()]
        variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
        done = subprocess.run(words, cwd=tmp_path / "empty", env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    where = [sys.executable, "-c", "import linvit; print(linvit.__file__)"]
    done = subprocess.run(where, cwd=tmp_path / "empty", env=variables, capture_output=True, text=True)
    assert done.stdout.startswith(str(tmp_path / "site"))
