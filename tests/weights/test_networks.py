"""`load_pretrained` and `import-weights` on whole networks: mmsegmentation's, MAResU-Net's and MACU-Net's files."""

import copy
import json
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit import load_pretrained
from linvit.backbones.swin import PatchMerging
from linvit.cli import main
from linvit.heads.segmentation.segmentor import Segmentor
from linvit.weights.layouts.backbones import SWIN_MMSEG
from tests.golden_files import Golden, of_case
from tests.helpers import assert_near, randn
from tests.official import fill
from tests.official.mlla import mlla
from tests.official.mmseg import dense_pvt, dense_swin, renamed_swin, semantic_fpn, under_backbone, upernet
from tests.official.ravlt import ravlt
from tests.weights.files import FAKES, MLLA, PVT, RAVLT, RAVLT_SIZES, SWIN

CLASSES = 5
UPERNET = {"name": "upernet", "width": 8, "auxiliary_width": 6}
SEMANTIC_FPN = {"name": "semantic_fpn", "width": 6, "fpn_width": 8}
SWIN_CHANNELS = [24, 48, 96, 192]


class TheirConfig:
    """Whatever objects lie beside the weights."""


def state_of(family: str) -> dict[str, Tensor]:
    if family == "pvt":
        return fill(dense_pvt(PVT) | semantic_fpn(PVT["embed_dims"], CLASSES, 6, 8))
    if family == "ravlt":
        backbone = under_backbone(ravlt(*RAVLT_SIZES, dense=True))
        return fill(backbone | semantic_fpn(RAVLT["embed_dims"], CLASSES, 6, 8))
    if family == "mlla":
        backbone = under_backbone(mlla(16, MLLA["depths"], dense=True))
        return fill(backbone | upernet([16, 32, 64, 128], CLASSES, 8, 6))
    state = fill(dense_swin(SWIN) | upernet(SWIN_CHANNELS, CLASSES, 8, 6))
    if family == "swin":
        return state
    # Later releases: other names, and patches merged channel by channel.
    state = {name: by_channel(tensor) if ".downsample." in name else tensor for name, tensor in state.items()}
    return {renamed_swin(name): tensor for name, tensor in state.items()}


def by_channel(tensor: Tensor) -> Tensor:
    """The reference joins the patches (0, 0), (1, 0), (0, 1), (1, 1), as (row, column); unfolding goes row by row."""
    patches = tensor.reshape(*tensor.shape[:-1], 4, -1)[..., [0, 2, 1, 3], :]
    return patches.transpose(-1, -2).reshape(tensor.shape)


def create(family: str, classes: int = CLASSES, **options: Any) -> Segmentor:
    torch.manual_seed(0)
    if family == "pvt":
        return linvit.create_segmentor({"name": "pvt_tiny", **PVT}, SEMANTIC_FPN, classes, **options)
    if family == "ravlt":
        return linvit.create_segmentor({"name": "ravlt_t", **RAVLT}, SEMANTIC_FPN, classes, **options)
    if family == "mlla":
        return linvit.create_segmentor({"name": "mlla_tiny", **MLLA}, UPERNET, classes, **options)
    return linvit.create_segmentor({"name": "swin_tiny", **SWIN}, UPERNET, classes, **options)


@cache
def expected(family: str) -> dict[str, Tensor]:
    """The state dict of a model with the weights of the file in the older layout."""
    model = create(family)
    load_pretrained(model, state_of(family))
    return model.state_dict()


LAYOUTS = {family: f"mmsegmentation, {family}" for family in ("pvt", "swin", "ravlt", "mlla")}
LAYOUTS["swin_renamed"] = "mmsegmentation, swin (mmsegmentation)"


@pytest.mark.parametrize("family", LAYOUTS)
def test_every_number_of_mmsegmentation_is_loaded(tmp_path: Any, family: str) -> None:
    model = create(family)
    fresh, state = copy.deepcopy(model.state_dict()), state_of(family)
    torch.save({"meta": {"CLASSES": ("a", "b"), "config": TheirConfig()}, "state_dict": state}, tmp_path / "x.pth")
    report = load_pretrained(model, tmp_path / "x.pth")
    assert (report.layout, report.fraction, report.part) == (LAYOUTS[family], 1, "network")
    assert (report.resized, report.initialised, report.missing, report.unexpected) == ({}, {}, {}, [])
    assert "100.0% of the network" in str(report)
    numbers = [own.numel() for own in model.state_dict().values() if own.is_floating_point()]
    assert sum(numbers) == sum(tensor.numel() for tensor in state.values())
    for name, own in model.state_dict().items():
        assert not own.is_floating_point() or not torch.equal(own, fresh[name]), name
    if family == "swin_renamed":
        assert all(torch.equal(own, expected("swin")[name]) for name, own in model.state_dict().items())


def test_patches_that_later_releases_merge_channel_by_channel() -> None:
    """Their layer as a formula: unfold 2 x 2 patches, LayerNorm, linear."""
    layer = PatchMerging(3, 1e-5).double()
    weight, bias, proj = randn(12, seed=1), randn(12, seed=2), randn(6, 12, seed=3)
    x = randn(2, 3, 6, 8)
    want = F.layer_norm(F.unfold(x, 2, stride=2).mT, [12], weight, bias) @ proj.mT
    name = "stages.0.downsample"
    official = {f"{name}.norm.weight": weight, f"{name}.norm.bias": bias, f"{name}.reduction.weight": proj}
    state = SWIN_MMSEG.translate(official)
    layer.load_state_dict({key.removeprefix("stages.1.embed."): tensor for key, tensor in state.items()})
    assert_near(layer(x)[0], want, 1e-12)


@pytest.mark.parametrize("family", ["pvt", "swin"])
def test_weights_of_a_classifier_go_into_the_backbone(family: str) -> None:
    model, other = create(family), create(family)
    report = load_pretrained(model, FAKES[family].state())
    assert (report.layout, report.part) == (FAKES[family].layout, "backbone")
    assert set(report.initialised.values()) == {"the file has no head"}
    assert {name.partition(".")[0] for name in report.initialised} == {"head"}
    norms = {f"backbone.feature_norms.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    assert set(report.missing) == (norms if family == "swin" else set())
    assert torch.equal(model.head.classifier.weight, other.head.classifier.weight)


def test_a_backbone_takes_its_part_of_a_network() -> None:
    spec = {"name": "swin_tiny", **SWIN, "feature_norms": True}
    backbone = linvit.create_backbone(spec, num_classes=0)
    report = load_pretrained(backbone, state_of("swin"))
    assert (report.fraction, report.part, report.unexpected) == (1, "backbone", [])
    assert torch.equal(backbone.norm.weight, expected("swin")["backbone.norm.weight"])


def test_a_network_with_another_head() -> None:
    backbone = {"name": "swin_tiny", **SWIN}
    model = linvit.create_segmentor(backbone, SEMANTIC_FPN, CLASSES)
    report = load_pretrained(model, state_of("swin"))
    assert (report.fraction, report.part) == (1, "backbone")
    assert set(report.initialised.values()) == {"the file has another head"}
    assert "head.fpn_bottleneck.conv.weight" in report.unexpected


@pytest.mark.parametrize("prefix", ["", "network."])
def test_our_own_networks_come_back(prefix: str) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in expected("swin").items()}
    model = create("swin")
    report = load_pretrained(model, state)
    assert (report.layout, report.fraction, report.part) == ("linvit", 1, "network")
    assert all(torch.equal(own, expected("swin")[name]) for name, own in model.state_dict().items())


# MAResU-Net and MACU-Net: the official parameters, and what they compute

NETWORKS = {
    "maresunet": ({"name": "timm", "model": "resnet34"}, "maresunet"),
    "macunet": ("macunet_encoder", "macunet"),
}


@of_case("maresunet", "macunet")
def test_whole_networks_equal_the_official_code(golden: Golden) -> None:
    case = golden.meta["case"]
    classes = golden.constructor.get("num_classes") or golden.constructor["class_num"]
    model = linvit.create_segmentor(*NETWORKS[case], classes).eval()
    state = golden.regenerated()
    report = load_pretrained(model, state)
    assert (report.layout, report.fraction, report.missing, report.unexpected) == (case, 1, {}, [])
    assert sum(own.numel() for own in model.state_dict().values()) == sum(tensor.numel() for tensor in state.values())
    seen: dict[str, Tensor] = {}
    for name, module in parts(case, model).items():
        module.register_forward_hook(lambda _, __, out, name=name: seen.setdefault(name, out))
    inputs = golden.inputs(torch.float32)
    golden.check_call(model(*inputs), inputs)
    for name in golden.named("stage."):
        if (part := name.split(".")[1]) in seen:
            golden.check(name, seen[part])
    assert len(seen) >= 5


def parts(case: str, model: Any) -> dict[str, nn.Module]:
    """Our modules by the names of the official ones."""
    backbone, head = model.backbone, model.head
    if case == "macunet":
        found = {f"conv{9 - i}": block for i, block in enumerate(head.blocks)}
        return {**found, **{f"skblock{i + 1}": attention for i, attention in enumerate(head.attentions)}}
    found = {f"attention{i + 1}": skip for i, skip in enumerate(head.skips)}
    found |= {f"encoder{i + 1}": getattr(backbone, f"layer{i + 1}") for i in range(4)}
    return {**found, **{f"decoder{i + 1}": decoder for i, decoder in enumerate(head.decoders)}}


# The command


def test_import_weights_of_a_whole_network(tmp_path: Any, capsys: Any) -> None:
    torch.save({"state_dict": state_of("swin")}, tmp_path / "x.pth")
    out = tmp_path / "x.safetensors"
    source = str(tmp_path / "x.pth")
    backbone = [f"--backbone={json.dumps({'name': 'swin_tiny', **SWIN})}", "-o", str(out)]
    assert main(["import-weights", source, f"--head={json.dumps(UPERNET)}", *backbone]) == 0
    assert "100.0% of the network" in capsys.readouterr().out
    model = create("swin")
    assert load_pretrained(model, out).fraction == 1
    assert all(torch.equal(own, expected("swin")[name]) for name, own in model.state_dict().items())
    out.unlink()
    assert main(["import-weights", source, *backbone]) == 0
    assert "The source also has a head: add --head NAME" in capsys.readouterr().out
    out.unlink()
    torch.save(FAKES["swin"].state(), tmp_path / "y.pth")
    assert main(["import-weights", str(tmp_path / "y.pth"), "--head=upernet", *backbone]) == 2
    assert "has no head; remove --head" in capsys.readouterr().err
