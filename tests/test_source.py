"""What can be read from a plug-in's source, and that reading it never runs it."""

import importlib
import sys

import pytest

from linvit import source
from linvit.registry import attentions, backbones, heads

TRAP = "raise SystemExit('this module was run')\n"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the module `written`, or the files of a package of that name, where Python looks for modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(written="", **files):
        for name, text in (files or {"": written}).items():
            path = tmp_path.joinpath("written", *name.split("_")).with_suffix(".py")
            path = tmp_path / "written" / "__init__.py" if name == "package" else path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield write
    assert not [name for name in sys.modules if name.startswith("written")], "the code was imported"
    importlib.invalidate_caches()
    source._parse.cache_clear()


def test_summary_and_documentation_of_a_class(write):
    write(written='"""Module.\n\nFormula."""\nclass A:\n    """Class A.\n\n    Args: none.\n    """\n' + TRAP)
    assert source.summary("written:A") == "Class A."
    assert source.documentation("written:A") == "Module.\n\nFormula.\n\nClass A.\n\nArgs: none."


def test_a_class_without_docstring_is_described_by_its_module(write):
    write(written='"""Module.\n\nMore."""\nclass A:\n    pass\n')
    assert source.summary("written:A") == "Module."
    assert source.documentation("written:A") == "Module.\n\nMore."


@pytest.mark.parametrize("target", ["written:A", "written:Missing", "no_such_module:A", "", ":", "math:sin", ".x:y"])
def test_nothing_to_say_is_an_empty_string(write, target):
    write(written="class A:\n    pass\n")
    assert source.summary(target) == ""
    assert source.documentation(target) == ""


def test_a_function_and_a_partial_and_a_reexport(write):
    write(
        package="from .inner import Inner as Outer\n" + TRAP,
        inner='"""Inner module."""\nclass Inner:\n    """Inner class."""\n' + TRAP,
        other='"""M."""\nfrom functools import partial\nfrom written.inner import Inner\n'
        'def build():\n    """Builds."""\n_base = partial(Inner, x=1)\nsmall = partial(_base, y=2)\n' + TRAP,
    )
    assert source.summary("written.other:build") == "Builds."
    assert source.summary("written.other:small") == "Inner class."
    assert source.summary("written:Outer") == "Inner class."
    assert source.documentation("written:Outer") == "Inner module.\n\nInner class."


def test_complexity_and_paper(write):
    write(
        package="from .inner import A as Outer\n" + TRAP,
        inner='"""Formula.\n\nPaper: Han et al. 2023, "A title of 2022", Eq. 1.\n"""\n'
        'class A:\n    """A."""\n    facts = Facts(complexity="O(N)")\n' + TRAP,
        typed='"""M."""\nfrom .inner import A as B\n'
        'class A(B):\n    facts = linvit.Facts(same_grid=True, complexity="O(N^2)")\n'
        "class C(A):\n    pass\n\nclass D(B):\n    pass\n",
    )
    assert source.complexity("written:Outer") == "O(N)"
    assert source.paper("written:Outer") == "Han et al. 2023"
    assert source.complexity("written.typed:A") == source.complexity("written.typed:C") == "O(N^2)"
    assert source.complexity("written.typed:D") == "O(N)"  # of the parent's file
    assert source.paper("written.typed:A") == ""


@pytest.mark.parametrize(
    "code",
    [
        "class A:\n    pass\n",
        "class A:\n    complexity = compute()\n",
        "class A:\n    complexity = None\n",
        "class A:\n    def f(self):\n        complexity = 'O(N)'\n",
        "def A():\n    complexity = 'O(N)'\n",
        "'Paper: to appear.'\nclass A: pass\n",
        "class (:\n",
    ],
)
def test_nothing_said_of_complexity_and_paper(write, code):
    write(written=code)
    assert source.complexity("written:A") == ""
    assert source.paper("written:A") == ""


def test_every_builtin_attention_tells_its_complexity_and_paper():
    for name in attentions.names():
        target = attentions.entries()[name][0].target
        assert source.complexity(target) == attentions.get(name).facts.complexity
        assert source.paper(target), name


def test_names_that_refer_to_each_other_end(write):
    write(written='"""Circle."""\nf = partial(g)\ng = partial(f)\n')
    assert source.summary("written:f") == "Circle."


def test_unreadable_source_is_not_an_error(write):
    write(written="class (:\n")
    assert source.summary("written:A") == ""


@pytest.mark.parametrize("registry", [attentions, backbones, heads], ids=lambda registry: registry.kind)
def test_every_builtin_has_a_summary(registry):
    for name, entries in registry.entries().items():
        for entry in entries:
            assert source.summary(entry.target), f"{name}: {entry.target} has no docstring"


def test_a_package_that_is_not_installed(write):
    write(package="", inner="class A: pass\n")
    assert source.missing_package("no_such_module.inner:A") == "no_such_module"
    for target in ("written.inner:A", "written.missing:A", "math:sin", "sys:exit", "torch._C:Generator", ""):
        assert source.missing_package(target) == ""


def test_namespace_packages_are_walked(write):
    write(part_inner='class A:\n    """In a namespace."""\n')
    assert source.summary("written.part.inner:A") == "In a namespace."


def test_no_warning_about_somebody_elses_source(write, recwarn):
    write(written='class A:\n    """A."""\n    pattern = "\\d"\n')
    assert source.summary("written:A") == "A."
    assert not recwarn.list
