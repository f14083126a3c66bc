"""Imports run one way, downward: the table of floors in docs/architecture.md, read off the source."""

import ast
import functools
import re
from pathlib import Path

import pytest

import linvit
from linvit.cli import OWN
from tests.plugin.distributions import python

ROOT = Path(linvit.__file__).parent
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric", "torchmetrics", "jsonargparse"}
HEAVY = {"torch", "torchvision", "timm", "numpy", "datasets", "tensorboard"} | LIGHTNING

PAGE = (ROOT.parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+) \| (.+?) \|(.*)\|$", PAGE, re.MULTILINE)  # floor, parts, what they may import
FLOOR = {part: int(floor) for floor, parts, _ in ROWS for part in re.findall(r"`(\w+)`", parts)}
OPEN_TO_ALL = {part for _, parts, _ in ROWS if parts.endswith("open to all") for part in re.findall(r"`(\w+)`", parts)}


def without_lightning():
    """The parts whose modules import no Lightning."""
    return {"testing", *(part for part, floor in FLOOR.items() if floor <= 5)}


def may_import(part):
    """The parts of linvit that a part may import, besides itself and those that are open to all."""
    (words,) = [words for _, parts, words in ROWS if f"`{part}`" in parts]
    if "everything below" in words:
        return {other for other, floor in FLOOR.items() if floor < FLOOR[part]}
    return set(re.findall(r"`(\w+)`", words))


def part_of(path):
    """errors.py -> "errors", attention/linear.py -> "attention"."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@functools.cache
def imports(path):
    """Dotted names that a file imports anywhere, in functions too, but not for type checkers alone."""
    found = []
    package = ["linvit", *path.relative_to(ROOT).parent.parts]

    def visit(node):
        if isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.extend([f"linvit.{alias.name}" for alias in node.names] if module == "linvit" else [module])
        for child in ast.iter_child_nodes(node):
            if not type_checking(child):
                visit(child)

    visit(ast.parse(path.read_bytes()))
    return found


FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT or not path.name.startswith("__"))


def test_the_table_names_every_part_and_no_other():
    assert {part_of(path) for path in FILES} == FLOOR.keys()


def test_the_table_runs_downward():
    for part in FLOOR:
        for other in may_import(part):
            assert FLOOR[other] < FLOOR[part], f"{part} may import {other}"


def test_imports_run_downward():
    upward = []
    for path in FILES:
        allowed = may_import(part_of(path)) | OPEN_TO_ALL | {part_of(path)}
        for name in imports(path):
            top, _, rest = name.partition(".")
            if top == "linvit" and rest.partition(".")[0] not in allowed:
                upward.append(f"{path.relative_to(ROOT)} may not import {name}")
    assert upward == []


def test_check_alone_imports_the_kit():
    """Training, inference and evaluation work without `linvit.testing`."""
    named = {path for path in FILES if any(name.startswith("linvit.testing") for name in imports(path))}
    assert {path.relative_to(ROOT).as_posix() for path in named if part_of(path) != "testing"} == {"cli/check.py"}


def test_no_verb_imports_another():
    """What several verbs share is below them, or in a file of `cli` that is no verb."""
    verbs = {target.partition(":")[0].split(".")[2] for target in OWN.values()}
    found = []
    for path in (path for path in FILES if part_of(path) == "cli"):
        own = path.relative_to(ROOT / "cli").with_suffix("").parts[0]
        used = {name.split(".")[2] for name in imports(path) if name.startswith("linvit.cli.")}
        allowed = {own, "training"} if own == "__init__" else {own}
        found += [f"{path.relative_to(ROOT)} may not import the verb {one}" for one in (used & verbs) - allowed]
    assert found == []


def test_the_rooms_of_data_import_downward():
    """The data modules, base, sources, transforms, loading: in the order of the page, without a circle."""
    (order,) = re.findall(r"^Inside `data` the order is: one data module per task, (.+?)\. ", PAGE, re.MULTILINE)
    rooms = ["", *re.findall(r"`(\w+)`", order)]
    assert len(rooms) == 5
    for path in (path for path in FILES if part_of(path) == "data" and path.parent.name + path.stem != "data__init__"):
        room = path.relative_to(ROOT / "data").with_suffix("").parts[0]
        allowed = rooms[rooms.index(room if room in rooms else "") :]
        for name in imports(path):
            if name.startswith("linvit.data"):
                assert name.split(".")[2] in allowed, f"{path.relative_to(ROOT)} may not import {name}"


def test_the_mathematics_knows_no_lightning():
    mathematics = [path for path in FILES if part_of(path) in without_lightning()]
    assert [path for path in mathematics if {name.partition(".")[0] for name in imports(path)} & LIGHTNING] == []


@pytest.mark.parametrize(
    "name",
    ["errors.py", "__init__.py", "__main__.py", "cli/list.py"]
    + [f"registry/{name}.py" for name in ("__init__", "entries", "source", "signatures", "model_info", "removed")],
)
def test_what_must_stay_light_names_nothing_heavy(name):
    assert not {module.partition(".")[0] for module in imports(ROOT / name)} & HEAVY


def test_the_mathematics_imports_without_lightning():
    parts = without_lightning()
    modules = [
        f"linvit.{'.'.join(path.relative_to(ROOT).with_suffix('').parts)}".removesuffix(".__init__")
        for path in FILES
        if part_of(path) in parts
    ]
    code = (
        "import importlib, sys\n"
        f"for module in {modules!r}: importlib.import_module(module)\n"
        f"loaded = {LIGHTNING!r} & set(sys.modules)\nassert not loaded, loaded"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_floor_0_without_torch():
    done = python("-c", "import sys, linvit.errors, linvit.registry\nassert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def at_the_top(*names):
    """linvit's modules that these import at the top levels of the source, and what is not linvit's."""
    left, found, others = [*names], set(), set()
    while left:
        name = left.pop()
        path = ROOT.joinpath(*name.split(".")[1:])
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if name.partition(".")[0] != "linvit":
            others.add(name.partition(".")[0])
        elif name not in found and path.is_file():
            found.add(name)
            left.append(name.rpartition(".")[0])
            for node in ast.parse(path.read_bytes()).body:
                if isinstance(node, ast.ImportFrom):
                    left += [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
                elif isinstance(node, ast.Import):
                    left += [alias.name for alias in node.names]
    return found, others


def test_training_brings_no_code_of_other_tasks():
    """The modules that `linvit fit --config quickstart` imports."""
    named = ["tasks.classification", "data.classification", "callbacks.attention.measurement", "attention.focused"]
    modules = (f"linvit.{name}" for name in ["cli.training.command_line", "backbones.deit", *named])
    found, others = at_the_top(*modules)
    left_out = {"weights.layouts", "tasks.detection", "tasks.segmentation", "heads.detection"}
    assert not {f"linvit.{name}" for name in left_out} & found
    assert "linvit.runs.run" in found
    assert "matplotlib" not in others  # torchmetrics imports it where it is installed
    assert len(found) <= 180


def test_a_trained_network_is_used_without_libraries_of_data(tmp_path):
    """`linvit.load`, predict, export and push import neither `datasets`, with pyarrow and pandas, nor the parser."""
    code = """
import sys
import torch
import linvit
import linvit.cli.export, linvit.cli.push, linvit.cli.training.predict_files
from linvit.inference.description import ModelDescription, write_trained
from linvit.tasks import ClassificationTask

options = {"backbone": "deit_nano", "attention": "focused", "num_classes": 2, "img_size": 32}
whole = {"mean": [0.5] * 3, "std": [0.5] * 3, "size": [32, 32]}
task = f"{ClassificationTask.__module__}:{ClassificationTask.__qualname__}"
described = ModelDescription("1", task, options, "raw", whole)
write_trained("net.safetensors", ClassificationTask(**options).network, described)
assert linvit.load("net.safetensors")(torch.zeros(3, 40, 40, dtype=torch.uint8)).scores
loaded = {"datasets", "pyarrow", "pandas", "jsonargparse"} & set(sys.modules)
assert not loaded, loaded
"""
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    _, others = at_the_top("linvit.inference.model", "linvit.inference.export", "linvit.inference.hub")
    assert "matplotlib" not in others  # torchmetrics imports it where it is installed
