"""Prepares a release: `make release` checks, builds and tries what would be uploaded, and uploads nothing.

`--citation` writes the references of CITATION.cff from the docstrings instead.
"""

import argparse
import ast
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAPER = re.compile(r'(\w[\w-]+)(?: and (\w[\w-]+)|( et al\.))? ((?:19|20)\d\d), "([^"]+)"')
SMOKE = (  # commands that an installed linvit must carry out, in an empty folder
    "linvit --version",
    "linvit list",
    "linvit fit --config quickstart --trainer.fast_dev_run=true --data.num_workers=0",
)
SUBSET = (  # tests of every part that leans on a dependency
    "tests/registry/test_registry.py",
    "tests/test_every_attention_in_every_family.py",
    "tests/attention/test_focused.py",
    "tests/attention/ops",
    "tests/layers/test_linear.py",
    "tests/backbones/timm/test_attention.py",
    "tests/heads/detection/test_golden_parts.py",
    "tests/tasks/test_graphs.py",
    "tests/test_roofline.py",
    "tests/runs/test_checkpoint.py",
    "tests/inference/test_model.py",
    "tests/cli/test_list.py",
    "tests/cli/test_export.py",
)
NEXT = """
{folder} has what can be uploaded; nothing was. What is left to do by hand:
  git tag -a v{version} -m "linvit {version}"    # at this commit, if it has no tag
  {twine} upload {folder}/*
  git push origin v{version}
"""


def references() -> list[dict[str, object]]:
    """The papers that docstrings of mechanisms, backbones and heads name, as CITATION.cff has them.

    A title that is the beginning of another of the same authors and year is a short form of it.
    """
    found = set()
    for room in ("attention", "backbones", "heads"):
        for path in (ROOT / "src/linvit" / room).rglob("*.py"):
            docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            found |= {match.groups("") for match in PAPER.finditer(" ".join(docstring.split()))}
    whole = [one for one in found if not any(two[:4] == one[:4] and two[4].startswith(one[4] + ":") for two in found)]
    return [
        {"type": "article", "title": title, "authors": authors(*names), "year": int(year)}
        for *names, year, title in sorted(whole, key=lambda one: (one[3], one[0], one[4]))
    ]


def authors(first: str, second: str, others: str) -> list[dict[str, str]]:
    """Authors in the form of CFF: what a docstring names of them."""
    second_one = [{"family-names": second}] if second else [{"name": "et al."}] if others else []
    return [{"family-names": first}, *second_one]


def write_citation() -> None:
    """Replaces the references of CITATION.cff."""
    path = ROOT / "CITATION.cff"
    head = path.read_text(encoding="utf-8").partition("references:\n")[0]
    body = yaml.safe_dump({"references": references()}, sort_keys=False, allow_unicode=True, width=1000)
    path.write_text(head + body, encoding="utf-8")


def version_problems(root: Path) -> Iterator[str]:
    """What pyproject.toml, CHANGELOG.md, CITATION.cff and the tag of the version say differently."""
    version = project(root)["version"]
    citation = yaml.safe_load((root / "CITATION.cff").read_text(encoding="utf-8"))
    if str(citation["version"]) != version:
        yield f"CITATION.cff is of {citation['version']}, pyproject.toml of {version}"
    unreleased, *blocks = re.split(r"^## ", (root / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    if unreleased.split() != ["Unreleased"]:
        yield f"CHANGELOG.md has lines under Unreleased: move them to the block of {version}"
    expected = f"{version} - {citation['date-released']}"
    if not blocks or blocks[0].splitlines()[0] != expected:
        yield f"the first block of CHANGELOG.md after Unreleased is not '## {expected}', as CITATION.cff says"
    tag = git(root, "rev-parse", "--verify", "--quiet", f"refs/tags/v{version}^{{commit}}", check=False)
    if tag and tag != git(root, "rev-parse", "HEAD"):
        yield f"the tag v{version} is of another commit: a version is released once, so raise it"


def project(root: Path) -> dict[str, object]:
    """The table `project` of pyproject.toml."""
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def git(root: Path, *arguments: str, check: bool = True) -> str:
    """What git prints."""
    done = subprocess.run(["git", *arguments], cwd=root, stdout=subprocess.PIPE, text=True, check=check)
    return done.stdout.strip()


def build(source: Path, folder: Path, epoch: str) -> dict[str, str]:
    """Builds the source distribution, and of it the wheel: the SHA-256 of each by its name.

    Both have the same bytes for the same files, `epoch` (seconds since 1970) and versions of setuptools and zlib.
    """
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(
        command, env={**os.environ, "SOURCE_DATE_EPOCH": epoch}, capture_output=True, text=True, umask=0o022
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}\nthe build failed")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def environment(folder: Path, resolution: str, *what: str) -> Path:
    """A fresh environment with the lowest or highest versions that are allowed: the path of its Python."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(BIN / "uv", "venv", "--quiet", "--python", sys.executable, folder)
    run(BIN / "uv", "pip", "install", "--python", python, "--resolution", resolution, *what)
    return python


def run(*command: object, cwd: Path | None = None) -> None:
    """Shows and runs a command; the release ends where one fails."""
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if code := subprocess.run(words, cwd=cwd, env=variables).returncode:
        raise SystemExit(f"ended with {code}: {shlex.join(words)}")


def smoke_test(python: Path) -> None:
    """Runs the commands of SMOKE with an installed linvit, away from the source."""
    with tempfile.TemporaryDirectory() as folder:
        for command in SMOKE:
            program, *arguments = command.split()
            run(python.parent / program, *arguments, cwd=Path(folder))


def dependencies(resolution: str) -> None:
    """Tests the wheel with the lowest or highest versions of all that pyproject.toml names."""
    with tempfile.TemporaryDirectory() as folder:
        build(ROOT, Path(folder, "dist"), "0")
        (wheel,) = Path(folder, "dist").glob("*.whl")
        python = environment(Path(folder, "environment"), resolution, "-r", ROOT / "pyproject.toml", "--extra", "dev")
        run(BIN / "uv", "pip", "install", "--python", python, "--no-deps", wheel)
        smoke_test(python)
        run(python, "-m", "pytest", "-q", "-n", "0", "-m", "not slow and not gpu", *SUBSET, cwd=ROOT)


def release() -> None:
    """All steps before an upload."""
    if changed := git(ROOT, "status", "--porcelain"):
        raise SystemExit(f"{changed}\ncommit or stash these first: a release is a commit")
    if problems := list(version_problems(ROOT)):
        raise SystemExit("\n".join(problems))
    version, epoch = project(ROOT)["version"], git(ROOT, "log", "-1", "--format=%ct")
    folder = ROOT / "dist" / version
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        run("git", "clone", "--quiet", ROOT, Path(place, "second"))
        run("git", "clone", "--quiet", ROOT, Path(place, "first"))
        first, second = (
            build(Path(place, "first"), folder, epoch),
            build(Path(place, "second"), Path(place, "b"), epoch),
        )
        if first != second:
            raise SystemExit(f"two builds of the same commit differ: {first}, {second}")
        print(
            "built twice, with the same bytes:",
            *(f"  {checksum}  {name}" for name, checksum in first.items()),
            sep="\n",
        )
        run(BIN / "twine", "check", "--strict", *folder.iterdir())
        smoke_test(environment(Path(place, "environment"), "highest", *folder.glob("*.whl")))
    print(NEXT.format(folder=folder.relative_to(ROOT), version=version, twine=BIN / "twine"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--citation", action="store_true", help="write the references of CITATION.cff")
    parser.add_argument("--dependencies", choices=["lowest-direct", "highest"], help="test with these versions instead")
    options = parser.parse_args()
    if options.citation:
        write_citation()
    elif options.dependencies:
        dependencies(options.dependencies)
    else:
        release()
