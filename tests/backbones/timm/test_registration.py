"""linvit's backbones through timm's own machinery."""

import importlib

import pytest
import timm
import torch

import linvit
import linvit.backbones
from linvit import UserError
from linvit.registry.model_info import model_info
from tests.families import families, small
from tests.helpers import randn
from tests.plugin.distributions import forked, write_distribution


def test_every_name_is_known_to_timm() -> None:
    for name in linvit.list_backbones():
        assert timm.is_model(name) == (name not in ("timm", "transformers"))
    assert timm.list_models("flatten_*") == linvit.list_backbones("flatten_*")


def test_timms_own_names_stay_timms() -> None:
    assert type(timm.create_model("pvt_v2_b0")).__module__ == "timm.models.pvt_v2"


def test_importing_twice_warns_of_nothing(recwarn: pytest.WarningsRecorder) -> None:
    importlib.reload(linvit.backbones)
    assert not recwarn.list


@torch.no_grad()
def test_options_reach_the_backbone() -> None:
    model = timm.create_model(
        "deit_nano", num_classes=7, in_chans=4, img_size=(16, 24), drop_path_rate=0.3, attention="hydra"
    ).eval()
    assert model(randn(2, 4, 16, 24, dtype=torch.float32)).shape == (2, 7)
    assert type(model.blocks[0].attn.mechanism).__name__ == "HydraAttention"
    assert model.blocks[-1].drop_path1.drop_prob == pytest.approx(0.3)
    assert model.grid.size == (4, 6)


def test_the_pyramid_has_four_levels_unless_told() -> None:
    assert timm.create_model("flatten_pvt_v2_b0", features_only=True).feature_info.reduction() == [4, 8, 16, 32]
    assert len(timm.create_model("deit_tiny", features_only=True).feature_info.out_indices) == 4


def test_preparation_of_images() -> None:
    config = timm.create_model("deit_nano").default_cfg
    assert config["input_size"] == (3, 32, 32)
    assert config["mean"] == (0.485, 0.456, 0.406)
    assert config["interpolation"] == "bicubic"
    for name, size, crop, mode in [
        ("cswin_tiny", 224, 0.9, "center"),
        ("cswin_base_384", 384, 1.0, "center"),
        ("flatten_swin_tiny", 224, 0.875, "squash"),
        ("flatten_swin_base_384", 384, 1.0, "squash"),
        ("pvt_tiny", 224, 0.875, "center"),
        ("soft_norm_tiny", 224, 0.9, "center"),
    ]:
        config = timm.get_pretrained_cfg(name)
        assert (config.input_size, config.crop_pct, config.crop_mode) == ((3, size, size), crop, mode)
        assert model_info()[name].crop_pct == crop


def check_default_cfg(name: str, **options: object) -> None:
    """The claims of timm's own test of the configurations of models, and that `pool_size` is the last feature's."""
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval()
        config, parameters = model.default_cfg, model.state_dict()
        heads, convolution = config["classifier"], config["first_conv"]
        for head in heads if isinstance(heads, tuple) else (heads,):
            assert f"{head}.weight" in parameters
        assert parameters[f"{convolution}.weight"].shape[1] == 3
        with torch.no_grad():
            (last,) = model.forward_intermediates(
                torch.zeros(1, *config["input_size"]), indices=1, intermediates_only=True
            )
        assert tuple(last.shape[2:]) == config["pool_size"]
        model.reset_classifier(0)
        assert not [key for key in model.state_dict() if key.startswith("head")]


@pytest.mark.parametrize("name", sorted({*families().values()} - {"timm"}))
def test_default_cfg(name: str) -> None:
    options = {key: value for key, value in small(name).items() if key != "name"}
    if not timms_own(name):
        check_default_cfg(name, **options)


@pytest.mark.slow
def test_default_cfg_of_every_preset() -> None:
    for name in linvit.list_backbones():
        if name != "timm" and not timms_own(name):
            check_default_cfg(name)


def timms_own(name: str) -> bool:
    """Whether timm has a model of its own of this name, which stays timm's."""
    return timm.models.model_entrypoint(name).__module__.startswith("timm.")


def test_default_cfg_of_two_classifiers_and_of_a_pyramid() -> None:
    model = timm.create_model("deit_tiny", distilled=True, depth=1)
    assert model.default_cfg["classifier"] == ("head", "head_dist")
    assert model.default_cfg["pool_size"] == (14, 14)
    pyramid = timm.create_model("flatten_pvt_v2_b0", features_only=True)
    assert pyramid.default_cfg["first_conv"] == "stages.0.embed.proj"
    assert pyramid.default_cfg["pool_size"] == (7, 7)


def test_pretrained_says_how_to_load() -> None:
    with pytest.raises(UserError, match=r"no weights for 'flatten_swin_tiny'.*linvit\.load_pretrained\(model, PATH\)"):
        timm.create_model("flatten_swin_tiny", pretrained=True)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UserError, match="'flatten_deit_tiny' takes no option 'window'"):
        timm.create_model("flatten_deit_tiny", window=7)


def test_families_are_imported_on_use() -> None:
    code = (
        "import sys, linvit\nimport linvit.backbones, timm\n"
        "assert 'linvit.backbones.deit' not in sys.modules\ntimm.create_model('deit_nano')\n"
        "assert 'linvit.backbones.deit' in sys.modules\nassert 'linvit.backbones.swin' not in sys.modules\n"
    )
    done = forked(code)
    assert done.returncode == 0, done.stdout


def test_plugins(tmp_path) -> None:
    points = "[linvit.backbones]\nmine = mine:Mine\nbroken = broken_net:Net\n"
    mine = (
        "from torch import nn\n"
        "class Mine(nn.Module):\n"
        "    def __init__(self, in_chans=3, num_classes=1000, img_size=224, attention='softmax', drop_path_rate=0.0):\n"
        "        super().__init__()\n        self.num_classes = num_classes\n"
    )
    write_distribution(tmp_path, "linvit-mine", "1.0", points, mine=mine, broken_net="import no_such_thing\n")
    code = (
        "import sys, linvit.backbones, timm\nassert not {'mine', 'broken_net'} & set(sys.modules)\n"
        "assert timm.is_model('mine') and timm.is_model('broken')\n"
        "assert timm.create_model('mine', num_classes=3).num_classes == 3\n"
        "try: timm.create_model('broken')\nexcept linvit.UserError as error: print(error)\n"
    )
    done = forked(code, tmp_path)
    assert done.returncode == 0, done.stdout
    (line,) = done.stdout.splitlines()
    assert "backbone 'broken' of linvit-mine 1.0 cannot be imported" in line


def test_no_dropout_is_accepted_and_dropout_refused() -> None:
    """timm's training script passes drop_rate=0 to every model."""
    timm.create_model("deit_nano", drop_rate=0.0)
    with pytest.raises(
        UserError, match=r"has no dropout before the classifier; got drop_rate=0\.1\. Use drop_path_rate"
    ):
        timm.create_model("deit_nano", drop_rate=0.1)
