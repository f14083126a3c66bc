"""The names that users, configurations and plug-ins rely on. A change here is a change of the public interface."""

import importlib
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import linvit
from tests.helpers import own_names
from tests.plugin.distributions import python

GROUPS = {
    "linvit.attentions": "attention",
    "linvit.backbones": "backbone",
    "linvit.heads": "head",
    "linvit.attention_kernels": "attention_kernel",
}


def test_public_names():
    for name in linvit.__all__:
        assert getattr(linvit, name) is not None
        assert name in dir(linvit)
    with pytest.raises(AttributeError, match="no_such_name"):
        linvit.no_such_name  # noqa: B018


MODULES = ("analysis", "backbones", "callbacks", "data", "image_size", "layers", "tasks", "testing")


def shown():
    """The names of linvit that the documents show, with their modules: imported, or written out."""
    root = Path(__file__).parent.parent
    for path in [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for module, names in re.findall(r"^from (linvit[\w.]*) import (.+)$", text, re.MULTILINE):
            yield from ((module, name.strip()) for name in names.split(","))
        for name in re.findall(r"\blinvit((?:\.\w+)+)(?=\(|`)", text):
            yield f"linvit{name.rpartition('.')[0]}", name.rpartition(".")[2]


def test_what_documents_show_is_public():
    found = set(shown())
    assert len(found) > 20
    registries = {
        group.removeprefix("linvit.") for group in (*GROUPS, "linvit.verbs")
    }  # which documents name as entry points
    public = {"linvit": {*linvit.__all__, *MODULES, *registries}}
    for module in (*MODULES, "attention.kernels"):
        public[f"linvit.{module}"] = set(importlib.import_module(f"linvit.{module}").__all__)
    own = {f"{module}.{name}" for module, names in public.items() for name in names} | public.keys()
    assert {f"{module}.{name}" for module, name in found} - own == set()
    assert all(
        hasattr(importlib.import_module(module), n) for module, names in public.items() for n in names - registries
    )


@pytest.mark.parametrize(
    "registry", [linvit.registry.attentions, linvit.registry.backbones, linvit.registry.heads], ids=lambda r: r.kind
)
def test_every_builtin_can_be_imported(registry):
    own = own_names(registry)
    assert own
    for name in own:
        assert callable(registry.get(name)), name


def test_the_installed_entry_points_are_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for group, points in project["entry-points"].items():
        installed = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "linvit"}
        assert installed == points, "stale installation: run pip install -e . again"


def test_import_linvit_imports_no_torch():
    code = (
        "import sys, linvit\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning', 'jsonargparse', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "from linvit import Grid\n"
        "assert 'torch' in sys.modules\n"
        "assert 'lightning' not in sys.modules"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
