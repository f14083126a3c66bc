"""What can be read from a plug-in's source, and that reading it never runs it."""

import importlib
import sys

import pytest

from linvit import source
from linvit.registry import attentions, backbones, heads

MISSING = "ModuleNotFoundError: No module named 'no_such_thing'"
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
    source._parse_file.cache_clear()


# Documentation


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
        'class A:\n    """A."""\n    complexity = "O(N)"\n' + TRAP,
        typed='"""M."""\nclass A:\n    complexity: str = "O(N^2)"\n',
    )
    assert source.complexity("written:Outer") == "O(N)"
    assert source.paper("written:Outer") == "Han et al. 2023"
    assert source.complexity("written.typed:A") == "O(N^2)"
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
        assert source.complexity(target) == attentions.get(name).complexity
        assert source.paper(target), name


def test_names_that_refer_to_each_other_end(write):
    write(written='"""Circle."""\nf = partial(g)\ng = partial(f)\n')
    assert source.summary("written:f") == "Circle."


def test_unreadable_source_is_not_an_error(write):
    write(written="class (:\n")
    assert source.summary("written:A") == ""


@pytest.mark.parametrize("registry", [attentions, backbones, heads], ids=lambda registry: registry.kind)
def test_every_builtin_has_a_summary_and_no_problem(registry):
    for name, entries in registry.entries().items():
        for entry in entries:
            assert source.summary(entry.target), f"{name}: {entry.target} has no docstring"
            assert source.problem(entry.target) is None


# Problems that can be told


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1\ndef (:\n", "written, line 2: SyntaxError: "),
        (
            "\nimport no_such_thing.deeper as A\n",
            "written, line 2: ModuleNotFoundError: No module named 'no_such_thing'",
        ),
        ("from no_such_thing import A\n", "written, line 1: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("from .sibling import A\n", "written, line 1: ModuleNotFoundError: "),
        ("class A: pass\nraise ImportError('no licence')\n", "written, line 2: raise ImportError('no licence')"),
        ("import sys\nclass A: pass\nsys.exit(1)\n", "written, line 3: sys.exit(1)"),
        ("class A: pass\nexit()\n", "written, line 2: exit()"),
        ("class A: pass\nquit()\n", "written, line 2: quit()"),
        ("class B:\n    def a(self): pass\n", "module 'written' defines no 'A'"),
        ("", "module 'written' defines no 'A'"),
        ("A = 42\n", "'A' in module 'written' is 42, not a class"),
    ],
)
def test_a_certain_failure_is_told_with_its_place(write, code, reason):
    write(written=code)
    assert (source.problem("written:A") or "").startswith(reason)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("no_such_module:A", "there is no module 'no_such_module'"),
        ("written.missing:A", "there is no module 'written.missing'"),
        ("written.inner.deeper:A", "there is no module 'written.inner.deeper'"),
        ("written.inner", "'written.inner' names no class"),
        ("written.inner:", "'written.inner:' names no class"),
        ("", "'' names no class"),
        ("..:A", "there is no module ''"),
    ],
)
def test_a_target_that_leads_nowhere(write, target, reason):
    write(package="", inner="class A: pass\n")
    assert (source.problem(target) or "").startswith(reason)


def test_a_parent_package_is_run_too(write):
    write(package="\nimport no_such_thing\n", inner="class A: pass\n")
    assert source.problem("written.inner:A") == f"written, line 2: {MISSING}"


def test_relative_imports_are_followed(write):
    write(
        package="from . import inner\nfrom .inner import A\n",
        inner="from .deep.leaf import A\nfrom . import anything_at_all\n",
        deep_leaf="from ..inner import A\nfrom ...outside import B\n",
    )
    assert source.problem("written:A") is None
    assert source.problem("written.inner:A") is None
    assert "ModuleNotFoundError" in (source.problem("written.deep.leaf:A") or "")


# What cannot be told is not told


@pytest.mark.parametrize(
    "code",
    [
        "class A: pass\n",
        "def A(): pass\n",
        "A = make()\n",
        "A: type = object\n",
        "from json import JSONDecoder as A\n",
        "import json as A\n",
        "from json import *\n",
        "def __getattr__(name): return 1\n",
        "globals()['A'] = 1\n",
        "def define():\n    global A\n    A = int\ndefine()\n",
        "if True:\n    class A: pass\n",
        "try:\n    from no_such_thing import A\nexcept ImportError:\n    A = None\n",
        "A = None\nif True:\n    A = int\n",
        "for A in (int,): pass\n",
        "class A: pass\nif False:\n    raise ImportError\n",
        "class A: pass\nif __name__ == '__main__':\n    import sys\n    sys.exit()\n",
        "class A: pass\ndef exit(): pass\nexit()\n",
        "class A: pass\ndef f():\n    import no_such_thing\n    raise ValueError\n",
        "class A: pass\nif False:\n    import no_such_thing\n",
        "import sys\nsys.path.append('vendored')\nimport vendored_thing\nclass A: pass\n",
        "import sys\nsys.modules['made_up'] = sys\nimport made_up\nclass A: pass\n",
        "from __future__ import annotations\nimport os.path\nimport sys, builtins\nclass A: pass\n",
        "class A: '\\d'\n",
    ],
)
def test_what_may_work_is_not_called_broken(write, code):
    write(written=code)
    assert source.problem("written:A") is None


def test_compiled_and_builtin_modules_are_left_alone():
    assert source.problem("math:sin") is None
    assert source.problem("sys:exit") is None
    assert source.problem("torch._C:Generator") is None


def test_namespace_packages_are_walked(write):
    write(part_inner='class A:\n    """In a namespace."""\n')
    assert source.problem("written.part.inner:A") is None
    assert source.summary("written.part.inner:A") == "In a namespace."


def test_a_submodule_reached_through_its_package(write):
    write(package="from written.inner import A\n", inner="class A: pass\n")
    assert source.problem("written:inner.A") is None


def test_no_warning_about_somebody_elses_source(write, recwarn):
    write(written="class A:\n    pattern = '\\d'\n")
    assert source.problem("written:A") is None
    assert not recwarn.list
