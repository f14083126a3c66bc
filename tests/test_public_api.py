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
    "load_pretrained",
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
        "cswin_base",
        "cswin_base_384",
        "cswin_large",
        "cswin_large_384",
        "cswin_small",
        "cswin_tiny",
        "deit_base",
        "deit_base_384",
        "deit_nano",
        "deit_small",
        "deit_tiny",
        "flatten_cswin_base",
        "flatten_cswin_base_384",
        "flatten_cswin_small",
        "flatten_cswin_tiny",
        "flatten_deit_small",
        "flatten_deit_tiny",
        "flatten_pvt_large",
        "flatten_pvt_medium",
        "flatten_pvt_small",
        "flatten_pvt_tiny",
        "flatten_pvt_v2_b0",
        "flatten_pvt_v2_b1",
        "flatten_pvt_v2_b2",
        "flatten_pvt_v2_b3",
        "flatten_pvt_v2_b4",
        "flatten_swin_base",
        "flatten_swin_base_384",
        "flatten_swin_small",
        "flatten_swin_tiny",
        "hydra_deit_base",
        "pvt_large",
        "pvt_medium",
        "pvt_small",
        "pvt_tiny",
        "pvt_v2_b0",
        "pvt_v2_b1",
        "pvt_v2_b2",
        "pvt_v2_b2_li",
        "pvt_v2_b3",
        "pvt_v2_b4",
        "pvt_v2_b5",
        "soft_huge",
        "soft_large",
        "soft_medium",
        "soft_norm_huge",
        "soft_norm_large",
        "soft_norm_medium",
        "soft_norm_small",
        "soft_norm_tiny",
        "soft_small",
        "soft_tiny",
        "swin_base",
        "swin_base_384",
        "swin_small",
        "swin_small_384",
        "swin_tiny",
        "swin_tiny_384",
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
