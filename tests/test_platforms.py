"""What linvit needs of a machine: packages that are declared, and no module that only Unix has."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import linvit
from tests.plugin.distributions import forked

ROOT = Path(linvit.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
UNIX_ONLY = ("resource", "fcntl", "pwd", "grp", "termios", "posix", "pty", "syslog")


def normalised(name):
    """As package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def opens_text_without_encoding(call):
    """Whether a call opens, reads or writes a text file in the encoding of the machine."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    owner = getattr(getattr(call.func, "value", None), "id", None)
    if isinstance(call.func, ast.Name) and name in ("read_text", "write_text"):  # those of linvit.io.reading and files
        return False
    if name not in ("open", "read_text", "write_text", "fdopen") or owner in (
        "Image",
        "fsspec",
        "os",
        "rasterio",
        "tarfile",
        "zipfile",
    ):
        return False
    modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    modes += [word.value.value for word in call.keywords if word.arg == "mode"]
    binary = any("b" in mode and set(mode) <= set("rwaxb+") for mode in modes)
    words = {word.arg for word in call.keywords}
    return not binary and not words & {"encoding", "driver"}  # a raster has a driver


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("open(p)", True),
        ("p.open('w', newline='')", True),
        ("p.read_text()", True),
        ("p.write_text('a')", True),
        ("open(p, 'rb')", False),
        ("p.open(mode='wb')", False),
        ("p.write_text('a', encoding='utf-8')", False),
        ("Image.open(p)", False),
    ],
)
def test_the_test_of_encodings_sees(code, found):
    assert opens_text_without_encoding(calls(ast.parse(code))[0]) is found


def test_text_is_utf_8_on_every_machine():
    found = [
        f"{name}, line {call.lineno}"
        for name, path in FILES.items()
        for call in calls(ast.parse(path.read_bytes()))
        if opens_text_without_encoding(call)
    ]
    assert found == []


def test_commands_to_copy_have_slashes():
    """A path with backslashes would be quoted in a way that Windows' own shell does not know."""
    found = [name for name, path in FILES.items() if "quote(str(" in path.read_text(encoding="utf-8")]
    assert found == []


def test_every_module_is_imported_without_what_only_unix_has():
    """Only linvit's own imports are refused: its dependencies have their own ways on other systems."""
    modules = [f"linvit.{name.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__") for name in FILES]
    modules.remove("linvit.__main__")
    code = (
        "import builtins, importlib\n"
        "own = builtins.__import__\n"
        "def refuse(name, globals=None, *rest, **more):\n"
        "    if (globals or {}).get('__name__', '').partition('.')[0] == 'linvit' and "
        f"name.partition('.')[0] in {UNIX_ONLY!r}:\n"
        "        raise ModuleNotFoundError(f'{name} is for Unix only, and {globals[\"__name__\"]} imports it')\n"
        "    return own(name, globals, *rest, **more)\n"
        "builtins.__import__ = refuse\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
    )
    done = forked(code)
    assert done.returncode == 0, done.stdout


def test_what_is_imported_is_declared():
    """Directly used packages are dependencies of their own, even if others bring them along."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {normalised(re.split(r"[\[<>=]", requirement)[0]) for requirement in project["dependencies"]}
    imported = set()
    for path in FILES.values():
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
    # pytest runs the suites that use the kit, and triton comes with torch where it can run
    imported -= {*sys.stdlib_module_names, "linvit", "pytest", "triton"}
    optional = [
        package
        for extra in ("ray", "slurm", "detection", "geo", "export", "transformers")
        for package in project["optional-dependencies"][extra]
    ]
    extras = {normalised(re.split(r"[<>=]", package)[0]) for package in optional}
    assert extras - {"onnx", "onnxruntime"} <= {normalised(name) for name in imported}  # these are imported by name
    imported = {name for name in imported if normalised(name) not in extras}  # they need not be installed
    owners = packages_distributions()
    undeclared = {name for name in imported if not {normalised(owner) for owner in owners[name]} & declared}
    assert undeclared == set()
    brought = {normalised(owner) for name in imported for owner in owners[name]} | {"tensorboard"}  # Lightning's logger
    assert declared - brought == set(), "declared and not imported"
