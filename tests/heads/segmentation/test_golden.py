"""The heads equal mmsegmentation's, MAResU-Net's and MACU-Net's code: outputs, gradients, running statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.heads.layers import PyramidPooling, resize
from linvit.heads.segmentation.attention_skip import AttentionSkip, ChannelAttention, LinearChannelAttention
from linvit.heads.segmentation.fcn import FCN
from linvit.heads.segmentation.macunet import ChannelReweighting
from linvit.heads.segmentation.maresunet import Decoder
from linvit.heads.segmentation.semantic_fpn import SemanticFPN
from linvit.heads.segmentation.upernet import UPerNet
from linvit.layers.ac_block import ACBlock
from linvit.weights.fit import fit_projections
from linvit.weights.layouts.layout import flat as as_linear
from linvit.weights.layouts.networks import MACUNET, MARESUNET, MMSEG
from tests.golden_files import Golden, both_precisions, of_case

MAPS = ("c2", "c3", "c4", "c5")
REDUCTIONS = (4, 8, 16, 32)


def under_head(name: str, layout: Any = MMSEG, prefix: str = "decode_head.") -> str:
    """Our name within a head of an official one."""
    return str(layout.rename(prefix + name)).removeprefix("head.")


def load(module: nn.Module, golden: Golden, our_name: Callable[[str], str], dtype: torch.dtype) -> None:
    module.load_state_dict({our_name(name): tensor for name, tensor in golden.parameters().items()})
    module.to(dtype).train(bool(golden.named("after.")))


def label_loss(logits: Tensor, label: Tensor, ignore_index: int) -> Tensor:
    """The mean over all pixels, of which those without a label count 0."""
    upsampled = resize(logits, label.shape[-2:])
    return F.cross_entropy(upsampled, label[:, 0], ignore_index=ignore_index, reduction="none").mean()


@both_precisions
@of_case("seg_upernet")
def test_upernet(golden: Golden, dtype: torch.dtype) -> None:
    given, inputs = golden.constructor["decode_head"], golden.named_inputs(dtype)
    auxiliary = golden.constructor["auxiliary_head"]
    head = UPerNet(
        given["in_channels"],
        REDUCTIONS,
        given["num_classes"],
        width=given["channels"],
        pool_sizes=given["pool_scales"],
        dropout=given["dropout_ratio"],
        auxiliary_width=auxiliary["channels"],
    )
    name = lambda official: under_head(official, prefix="")  # noqa: E731
    load(head, golden, name, dtype)
    logits, (of_auxiliary,) = head.with_auxiliary([inputs[name] for name in MAPS])
    if "label" not in inputs:
        golden.check_outputs({"logits": logits, "aux_logits": of_auxiliary}, inputs)
    else:
        label, ignored = inputs["label"], golden.kwargs["ignore_index"]
        right = resize(logits, label.shape[-2:]).argmax(1) == label[:, 0]
        outputs = {
            "decode_loss_seg": label_loss(logits, label, ignored),
            "aux_loss_seg": auxiliary["loss_weight"] * label_loss(of_auxiliary, label, ignored),
            "decode_acc_seg": 100 * right.to(dtype).mean(),
        }
        golden.check_outputs(outputs, inputs)
    golden.check_parameters(head, name)


@both_precisions
@of_case("seg_semantic_fpn")
def test_semantic_fpn(golden: Golden, dtype: torch.dtype) -> None:
    neck, given, inputs = *(golden.constructor[name] for name in ("neck", "decode_head")), golden.named_inputs(dtype)
    head = SemanticFPN(
        neck["in_channels"],
        given["feature_strides"],
        given["num_classes"],
        width=given["channels"],
        fpn_width=neck["out_channels"],
        dropout=given["dropout_ratio"],
    )
    name = lambda official: under_head(official, prefix="")  # noqa: E731
    load(head, golden, name, dtype)
    features = [inputs[name] for name in MAPS]
    if "label" not in inputs:
        pyramid = head.fpn(features)
        logits = head.fuse(pyramid)
        golden.check("output.logits", head(features))
        golden.check_outputs({**dict(zip(("p2", "p3", "p4", "p5"), pyramid, strict=True)), "logits": logits}, inputs)
    else:
        loss = label_loss(head(features), inputs["label"], golden.kwargs["ignore_index"])
        golden.check_outputs({"loss": loss}, inputs)
    golden.check_parameters(head, name)


@both_precisions
@of_case("seg_fcn")
def test_fcn(golden: Golden, dtype: torch.dtype) -> None:
    given, inputs = golden.constructor, golden.named_inputs(dtype)
    head = FCN(
        [inputs[name].shape[1] for name in MAPS],
        REDUCTIONS,
        given["num_classes"],
        level=given["in_index"],
        width=given["channels"],
        num_convs=given["num_convs"],
        concat_input=given["concat_input"],
        dropout=given["dropout_ratio"],
    )
    load(head, golden, under_head, dtype)
    golden.check_outputs({"output": head([inputs[name] for name in MAPS])}, inputs)
    golden.check_parameters(head, under_head)


@both_precisions
@of_case("seg_psp")
def test_pyramid_pooling(golden: Golden, dtype: torch.dtype) -> None:
    """mmsegmentation's PSP head is the pooling of UPerNet and a classifier."""
    given, inputs = golden.constructor, golden.named_inputs(dtype)
    head = nn.Module()
    head.pyramid_pooling = PyramidPooling(given["in_channels"], given["channels"], given["pool_scales"])
    head.classifier = nn.Conv2d(given["channels"], given["num_classes"], 1)
    load(head, golden, under_head, dtype)
    golden.check_outputs({"output": head.classifier(head.pyramid_pooling(inputs["c5"]))}, inputs)
    golden.check_parameters(head, under_head)


# MAResU-Net and MACU-Net, part by part


def check_part(golden: Golden, part: nn.Module, our_name: Callable[[str], str], dtype: torch.dtype) -> None:
    """One input, one output; names are the layout's."""
    state = {our_name(name): value for name, value in golden.parameters().items()}
    flat = {name: as_linear(value) if "position_attention" in name else value for name, value in state.items()}
    part.load_state_dict(fit_projections(flat, part))
    part.to(dtype).eval()
    inputs = golden.inputs(dtype)
    golden.check_call(part(*inputs), inputs)
    parameters = dict(part.named_parameters())
    for name in golden.named("grad_param."):
        ours = our_name(name.removeprefix("grad_param."))
        golden.check(name, gradient(part, parameters, ours).view_as(golden.tensors[name]))


def gradient(part: Any, parameters: dict[str, nn.Parameter], name: str) -> Tensor:
    """The gradient of a parameter, or of those rows of the joined projection that an official one is."""
    if name in parameters:
        return parameters[name].grad
    attention, letter, kind = name.rpartition(".")[0].rpartition(".")[0], *name.split(".")[-2:]
    rows = parameters[f"{attention}.qkv.{kind}"].grad.split(part.get_submodule(attention).widths)
    return dict(zip("qkv", rows, strict=True))[letter]


@both_precisions
@of_case("maresunet_pam_cam_layer")
def test_attention_skip(golden: Golden, dtype: torch.dtype) -> None:
    grid = linvit.Grid(tuple(golden.tensors["input"].shape[2:]))
    part = AttentionSkip(golden.constructor["in_ch"], grid)

    def name(official: str) -> str:
        return under_head(official, MARESUNET, "attention1.").removeprefix("skips.0.")

    check_part(golden, part, name, dtype)


@both_precisions
@of_case("maresunet_pam")
def test_position_attention(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.constructor
    grid = linvit.Grid(tuple(golden.tensors["input"].shape[2:]))
    spec = {"name": "taylor", "key_reduction": given["scale"], "eps": given["eps"]}
    part = nn.Sequential()
    part.position_attention = AttentionSkip(given["in_places"], grid, spec).position_attention
    check_part(golden, part, lambda name: under_head(f"PAM.{name}", MARESUNET, "attention1.")[8:], dtype)


@both_precisions
@of_case("maresunet_cam", "lam_channel")
def test_channel_attention(golden: Golden, dtype: torch.dtype) -> None:
    linear = golden.meta["case"] == "lam_channel"
    part = LinearChannelAttention() if linear else ChannelAttention()
    part.eps, part.norm_eps = golden.constructor.get("eps"), 0.0
    check_part(golden, part, lambda name: name, dtype)


@both_precisions
@of_case("maresunet_decoder")
def test_decoder(golden: Golden, dtype: torch.dtype) -> None:
    part = Decoder(golden.constructor["in_channels"], golden.constructor["n_filters"])

    def name(official: str) -> str:
        return under_head(official, MARESUNET, "decoder1.").removeprefix("decoders.0.")

    check_part(golden, part, name, dtype)


@both_precisions
@of_case("macunet_acblock")
def test_ac_block(golden: Golden, dtype: torch.dtype) -> None:
    part = ACBlock(golden.constructor["in_planes"], golden.constructor["out_planes"])
    check_part(golden, part, lambda name: MACUNET.rename(f".{name}")[1:], dtype)


@both_precisions
@of_case("macunet_channel_attention")
def test_channel_reweighting(golden: Golden, dtype: torch.dtype) -> None:
    given = golden.constructor
    part = ChannelReweighting(given["in_planes"], given["out_planes"], given["ratio"])
    check_part(golden, part, lambda name: MACUNET.rename(f".{name}")[1:], dtype)
