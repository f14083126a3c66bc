"""What makes plain transformers fit for dense tasks: the simple feature pyramid, and linear heads without one."""

from typing import Any

import pytest
import torch
from torch import Tensor

import linvit
from linvit import UserError
from linvit.heads.neck import SimpleFeaturePyramid
from linvit.heads.segmentation.linear import Linear, MultiScaleLinear
from linvit.heads.segmentation.segmentor import Segmentor
from linvit.weights.layouts.networks import MMSEG, VITDET
from tests.families import narrow
from tests.golden_files import Golden, both_precisions, of_case
from tests.helpers import randn


@both_precisions
@of_case("vitdet_sfp")
def test_pyramid(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.constructor
    strides = [round(given["in_stride"] / scale) for scale in given["scale_factors"]]
    neck = SimpleFeaturePyramid(
        given["in_channels"], given["in_stride"], strides, given["out_channels"], norm=given["norm"] == "LN"
    )

    def name(official: str) -> str:
        level, rest = VITDET.rename(f"backbone.{official}").removeprefix("neck.levels.").split(".", 1)
        return f"levels.{int(level) - (len(strides) == 3)}.{rest}"  # without the finest

    neck.load_state_dict({name(official): tensor for official, tensor in golden.parameters().items()})
    x = golden.tensors["input"].to(dtype, copy=True).requires_grad_()
    maps = neck.to(dtype)([x])
    assert list(neck.channels) == [given["out_channels"]] * len(maps)
    if given["top_block"]:
        maps.append(maps[-1][..., ::2, ::2])
    total = torch.zeros((), dtype=dtype)
    for output, tensor in zip(golden.meta["outputs"], maps, strict=True):
        torch.testing.assert_close(tensor.float(), golden.tensors[output], rtol=1e-5, atol=1e-5)
        total = total + (tensor * golden.tensors[output.replace("output", "probe")].to(dtype)).sum()
    total.backward()
    golden.check("grad_input", x.grad)
    golden.check_parameters(neck, name)


@pytest.mark.parametrize(("channels", "parameters"), [(192, 2.66), (384, 3.30), (768, 5.56), (1024, 7.81)])
def test_parameters(channels: int, parameters: float) -> None:
    with torch.device("meta"):
        neck = SimpleFeaturePyramid(channels, 16)
    assert round(sum(parameter.numel() for parameter in neck.parameters()) / 1e6, 2) == parameters


@pytest.mark.parametrize("patch", [4, 8, 16])
def test_reductions_are_those_of_a_pyramid_whatever_the_patch(patch: int) -> None:
    neck = SimpleFeaturePyramid(8, patch, width=6)
    maps = neck([torch.randn(1, 8, 64 // patch, 96 // patch)])
    assert [tuple(x.shape[1:]) for x in maps] == [(6, 64 // r, 96 // r) for r in (4, 8, 16, 32)]
    assert neck([torch.randn(1, 8, 1, 5)])[-1].shape[-2] == 1  # a single row is not lost


DEIT = {"name": "deit_tiny", "embed_dim": 12, "depth": 8, "num_heads": 1, "patch_size": 8}


def segmentor(head: Any, backbone: Any = None) -> Segmentor:
    return linvit.create_segmentor(DEIT if backbone is None else backbone, head, 3, img_size=32)


@pytest.mark.parametrize(
    ("head", "indices", "width"),
    [("semantic_fpn", (7,), 8), ("upernet", (1, 3, 5, 7), 256), ("fcn", (7,), None), ("maresunet", (7,), 256)],
)
def test_heads_that_need_a_pyramid_get_one(head: str, indices: tuple[int, ...], width: int | None) -> None:
    model = segmentor(narrow(head)).eval()
    assert model.pyramid.indices == indices
    assert model.neck is None if width is None else model.neck is not None and model.neck.channels == (width,) * 4
    assert model(randn(1, 3, 32, 48, dtype=torch.float32)).shape == (1, 3, 32, 48)


def test_a_head_has_its_own_pyramid_beside_it_if_asked_for() -> None:
    assert not segmentor(narrow("semantic_fpn")).head.fpn.inner_blocks
    assert len(segmentor({**narrow("semantic_fpn"), "fpn": True}).head.fpn.inner_blocks) == 4
    with pytest.raises(UserError, match=r"fpn: false is for maps of 8 channels, .* got \[32, 64, 160, 256\]"):
        segmentor({**narrow("semantic_fpn"), "fpn": False}, "pvt_v2_b0")


def test_without_the_neck_a_network_is_refused() -> None:
    model = segmentor(narrow("semantic_fpn"))
    with pytest.raises(UserError, match=r"but DeiT gives it .* Create both by linvit\.create_segmentor"):
        Segmentor(model.backbone, model.head)


@pytest.mark.parametrize("head", ["semantic_fpn", "fcn"])
def test_features_of_timms_plain_transformers_have_their_norm(head: str) -> None:
    model = segmentor(narrow(head), {"name": "timm", "model": "test_vit"}).eval()
    found: list[Tensor] = []
    model.backbone.norm.register_forward_hook(lambda _, inputs, output: found.append(output))
    with torch.no_grad():
        (x,) = model.backbone.forward_intermediates(torch.ones(1, 3, 32, 32), [5], norm=True, intermediates_only=True)
        maps = model.feature_maps(torch.ones(1, 3, 32, 32))
        expected = [x] if model.neck is None else model.neck([x])
    assert len(found) == 2
    assert all(one.equal(other) for one, other in zip(maps, expected, strict=True))


# Linear heads


@both_precisions
@of_case("seg_bn_linear")
def test_linear_heads_equal_dinov2s(golden: Golden, dtype: torch.dtype) -> None:
    channels = golden.constructor["in_channels"]
    head = (Linear if len(channels) == 1 else MultiScaleLinear)(
        channels, [16] * len(channels), golden.constructor["num_classes"]
    )
    name = lambda official: MMSEG.rename(f"decode_head.{official}").removeprefix("head.")  # noqa: E731
    head.load_state_dict({name(official): tensor for official, tensor in golden.parameters().items()})
    head.to(dtype).train(golden.meta["mode"] == "train")
    inputs = golden.inputs(dtype)
    golden.check_call(head(inputs), inputs)
    golden.check_parameters(head, name)


@pytest.mark.parametrize(
    ("model", "one", "four"),  # (2 + 150) C + 150
    [("small", 58_518, 233_622), ("base", 116_886, 467_094), ("large", 155_798, 622_742)],
)
def test_parameters_of_dinov2s_heads(model: str, one: int, four: int) -> None:
    for head, parameters in ((Linear, one), (MultiScaleLinear, four)):
        with torch.device("meta"):
            spec = {"name": "timm", "model": f"vit_{model}_patch14_dinov2"}
            found = linvit.create_segmentor(spec, f"{head.__module__}:{head.__name__}", 150, img_size=518)
        assert sum(parameter.numel() for parameter in found.head.parameters()) == parameters
        assert found.neck is None
        assert len(found.pyramid.indices) == (1 if head is Linear else 4)


def test_a_head_that_lies_alone_in_a_file_leaves_the_backbone() -> None:
    """As DINOv2 publishes its heads."""
    model = segmentor("linvit.heads.segmentation.linear:Linear")
    before = {name: tensor.clone() for name, tensor in model.backbone.state_dict().items()}
    official = {
        "decode_head.bn.weight": torch.full((12,), 2.0),
        "decode_head.bn.bias": torch.full((12,), 3.0),
        "decode_head.bn.running_mean": torch.full((12,), 4.0),
        "decode_head.bn.running_var": torch.full((12,), 5.0),
        "decode_head.bn.num_batches_tracked": torch.tensor(6),
        "decode_head.conv_seg.weight": torch.ones(3, 12, 1, 1),
        "decode_head.conv_seg.bias": torch.ones(3),
    }
    report = linvit.load_pretrained(model, official)
    assert report.part == "head"
    assert report.fraction == 1
    assert not report.missing
    assert not report.unexpected
    assert model.head.bn.running_var.eq(5).all()
    assert model.head.classifier.weight.eq(1).all()
    assert all(tensor.equal(before[name]) for name, tensor in model.backbone.state_dict().items())
    with pytest.raises(UserError, match=r"supplies .* of the head, less than min_fraction"):
        linvit.load_pretrained(model, {name: tensor for name, tensor in official.items() if "bn" not in name})
