"""Names, specs and error messages of the registry, with real distributions as plug-ins."""

import functools
import importlib
import inspect
import re
import sys

import pytest
from torch import nn

import linvit
from linvit import Grid, UserError
from linvit.registry import Registry, attentions, backbones
from linvit.registry.entries import Entry
from linvit.registry.signatures import parameters_of
from tests.plugin.distributions import forget_packages, forked, python, write_distribution

SIZES = {"dim": 24, "num_heads": 3, "grid": Grid((2, 2))}
MECHANISM = '"""Doc."""\nimport linvit\n\nclass Mine(linvit.Attention):\n    pass\n'


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs fake distributions that this process sees; forgets them and their modules afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def install(name, version, entry_points, **modules):
        write_distribution(tmp_path, name, version, entry_points, **modules)
        importlib.invalidate_caches()
        forget_packages()

    yield install
    monkeypatch.undo()
    importlib.invalidate_caches()
    forget_packages()
    for module in set(sys.modules) - before:
        if getattr(sys.modules[module], "__file__", None) and str(tmp_path) in sys.modules[module].__file__:
            del sys.modules[module]


@pytest.fixture
def widgets():
    """An empty registry without a base class."""
    return Registry("widget", "linvit_tests.widgets")


def attentions_group(line):
    return f"[linvit.attentions]\n{line}\n"


# Names


def test_names_are_listed_without_importing_anything():
    code = (
        "import sys, linvit\n"
        "assert 'focused' in linvit.list_attentions() and 'deit_tiny' in linvit.list_backbones()\n"
        "assert isinstance(linvit.list_heads(), list)\n"
        "heavy = {'torch', 'numpy', 'timm', 'lightning', 'linvit.attention', 'linvit.backbones'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_plugin_is_known_by_its_entry_point_alone(install):
    install("linvit-mine", "1.5", attentions_group("mine = linvit_mine:Mine"), linvit_mine=MECHANISM)
    assert "mine" in linvit.list_attentions()
    assert attentions.entries()["mine"] == [Entry("mine", "linvit_mine:Mine", "linvit-mine 1.5")]
    assert "linvit_mine" not in sys.modules
    built = linvit.create_attention("mine", **SIZES)
    assert type(built).__name__ == "Mine"
    assert isinstance(built, linvit.Attention)


# Families: an entry point that names a module

FAMILY = '''"""A family."""
import linvit
from linvit import preset

class Net:
    """A net."""
    def __init__(self, in_chans=3, num_classes=1000, img_size=224, drop_path_rate=0.0, depth=1):
        self.depth, self.num_classes = depth, num_classes

mine_tiny = preset(Net, depth=2)
mine_small = linvit.preset(mine_tiny, depth=4)
'''
FAMILY_GROUP = "[linvit.backbones]\nmine = linvit_mine\n"


def test_a_family_registers_its_presets_without_being_imported(install):
    install("linvit-mine", "1", FAMILY_GROUP, linvit_mine=FAMILY)
    assert linvit.list_backbones("mine*") == ["mine_small", "mine_tiny"]
    assert backbones.entries()["mine_tiny"] == [Entry("mine_tiny", "linvit_mine:mine_tiny", "linvit-mine 1")]
    assert "linvit_mine" not in sys.modules
    assert linvit.create_backbone("mine_small").depth == 4
    assert linvit.create_backbone({"name": "mine_tiny", "depth": 7}, num_classes=3).depth == 7
    with pytest.raises(UserError, match="Did you mean 'mine_tiny'"):
        linvit.create_backbone("mine_tyni")


def test_one_line_adds_a_preset_everywhere(tmp_path):
    """To `linvit list`, its wildcards and one name's page, to specs with options, and to timm."""
    added = FAMILY + "mine_wide = preset(Net, depth=8)\n"
    write_distribution(tmp_path, "linvit-mine", "1", FAMILY_GROUP, linvit_mine=added)
    listed = python("-m", "linvit", "list", "backbones", "--filter", "mine_w*", path=tmp_path)
    assert re.search(r"^  mine_wide +linvit-mine 1 .*A net\.$", listed.stdout, re.MULTILINE), listed.stdout
    shown = python("-m", "linvit", "list", "backbones", "mine_wide", path=tmp_path)
    assert "from linvit_mine:mine_wide, linvit-mine 1" in shown.stdout
    assert "  depth = 8\n" in shown.stdout
    code = (
        "import linvit, linvit.backbones, timm\n"
        "assert timm.is_model('mine_wide')\n"
        "assert linvit.create_backbone('mine_wide', num_classes=5).depth == 8\n"
        "assert linvit.create_backbone('linvit_mine:mine_wide').depth == 8\n"
    )
    done = forked(code, tmp_path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def (:\n", "SyntaxError"),
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        (
            "class Net: pass\n",
            r"'mine' of linvit-mine 1 names the module 'linvit_mine', which .*preset\(CLASS",
        ),
    ],
)
def test_a_family_without_presets_is_one_broken_name(install, code, message):
    install("linvit-mine", "1", FAMILY_GROUP, linvit_mine=code)
    assert linvit.list_backbones("mine*") == ["mine"]
    with pytest.raises(UserError, match=message):
        linvit.create_backbone("mine")


# The decorator


def test_the_decorator_registers_and_returns_the_class(widgets):
    @widgets.register("round")
    class Round:
        def __init__(self, radius=1.0):
            self.radius = radius

    assert widgets.names() == ["round"]
    assert widgets.get("round") is Round
    assert widgets.create({"name": "round", "radius": 2.0}).radius == 2.0
    assert widgets.entries()["round"][0].owner == f"module {__name__}"


def test_decorating_the_same_class_again_is_fine(widgets):
    def define(size):
        @widgets.register("again")
        class Again:
            width = size

        return Again

    define(1)
    newer = define(2)  # as when a notebook cell runs twice
    assert widgets.get("again") is newer


def test_a_decorator_cannot_take_the_name_of_an_entry_point():
    with pytest.raises(UserError) as error:

        @linvit.register_attention("softmax")
        class Other(linvit.Attention):
            pass

    assert str(error.value).startswith(
        "two owners claim the attention name 'softmax': linvit (linvit.attention.softmax:SoftmaxAttention) "
        f"and module {__name__} ({__name__}:"
    )
    assert attentions.get("softmax").__name__ == "SoftmaxAttention"


def test_a_class_may_be_announced_and_decorated(install):
    decorated = MECHANISM.replace("class Mine", "@linvit.register_attention('mine')\nclass Mine")
    install("linvit-mine", "1", attentions_group("mine = linvit_mine:Mine"), linvit_mine=decorated)
    try:
        assert attentions.get("mine").__name__ == "Mine"
        assert attentions.get("mine").__name__ == "Mine"  # now that both claims are there
    finally:
        attentions._registered.pop("mine", None)


def test_two_distributions_of_one_name_collide_where_it_is_used(install):
    install("linvit-a", "1.0", attentions_group("mine = linvit_a:Mine"), linvit_a=MECHANISM)
    install("linvit-b", "2.0", attentions_group("mine = linvit_b:Mine"), linvit_b=MECHANISM)
    assert linvit.list_attentions("mine") == ["mine"]
    with pytest.raises(UserError) as error:
        linvit.create_attention("mine", **SIZES)
    assert "two owners claim the attention name 'mine'" in str(error.value)
    assert "linvit-a 1.0 (linvit_a:Mine)" in str(error.value)
    assert "linvit-b 2.0 (linvit_b:Mine)" in str(error.value)
    assert not {"linvit_a", "linvit_b"} & set(sys.modules)
    linvit.create_attention("softmax", **SIZES)
    linvit.create_attention("linvit_b:Mine", **SIZES)  # the way out that the message names


# Specs and their errors


def test_an_unknown_name_gives_the_nearest_and_all_by_owner(install):
    builtins = ", ".join(linvit.list_attentions())
    install("linvit-cosine", "0.2", attentions_group("cosine = linvit_mine:Mine"), linvit_mine=MECHANISM)
    with pytest.raises(UserError) as error:
        linvit.create_attention("focussed", **SIZES)
    lines = str(error.value).splitlines()
    assert lines[0] == "no attention is called 'focussed'. Did you mean 'focused'?"
    assert lines[1].removeprefix("  known: ").split("; ") == [f"{builtins} (linvit)", "cosine (linvit-cosine 0.2)"]
    assert "linvit.attentions" in str(error.value)


def test_an_unknown_option_gives_the_nearest_and_all_options():
    with pytest.raises(UserError) as error:
        linvit.create_attention({"name": "focused", "focusing": 4}, **SIZES)
    first, second = str(error.value).splitlines()
    assert first == "attention 'focused' takes no option 'focusing'. Did you mean 'focusing_factor'?"
    assert second.startswith("  options: ")
    assert "focusing_factor: float = 3, dwc_kernel: int = 5, " in second
    assert "dim" not in second.replace("key_dim", "")  # what the host supplies is not the user's to set


def test_a_constructor_without_what_the_host_supplies_is_told_what_it_lacks(widgets):
    class TakesOnlyDim(linvit.Attention):
        def __init__(self, dim):
            super().__init__(dim, 1, Grid((2, 2)))

    mechanisms = Registry("attention", "linvit.none", supplied=("dim", "num_heads", "grid", "key_dim"))
    mechanisms.register("mine")(TakesOnlyDim)
    for options in ({}, {"heads": 3}):
        with pytest.raises(UserError) as error:
            mechanisms.create({"name": "mine", **options}, **SIZES)
        assert str(error.value) == (
            "attention 'mine': its constructor must take dim, num_heads, grid; it lacks num_heads, grid"
        )
    with pytest.raises(UserError, match="must take dim, num_heads, grid, key_dim; it lacks num_heads, grid, key_dim"):
        mechanisms.create("mine", **SIZES, key_dim=4)


def test_an_option_without_a_default_is_asked_for(widgets):
    class Powers(linvit.Attention):
        def __init__(self, power, **host):
            super().__init__(**host)

    mechanisms = Registry("attention", "linvit.none", supplied=("dim", "num_heads", "grid"))
    mechanisms.register("powers")(Powers)
    with pytest.raises(UserError, match=r"^attention 'powers' needs power\. Write {name: powers, power: VALUE}$"):
        mechanisms.create("powers", **SIZES)
    assert isinstance(mechanisms.create({"name": "powers", "power": 2}, **SIZES), Powers)
    for name in ("timm", "transformers"):
        with pytest.raises(UserError, match=f"Write {{name: {name}, model: VALUE}}"):
            linvit.create_backbone(name)


def test_a_spec_without_a_name():
    with pytest.raises(UserError) as error:
        linvit.create_attention({"focusing_factor": 4}, **SIZES)
    assert str(error.value).startswith("attention spec {'focusing_factor': 4} has no name. Write {name: NAME, ")


@pytest.mark.parametrize("spec", [3, None, ["softmax"]])
def test_a_spec_of_the_wrong_type(spec):
    with pytest.raises(UserError, match="is neither a name nor a mapping"):
        linvit.create_attention(spec, **SIZES)


@pytest.mark.parametrize("name", [3, None])
def test_a_name_of_the_wrong_type(name):
    with pytest.raises(UserError, match="has no name"):
        linvit.create_attention({"name": name}, **SIZES)


# Class paths


def test_a_class_path_needs_no_registration():
    built = linvit.create_attention({"name": "linvit.attention.linear:LinearAttention", "eps": 0.5}, **SIZES)
    assert built.eps == 0.5


@pytest.mark.parametrize("path", ["no_such_package.module:Class", "linvit.attention.linear:NoSuchClass", "json:dumps"])
def test_a_class_path_that_leads_to_no_mechanism(path):
    with pytest.raises(UserError, match=path.split(":")[1]):
        linvit.create_attention(path, **SIZES)


# Broken plug-ins

BROKEN = {
    "importerror": ("import no_such_dependency\n", "ModuleNotFoundError: No module named 'no_such_dependency'"),
    "syntaxerror": ("def (:\n", "SyntaxError"),
    "exits": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "empty": ("", "AttributeError"),
    "number": ("Mine = 42\n", "is 42, not a class"),
    "stranger": ("class Mine:\n    pass\n", "not a subclass of linvit.attention.base.Attention"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_breaks_only_the_run_that_names_it(install, kind):
    code, reason = BROKEN[kind]
    install(f"linvit-{kind}", "0.9", attentions_group(f"mine = broken_{kind}:Mine"), **{f"broken_{kind}": code})
    assert "mine" in linvit.list_attentions()
    linvit.create_attention("softmax", **SIZES)
    assert f"broken_{kind}" not in sys.modules
    with pytest.raises(UserError) as error:
        linvit.create_attention("mine", **SIZES)
    assert str(error.value).startswith(f"attention 'mine' of linvit-{kind} 0.9 ")
    assert reason in str(error.value)


@pytest.mark.parametrize("given", ["false", 0])
def test_what_is_true_or_false_takes_nothing_else(given):
    said = f"attention 'focused': dwc must be true or false; got {given!r}. Write {{name: focused, dwc: true}}"
    with pytest.raises(UserError, match=re.escape(said)):
        linvit.create_attention({"name": "focused", "dwc": given}, dim=8, num_heads=2, grid=linvit.Grid((4, 4)))


# Signatures


class Parent:
    def __init__(self, dim, *, key_dim=None, scale=1.0):
        pass


class Forwarding(Parent):
    def __init__(self, *args, power=3, scale=2.0, **kwargs):
        super().__init__(*args, scale=scale, **kwargs)


class Inheriting(Forwarding):
    pass


@pytest.mark.parametrize("constructor", [Forwarding, Inheriting])
def test_parameters_through_forwarded_keywords(constructor):
    assert parameters_of(constructor) == {"power": 3, "scale": 2.0, "dim": inspect.Parameter.empty, "key_dim": None}


def test_a_factory_with_open_keywords_is_handed_all(widgets):
    class Net(nn.Module):
        def __init__(self, width=3, **kwargs):
            super().__init__()
            self.options = kwargs

    def factory(**options):
        return Net(**options)

    for constructor in (Net, factory, functools.partial(factory, depth=2)):
        name = f"net{len(widgets.names())}"
        widgets.register(name)(constructor)
        built = widgets.create({"name": name, "anything": 1}, attention="linear")
        assert built.options.items() >= {"anything": 1, "attention": "linear"}.items()


def test_parameters_of_a_partial_through_forwarded_keywords():
    assert parameters_of(functools.partial(Inheriting, power=4, key_dim=8)) == {
        "power": 4,
        "scale": 2.0,
        "dim": inspect.Parameter.empty,
        "key_dim": 8,
    }


def test_an_exception_inside_a_constructor_is_not_reworded(widgets):
    problem = TypeError("takes no option, it says here")

    @widgets.register("fragile")
    class Fragile:
        def __init__(self, size=1):
            raise problem

    with pytest.raises(TypeError) as error:
        widgets.create({"name": "fragile", "size": 2})
    assert error.value is problem
    assert error.value.__cause__ is None
