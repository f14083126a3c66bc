"""Networks that timm's own functions save, and load again from `config.json` and `model.safetensors`."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import get_model_input_config, save_for_hf
from torch import nn

import linvit
import linvit.backbones
from linvit import UserError
from tests.helpers import randn

NANO: dict[str, Any] = {"name": "deit_nano", "depth": 2}


def timm_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3, num_classes=3)


def timm_swin() -> nn.Module:
    options = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    return timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **options)


def pvt(name: str, **options: Any) -> nn.Module:
    spec = {"name": name, "embed_dims": (8, 16, 16, 16), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    return linvit.create_backbone(spec, num_classes=3, img_size=32, **options)


def scaled() -> dict[str, Any]:
    return {"name": "focused", "focusing_factor": 4}


NETWORKS = {
    "preset": lambda: linvit.create_backbone("deit_nano", num_classes=3),
    "mapping": lambda: linvit.create_backbone(
        NANO | {"global_pool": "avg"}, scaled(), num_classes=3, img_size=(32, 48), in_chans=1, drop_path_rate=0.1
    ),
    "no option for the pooling": lambda: pvt("pvt_tiny"),
    "a name that timm has, too": lambda: pvt("pvt_v2_b0", attention=["focused", "linear", "agent", "softmax"]),
    "blocks kept": lambda: linvit.create_backbone(NANO, ["focused", None], num_classes=3),
    "timm's registry": lambda: timm.create_model("deit_nano", depth=2, attention=scaled(), num_classes=3),
    "timm's model by linvit": lambda: linvit.create_backbone(
        {"name": "timm", "model": "vit_tiny_patch16_224"}, "hydra", num_classes=3, img_size=32
    ),
    "replaced": lambda: linvit.replace_attention(timm_vit(), scaled(), 32),
    "replaced, and a table of positions kept": lambda: linvit.replace_attention(timm_swin(), "softmax", 32),
    "linearised": lambda: linvit.linearize(timm_swin(), ["focused", "linear", None, None], 32),
    "linearised twice": lambda: linvit.linearize(linvit.linearize(timm_vit(), ["linear", None], 32), "agent", 32),
}


def saved(network: nn.Module, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Images, and their logits by a network that is saved."""
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.1)
    save_for_hf(network, str(folder), safe_serialization=True)
    images = randn(2, *get_model_input_config(network)["input_size"], dtype=torch.float32)
    with torch.no_grad():
        return images, network.eval()(images)


@pytest.mark.parametrize("name", NETWORKS)
def test_round_trip(name: str, tmp_path: Path) -> None:
    images, logits = saved(NETWORKS[name](), tmp_path)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images), logits)
    finetuned = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, num_classes=5)
    assert finetuned.get_classifier().weight.shape[0] == 5


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    images, logits = saved(NETWORKS[name](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["model_args"]["num_classes"]  # timm writes it twice, which transformers refuses for timm's own models
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, logits)


def test_what_is_not_in_the_file_can_be_made_again() -> None:
    """transformers builds on the meta device and asks modules for their buffers that are not saved."""
    network = linvit.replace_attention(timm_swin(), "softmax", 32)
    layer: Any = network.layers[0].blocks[0].attn
    index = layer.relative_position_index.clone()
    layer.relative_position_index.zero_()
    layer.init_non_persistent_buffers()
    assert torch.equal(layer.relative_position_index, index)


REPLACED = "linvit_replaced_attention"
HOSTILE = {
    "a class path": ("deit_nano", {"attention": "hostile_module:Mine"}, "'hostile_module:Mine' is not registered"),
    "a class path within": ("deit_nano", {"attention": [{"name": "hostile_module:Mine"}]}, "is not registered"),
    "an unknown option": ("deit_nano", {"command": "touch"}, "takes no option 'command'"),
    "a replaced class path": (
        REPLACED,
        {"model": "deit_nano", "replaced": [{"attention": "hostile_module:Mine"}]},
        "is not registered",
    ),
    "another repository": (REPLACED, {"model": "hf-hub:a/b", "replaced": []}, "'hf-hub:a/b' is not in it"),
    "a class as the model": (
        REPLACED,
        {"model": "subprocess:Popen", "replaced": []},
        "Popen' is not in it",
    ),
    "itself": (REPLACED, {"model": REPLACED, "replaced": []}, f"'{REPLACED}' is not in it"),
    "no model": (REPLACED, {"model": None, "replaced": []}, "None is not in it"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_config(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What config.json names is built if it is registered, and nothing is imported for it."""
    (tmp_path / "hostile_module.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nMine = object\n")
    monkeypatch.syspath_prepend(tmp_path)
    architecture, arguments, message = HOSTILE[name]
    config = {"architecture": architecture, "model_args": arguments, "pretrained_cfg": {"num_classes": 3}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        timm.create_model(f"local-dir:{tmp_path}", pretrained=True)
    assert not (tmp_path / "ran").exists()
