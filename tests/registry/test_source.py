"""What docstrings say of a name: linvit's own are read, those of other packages are imported."""

import functools
import gc
import importlib
import sys

import pytest

import linvit
from linvit.registry import attentions, backbones, heads, source


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes the module `written` where Python looks for modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "written.py").write_text(text)
        importlib.invalidate_caches()

    yield write
    sys.modules.pop("written", None)
    importlib.invalidate_caches()
    source._parse.cache_clear()


def described(name):
    return source.of(getattr(importlib.import_module("written"), name))


def test_a_class_and_its_module(write):
    write('"""Module.\n\nFormula."""\nclass A:\n    """Class A.\n\n    Args: none.\n    """\n')
    assert described("A").summary == "Class A."
    assert described("A").documentation == "Module.\n\nFormula.\n\nClass A.\n\nArgs: none."


def test_a_class_without_docstring_is_described_by_its_module(write):
    """And not by a class that it inherits from."""
    write('"""Module.\n\nMore."""\nclass A(dict):\n    pass\n')
    assert described("A").summary == "Module."
    assert described("A").documentation == "Module.\n\nMore."


def test_a_function_and_a_preset(write):
    write(
        '"""M."""\nimport linvit\ndef build():\n    """Builds."""\n'
        "base = linvit.preset(build, x=1)\nsmall = linvit.preset(base, y=2)\n"
    )
    assert [described(name).summary for name in ("build", "base", "small")] == ["Builds."] * 3


def test_complexity_and_paper(write):
    write(
        '"""Formula.\n\nPaper: Han et al. 2023, "A title of 2022", Eq. 1.\n"""\nimport linvit\n'
        "class A(linvit.Attention):\n    facts = linvit.Facts(complexity='O(N)')\nclass B(A): pass\n"
    )
    assert (described("A").complexity, described("B").complexity) == ("O(N)", "O(N)")
    assert (described("A").paper, described("A").citation) == ("Han et al. 2023", 'Han et al. 2023, "A title of 2022"')


@pytest.mark.parametrize("registry", [attentions, backbones, heads], ids=lambda registry: registry.kind)
def test_reading_a_name_says_what_importing_it_does(registry):
    """The files of linvit's own names are read, since an import of them takes seconds."""
    for name, (entry, *_) in registry.entries().items():
        if entry.owner == "linvit":
            said = registry.describe(name)
            assert said == source.of(registry.get(name)), name
            assert said.summary, name
            assert said.paper or registry is not attentions, name


def test_presets_are_read_without_an_import(write):
    write("from linvit import preset\na = preset(dict)\nb = linvit.preset(a)\nc = dict()\nraise SystemExit\n")
    assert source.presets("written") == ["a", "b"]
    assert "written" not in sys.modules


@pytest.mark.parametrize("module", ["math", "no_such_module.inner"])
def test_a_module_without_source_has_no_presets(module):
    assert source.presets(module) == []


@pytest.mark.parametrize("code", ["class (:\n", "pattern = '\\d'\n"])
def test_source_that_cannot_be_parsed_has_no_presets_and_no_warning(write, code, recwarn):
    write(code)
    assert source.presets("written") == []
    assert not recwarn.list


def test_what_a_program_registers_is_described_from_itself():
    class Mine(linvit.Attention):
        """Mine."""

    linvit.register_attention("mine_described")(Mine)
    try:
        assert attentions.describe("mine_described").summary == "Mine."
        assert source.of(functools.partial(Mine)).summary == "Mine."
    finally:
        attentions._registered.pop("mine_described")


def test_a_name_is_imported_on_use_while_garbage_collection_is_paused(write, tmp_path):
    write("import gc\nenabled = gc.isenabled()\n")
    package = tmp_path / "package.py"
    package.write_text("if TYPE_CHECKING:\n    from written import enabled\n")
    get, names = source.deferred("package", str(package))
    assert names == ["enabled"]
    assert (get("enabled"), gc.isenabled()) == (False, True)
