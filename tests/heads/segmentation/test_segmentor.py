"""Every head on every family of backbones; images of any size; published sizes; what is refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import linvit
from linvit import Attention, UserError
from linvit.heads.create import heads_of
from linvit.heads.segmentation.segmentor import Segmentor
from linvit.registry import attentions
from linvit.tasks.execution import enable_grad_checkpointing
from linvit.tasks.parameter_groups import parameter_groups
from tests.families import families, narrow, small
from tests.helpers import perturb, randn

CLASSES = 5
PVT = {"name": "pvt_v2_b0", "embed_dims": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_heads": [1, 2, 3, 4]}
SWIN = {"name": "swin_tiny", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2]}
FLATTEN = {**SWIN, "name": "flatten_swin_tiny"}
RESNET = {"name": "timm", "model": "test_resnet"}
WHOLE_PATCHES = {"DeiT"}


def segmentor(backbone: Any = None, head: Any = "upernet", img_size: Any = 64, **options: Any) -> Segmentor:
    torch.manual_seed(0)
    head = narrow(head) if isinstance(head, str) else head
    spec = PVT if backbone is None else backbone
    return linvit.create_segmentor(spec, head, CLASSES, img_size=img_size, **options)


def trainable(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def families_with_heads() -> list[Any]:
    """Two heads on each family, so that all are met; the other pairs are slow."""
    heads = heads_of("segmentation")
    return [
        pytest.param(family, head, marks=[] if (column - 2 * row) % len(heads) < 2 else pytest.mark.slow)
        for row, family in enumerate(families())
        for column, head in enumerate(heads)
    ]


@pytest.mark.parametrize(("family", "head"), families_with_heads())
def test_every_head_on_every_family(family: str, head: str) -> None:
    """Odd sides, and a finite gradient that is not 0 for every parameter."""
    backbone = small(families()[family])
    model = perturb(segmentor(backbone, head), scale=0.05).train()
    size = (64, 96) if family in WHOLE_PATCHES else (61, 83)
    images = randn(2, 3, *size, dtype=torch.float32, grad=True)
    logits, others = model(images, auxiliary=True)
    assert [maps.shape for maps in (logits, *others)] == [(2, CLASSES, *size)] * (1 + len(others))
    torch.autograd.backward([logits, *others], [randn(*maps.shape, dtype=torch.float32) for maps in (logits, *others)])
    for name, tensor in {"the images": images, **dict(model.named_parameters())}.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, name
            assert tensor.grad.isfinite().all(), name


@pytest.mark.parametrize("attention", ["softmax", "focused"])
def test_another_attention_in_the_skips_of_maresunet(attention: str) -> None:
    model = segmentor(RESNET, {**narrow("maresunet"), "attention": attention, "num_heads": 2}).train()
    assert {type(module) for module in model.head.modules() if isinstance(module, Attention)} == {
        attentions.get(attention)
    }
    perturb(model, scale=0.1)
    logits = model(randn(2, 3, 61, 83, dtype=torch.float32))
    logits.backward(randn(*logits.shape, dtype=torch.float32))
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


@torch.no_grad()
@pytest.mark.parametrize("backbone", [PVT, FLATTEN, RESNET], ids=lambda spec: spec["name"])
@pytest.mark.parametrize("size", [(97, 131), (33, 40)], ids=str)
def test_images_of_any_size(backbone: dict[str, Any], size: tuple[int, int]) -> None:
    model = segmentor(backbone).eval()
    logits = model(randn(1, 3, *size, dtype=torch.float32))
    assert logits.shape == (1, CLASSES, *size)
    assert logits.isfinite().all()
    quarter = model(randn(1, 3, *size, dtype=torch.float32), full_size=False)
    assert quarter.shape == (1, CLASSES, -(-size[0] // 4), -(-size[1] // 4))
    assert logits.equal(nn.functional.interpolate(quarter, size, mode="bilinear"))


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [
        {"model": "test_resnet", "features_only": True},
        {"model": "swin_tiny_patch4_window7_224"},
        {"model": "test_efficientnet"},
    ],
    ids=str,
)
def test_timms_pyramids(options: dict[str, Any]) -> None:
    model = segmentor({"name": "timm", **options}, img_size=224).eval()
    assert model(randn(1, 3, 61, 83, dtype=torch.float32)).shape == (1, CLASSES, 61, 83)
    assert model.head.reductions == (4, 8, 16, 32)


def test_levels_that_are_finer_than_the_head_wants_are_left_out() -> None:
    assert segmentor(RESNET, "upernet").pyramid.reductions == (4, 8, 16, 32)
    assert segmentor(RESNET, "macunet").pyramid.reductions == (2, 4, 8, 16, 32)
    assert segmentor("macunet_encoder", "semantic_fpn").pyramid.reductions == (4, 8, 16)


# Sizes of the published networks


@pytest.mark.parametrize(
    ("backbone", "head", "parameters"),
    [
        ("swin_tiny", "upernet", 59_941_862),
        ("swin_base", "upernet", 121_279_716),
        ("pvt_tiny", "semantic_fpn", 16_981_398),
        ("pvt_large", "semantic_fpn", 65_121_430),
    ],
)
def test_parameters_are_exactly_the_published(backbone: str, head: str, parameters: int) -> None:
    with torch.device("meta"):
        assert trainable(linvit.create_segmentor(backbone, head, 150)) == parameters


@torch.no_grad()
@pytest.mark.parametrize(
    ("backbone", "head", "macs"), [("swin_tiny", "upernet", 944.385), ("pvt_tiny", "semantic_fpn", 157.723)]
)
def test_macs_of_the_published_networks(backbone: str, head: str, macs: float) -> None:
    """At 512 x 2048, in G; without the auxiliary head."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        linvit.create_segmentor(backbone, head, 150).eval()(torch.empty(1, 3, 512, 2048))
    assert counter.get_total_flops() / 2e9 == pytest.approx(macs, abs=5e-4)


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("head", heads_of("segmentation"))
@pytest.mark.parametrize("family", sorted(families().keys() - WHOLE_PATCHES))
def test_every_head_on_every_family_off_the_grid(family: str, head: str) -> None:
    """Built for 64 x 64: odd sizes, and the shapes of large ones."""
    backbone = small(families()[family])
    model = segmentor(backbone, head).eval()
    for size in ((97, 131), (33, 40)):
        logits = model(randn(1, 3, *size, dtype=torch.float32))
        assert logits.shape == (1, CLASSES, *size)
        assert logits.isfinite().all()
    with torch.device("meta"):
        large = segmentor(backbone, head).eval()
        for size in ((512, 512), (512, 2048)):
            assert large(torch.empty(1, 3, *size)).shape == (1, CLASSES, *size)


# What tasks rely on


def test_the_attention_of_the_backbone() -> None:
    model = segmentor(FLATTEN, attention="hydra")
    assert {type(m).__name__ for m in model.modules() if isinstance(m, Attention)} == {"HydraAttention"}
    with pytest.raises(UserError, match="backbone 'macunet_encoder' has a fixed attention"):
        segmentor("macunet_encoder", attention="hydra")


def test_the_spec_of_the_backbone_has_the_last_word() -> None:
    assert not segmentor({**SWIN, "feature_norms": False}).backbone.feature_norms
    spec = {"name": "pvt_tiny", "embed_dims": [8, 16, 24, 32], "num_heads": [1, 2, 3, 4], "depths": [1, 1, 1, 1]}
    assert segmentor(spec).backbone.stages[0].pos_embed.shape == (1, 256, 8)
    assert segmentor({**spec, "img_size": 32}).backbone.stages[0].pos_embed.shape == (1, 64, 8)


def test_position_tables_and_windows_off_the_grid() -> None:
    """Focused attention over the whole map at any size, or in windows of a fixed side, padded."""
    whole = segmentor(FLATTEN)
    fixed = segmentor({**FLATTEN, "window_size": [16, 8, 7, 7]})
    fixed.load_state_dict(whole.state_dict())
    whole.eval(), fixed.eval()
    images = randn(1, 3, 97, 131, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(whole(images[..., :64, :64]), fixed(images[..., :64, :64]))  # the map is one window
        assert not torch.equal(whole(images), fixed(images))


def test_parameter_groups() -> None:
    """Layer-wise learning rates and a lower rate for the backbone; the head has the full rate."""
    model = segmentor(SWIN)
    groups = parameter_groups(model, 1.0, 0.05, layer_decay=0.5, backbone_lr_scale=0.1)
    found = {id(parameter): (group, group["lr"]) for group in groups for parameter in group["params"]}
    assert len(found) == len(list(model.parameters()))
    assert {found[id(parameter)][1] for parameter in model.head.parameters()} == {1.0}
    assert {found[id(parameter)][1] for parameter in model.backbone.norm.parameters()} == {0.1}
    assert found[id(model.backbone.stages[0].embed.proj.weight)][1] < 0.05
    table = model.backbone.stages[0].blocks[0].attn.relative_position_bias_table
    assert found[id(table)][0]["weight_decay"] == 0
    assert found[id(model.head.classifier.weight)][0]["weight_decay"] == 0.05


def test_checkpointing_changes_no_gradient() -> None:
    torch.manual_seed(0)
    model = segmentor(FLATTEN).double().eval()
    model.backbone.train()  # activations are computed anew in training only; dropout would differ
    images = randn(1, 3, 61, 83, grad=True)
    plain = torch.autograd.grad(model(images).square().sum(), [images, *model.backbone.parameters()])
    enable_grad_checkpointing(model)
    assert model.backbone.grad_checkpointing
    again = torch.autograd.grad(model(images).square().sum(), [images, *model.backbone.parameters()])
    for got, want in zip(again, plain, strict=True):
        torch.testing.assert_close(got, want)


def test_initial_values() -> None:
    """Convolutions by their fan-out, the pyramid's uniform, classifiers of deviation 0.01."""
    for head in ("upernet", "semantic_fpn"):
        model = linvit.create_head(head, channels=[64, 128], reductions=[4, 8], num_classes=150)
        for classifier in model.classifiers():
            assert classifier.weight.std().item() == pytest.approx(0.01, rel=0.05)
            assert classifier.bias.eq(0).all()
        for name, module in model.named_modules():
            if isinstance(module, nn.Conv2d) and module not in model.classifiers():
                fan_out, fan_in = (module.weight[0, 0].numel() * n for n in module.weight.shape[:2])
                of_fpn = name.startswith("fpn.")
                want = (2 / (fan_out + fan_in)) ** 0.5 if of_fpn else (2 / fan_out) ** 0.5
                assert module.weight.std().item() == pytest.approx(want, rel=0.05), name
                assert (module.bias is not None) == of_fpn, name
                assert not of_fpn or module.bias.eq(0).all(), name


# What is refused


@pytest.mark.parametrize(
    ("head", "reductions", "message"),
    [
        ("upernet", [16, 16], r"the first at a reduction of 4 or less, .* got reductions \[16, 16\].* or the head fcn"),
        ("upernet", [4, 4], "each coarser than the one before"),
        ("semantic_fpn", [4, 4], "each coarser than the one before"),
        ("upernet", [4], "needs 2 feature maps or more"),
        ("semantic_fpn", [8, 16], "SemanticFPN needs a feature map or more, the first at a reduction of 4 or less"),
        ("maresunet", [4, 8, 8], r"each at twice the reduction of the one before; got reductions \[4, 8, 8\]"),
        ("macunet", [1, 4], "each at twice the reduction of the one before"),
        ("fcn", [8, 4], "the finest map first; got channels"),
        ("fcn", [], "one number of channels and one reduction per feature map"),
        ("fcn", [4, 0], r"an entry of reductions \[4, 0\] must be a whole number at least 1"),
    ],
)
def test_wrong_pyramids(head: str, reductions: list[int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        linvit.create_head(head, channels=[16] * len(reductions), reductions=reductions, num_classes=3)


def test_other_mistakes() -> None:
    with pytest.raises(UserError, match=r"no head is called 'upernett'\. Did you mean 'upernet'"):
        segmentor(head={"name": "upernett"})
    with pytest.raises(UserError, match=r"head 'upernet' takes no option 'widht'\. Did you mean 'width'"):
        segmentor(head={"name": "upernet", "widht": 3})
    with pytest.raises(UserError, match="num_classes must be a whole number at least 1; got 0"):
        linvit.create_segmentor(PVT, "fcn", 0)
    with pytest.raises(UserError, match="level 4 is not one of 1 feature maps"):
        segmentor(head={"name": "fcn", "level": 4})
    with pytest.raises(UserError, match="attention lists 2 specs for 4 feature maps"):
        segmentor(head={"name": "maresunet", "attention": ["taylor", "softmax"]})
    with pytest.raises(UserError, match="channel_attention must be one of softmax, linear"):
        segmentor(head={"name": "maresunet", "channel_attention": "sofmax"})
    with pytest.raises(UserError, match="a batch of one image cannot train pyramid pooling"):
        segmentor()(torch.zeros(1, 3, 64, 64))
    head = linvit.create_head("fcn", channels=[8, 16], reductions=[4, 8], num_classes=3)
    with pytest.raises(UserError, match=r"Create both by linvit\.create_segmentor"):
        Segmentor(linvit.create_backbone(PVT, num_classes=0), head)
    with pytest.raises(UserError, match=r"Linear has no features\. Use a backbone with feature maps"):
        Segmentor(nn.Linear(2, 2), head)
