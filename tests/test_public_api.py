"""The names that users, configurations and plug-ins rely on. A change here is a change of the public interface."""

import tomllib
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest

import linvit
from tests.plugin.distributions import python

PUBLIC = [
    "Attention",
    "AttentionLayer",
    "Grid",
    "UserError",
    "create_attention",
    "create_backbone",
    "create_head",
    "list_attentions",
    "list_backbones",
    "list_heads",
    "register_attention",
    "register_backbone",
    "register_head",
]
BUILT_IN = {
    "linvit.attentions": [
        "aft_simple",
        "efficient",
        "enhanced_linear",
        "focused",
        "hydra",
        "linear",
        "linear_angular",
        "linformer",
        "nystrom",
        "performer",
        "poly_nl",
        "soft",
        "soft_norm",
        "softmax",
        "taylor",
    ],
    "linvit.backbones": [
        "deit_base",
        "deit_base_384",
        "deit_nano",
        "deit_small",
        "deit_tiny",
        "flatten_deit_small",
        "flatten_deit_tiny",
        "hydra_deit_base",
        "timm",
    ],
    "linvit.heads": [],
}


def test_public_names():
    assert linvit.__all__ == PUBLIC
    for name in PUBLIC:
        assert getattr(linvit, name) is not None
        assert name in dir(linvit)
    with pytest.raises(AttributeError, match="no_such_name"):
        linvit.no_such_name  # noqa: B018


@pytest.mark.parametrize("group", BUILT_IN)
def test_builtin_names(group):
    ours = sorted(point.name for point in entry_points(group=group) if point.dist.name == "linvit")
    assert ours == BUILT_IN[group]


def test_the_registries_read_these_groups():
    registries = [linvit.registry.attentions, linvit.registry.backbones, linvit.registry.heads]
    assert [registry.group for registry in registries] == list(BUILT_IN)
    assert [registry.kind for registry in registries] == ["attention", "backbone", "head"]


@pytest.mark.parametrize(
    ("registry", "kind"), [(linvit.registry.attentions, "attention"), (linvit.registry.backbones, "backbone")]
)
def test_every_builtin_can_be_imported(registry, kind):
    for name in BUILT_IN[registry.group]:
        assert callable(registry.get(name)), f"{kind} {name}"


def test_the_installed_entry_points_are_those_of_pyproject():
    declared = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    for group, points in declared.items():
        installed = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "linvit"}
        assert installed == points, "stale installation: run pip install -e . again"


def test_the_version_is_that_of_the_distribution():
    assert linvit.__version__ == version("linvit")
    assert python("-m", "linvit", "--version").stdout == f"linvit {version('linvit')}\n"


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
