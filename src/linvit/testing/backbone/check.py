"""Checks timm's contract for backbones and linvit's additions (`check_backbone`): shapes, features and classifier."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.models import build_model_with_cfg
from torch import Tensor, nn

from linvit.analysis.operations import num_parameters
from linvit.attention.base import Attention
from linvit.backbones.initialise import classifiers
from linvit.errors import UserError
from linvit.registry import Spec, attentions
from linvit.testing import behaviour
from linvit.testing.backbone import numerics
from linvit.testing.backbone.images import CLASSES, BackboneSubject, images, pyramid
from linvit.testing.compile import compiles, exports, onnx
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import Check, Contract, Report, at, judged, message, not_supported, require
from linvit.testing.subject import Size, sized

SEEN = 1e-3
"""Minimum relative change of an output that depends on positions: disturbed weights give 1e-2 and more."""


@torch.no_grad()
def shapes(subject: BackboneSubject) -> str:
    """Checks logits, features and pooled features against the announced sizes, and images with 1 and 5 channels."""
    model, x = subject.model, subject.given
    features, logits = model.forward_features(x), model(x)
    pooled = model.forward_head(features, pre_logits=True)
    shape, width = tuple(features.shape), tuple(pooled.shape)
    _check_logits(logits)
    classes = model.num_classes
    require(classes == CLASSES, f"the attribute num_classes is {classes} after num_classes={CLASSES}")
    hidden = model.head_hidden_size
    require(width == (2, hidden), f"forward_head(pre_logits=True) gives {width}, head_hidden_size is {hidden}")
    announced = shape[0] == 2 and model.num_features in shape[1:]
    require(announced, f"forward_features gives {shape}, num_features is {model.num_features}")
    error = relative_error(model.forward_head(features), logits)
    judged(error, f"forward_head(forward_features(x)) and forward(x) differ by {error:.0e}")
    for in_chans in (1, 5):
        with at(f"in_chans={in_chans}"):
            out = subject.build(in_chans=in_chans)(images(subject.size, in_chans=in_chans))
        _check_logits(out, f" with in_chans={in_chans}")
    return f"features {shape}, pooled {width}, logits {tuple(logits.shape)}"


def _check_logits(logits: Tensor, where: str = "") -> None:
    want = (2, CLASSES)
    require(tuple(logits.shape) == want, f"logits {tuple(logits.shape)} instead of {want}{where}")


@torch.no_grad()
def feature_pyramid(subject: BackboneSubject) -> str:
    """Checks channels and reductions against `feature_info`, also in timm's wrapper for `features_only=True`."""
    model, x = subject.model, subject.given
    features = pyramid(model, x)
    net: Any = build_model_with_cfg(
        lambda **_: subject.build(),
        "checked",
        pretrained=False,
        pretrained_cfg={"url": ""},
        features_only=True,
        out_indices=tuple(range(len(features))),
        feature_cfg={"feature_cls": "getter"},
    )
    infos = list(
        zip(net.feature_info.module_name(), net.feature_info.channels(), net.feature_info.reduction(), strict=True)
    )
    alike = len(infos) == len(features)
    require(alike, f"feature_info announces {len(infos)} features, there are {len(features)}")
    for (module, channels, reduction), feature, wrapped in zip(infos, features, net(x), strict=True):
        want = (2, channels, *_reduced(subject.size, reduction))
        shape = tuple(feature.shape)
        require(shape == want, f"{module}: {shape}, feature_info announces {want}")
        require(torch.equal(wrapped, feature), f"{module}: through timm's wrapper the feature is another")
    levels = Counter(f"{channels} at 1/{reduction}" for _, channels, reduction in infos)
    return ", ".join(f"{count} of {level}" if count > 1 else level for level, count in levels.items())


@torch.no_grad()
def intermediates(subject: BackboneSubject) -> str:
    """Checks that `forward_intermediates` counts as timm does, and that its final feature is `forward_features`."""
    model, x = subject.model, subject.given
    final, features = model.forward_intermediates(x)
    alike = relative_error(final, model.forward_features(x)) <= EXACT
    require(alike, "its final feature is not forward_features(x)")
    last = len(features) - 1
    ends = sorted({0, last})
    for indices, want in ((1, [last]), ([-1], [last]), ([0], [0]), (ends, ends)):
        for stop_early in (False, True):
            said = f"indices={indices}, stop_early={stop_early}"
            with at(said):
                got = pyramid(model, x, indices=indices, stop_early=stop_early)
            alike = len(got) == len(want) and all(
                relative_error(a, features[i]) <= EXACT for a, i in zip(got, want, strict=True)
            )
            require(alike, f"{said} gives other features than all of them do")
    return f"{len(features)} features"


@torch.no_grad()
def pruning(subject: BackboneSubject) -> str:
    """Checks that `prune_intermediate_layers` drops what features do not need, and does not change the features."""
    features = pyramid(subject.model, subject.given)
    model = subject.build()
    sizes = [num_parameters(model)]
    for level in sorted({0, max(0, len(features) - 2)}, reverse=True):
        with at(f"level {level}"):
            indices = model.prune_intermediate_layers([level], prune_norm=True)
            (feature,) = pyramid(model, subject.given, indices=indices)
        alike = relative_error(feature, features[level]) <= EXACT
        require(alike, f"the feature of level {level} is another after pruning")
        sizes.append(num_parameters(model))
        require(sizes[-1] < sizes[-2], f"pruning to level {level} drops no parameter")
    return f"{' to '.join(map(str, sizes))} parameters"


@torch.no_grad()
def input_sizes(subject: BackboneSubject) -> str:
    """Checks one instance of the default size on images of any size: it takes them, or refuses and names the size."""
    model = subject.build(subject.own_size, torch.float32)
    sizes: list[Size] = [(97, 131), (64, 192), (192, 64)]
    sizes += [] if subject.quick else [(224, 224), (256, 320), (512, 512)]
    before = model(images(subject.own_size, batch=1, dtype=torch.float32))
    refused = []
    for size in sizes:
        try:
            with at(sized(size)):
                out = model(images(size, batch=1, dtype=torch.float32))
        except UserError as error:
            named = sized(size) in str(error)
            require(named, f"{sized(size)} is refused without naming it: {message(error)}")
            refused.append(f"{sized(size)}: {message(error)}")
            continue
        lost = int((~out.isfinite()).sum())
        fits = tuple(out.shape) == (1, CLASSES) and not lost
        require(fits, f"{sized(size)} gives {tuple(out.shape)}, {lost} not finite")
    after = model(images(subject.own_size, batch=1, dtype=torch.float32))
    require(torch.equal(after, before), f"calls at other sizes change the output at {sized(subject.own_size)}")
    own = f"through an instance for {sized(subject.own_size)}"
    if refused:
        raise not_supported(f"{'; '.join(refused)}; {own}")
    return f"{', '.join(map(sized, sizes))} {own}"


@torch.no_grad()
def height_and_width(subject: BackboneSubject) -> str:
    """Checks that height and width are not exchanged: in features, and in the output of a transposed image."""
    wide, high = subject.wide, subject.wide[::-1]
    model = subject.build(wide)
    for size in (wide, high):
        with at(f"{sized(size)} through an instance for {sized(wide)}"):
            found = [tuple(feature.shape[2:]) for feature in pyramid(model, images(size, batch=1))]
        want = [_reduced(size, info["reduction"]) for info in model.feature_info]
        require(found == want, f"features of {sized(size)} are {found} instead of {want}")
    nearness = min(_nearness(model, size) for size in (wide, high))
    require(nearness > 1, f"a change in one corner moves a feature {nearness:.1g} times as much there as elsewhere")
    effect = relative_error(subject.model(subject.given.mT), subject.model(subject.given))
    said = f"transposing a square image moves the output by {effect:.0e}"
    require(effect > SEEN, said)
    return f"{said}; a change in one corner moves features at least {nearness:.1f} times as much there as elsewhere"


@torch.no_grad()
def classifier(subject: BackboneSubject) -> str:
    """Checks that `reset_classifier` replaces or removes the classifier, and that `num_classes=0` leaves it out."""
    model, x = subject.build(dtype=torch.float32), images(subject.size, dtype=torch.float32)
    pooled, before = model.forward_head(model.forward_features(x), pre_logits=True), model(x)
    for classes in (CLASSES, 5, 0):
        with at(f"reset_classifier({classes})"):
            model.reset_classifier(classes)
            out = model(x)
        fits = tuple(out.shape) == (2, classes or pooled.shape[1]) and model.num_classes == classes
        require(fits, f"reset_classifier({classes}) gives {tuple(out.shape)}, num_classes {model.num_classes}")
        replaced = classes != CLASSES or not torch.equal(out, before)
        require(replaced, f"reset_classifier({classes}) leaves the classifier as it was")
    alike = torch.equal(out, pooled)
    require(alike, "reset_classifier(0) gives another feature than forward_head(pre_logits=True)")
    left = [name for part in classifiers(model) for name, _ in part.named_parameters()]
    require(not left, "get_classifier() has parameters after reset_classifier(0)")
    bare = subject.build(num_classes=0, dtype=torch.float32)(x)
    alike = bare.shape == pooled.shape
    require(alike, f"num_classes=0 gives {tuple(bare.shape)} instead of {tuple(pooled.shape)}")
    return f"{CLASSES}, 5, 0 classes"


@torch.no_grad()
def another_attention(subject: BackboneSubject) -> str:
    """Checks that `attention=` applies to every layer, if the constructor takes it."""
    if "attention" not in subject.parameters:
        raise not_supported("the constructor takes no attention")
    for name in ("linear", "softmax"):
        try:
            model = subject.build(attention=name)
        except UserError as error:
            raise not_supported(message(error)) from error
        found = [type(module) for module in model.modules() if isinstance(module, Attention)]
        others = {kind.__name__ for kind in found if kind is not attentions.get(name)}
        built = ", ".join(sorted(others)) or "no linvit.Attention"
        require(found and not others, f"attention='{name}' builds {built}")
        with at(name):
            lost = int((~model(subject.given).isfinite()).sum())
        require(not lost, f"{lost} logits not finite with attention='{name}'")
    return f"{len(found)} layers"


def _reduced(size: Size, reduction: int) -> Size:
    """Returns the sides of a feature at a reduction, rounded up, since other sides are padded."""
    return -(-size[0] // reduction), -(-size[1] // reduction)


def _nearness(model: nn.Module, size: Size) -> float:
    """Returns the ratio of the change of features in the changed corner to that elsewhere, the minimum of levels."""
    before = images(size, batch=1)
    after = before.clone()
    _corner(after).copy_(_corner(images(size, batch=1, seed=2)))
    ratios = []
    for old, new in zip(pyramid(model, before), pyramid(model, after), strict=True):
        moved = (new - old).square().mean(1)  # (1, H', W')
        inside = _corner(moved)
        elsewhere = (moved.sum() - inside.sum()) / (moved.numel() - inside.numel())
        ratios.append(float((inside.mean() / elsewhere).sqrt()))
    return min(ratios)


def _corner(plane: Tensor) -> Tensor:
    """Returns a view of the upper right corner of (..., H, W): half as high, a quarter as wide."""
    height, width = plane.shape[-2:]
    return plane[..., : math.ceil(height / 2), width * 3 // 4 :]


CONTRACT = Contract(
    first=(Check("constructor", behaviour.constructor),),
    clauses=(
        Check("shapes", shapes),
        Check("pyramid", feature_pyramid),
        Check("intermediates", intermediates),
        Check("pruning", pruning),
        Check("any input", input_sizes),
        Check("height and width", height_and_width),
        Check("classifier", classifier),
        Check("another attention", another_attention),
        behaviour.BATCH_INDEPENDENCE,
        *behaviour.COMMON,
        Check("checkpointing", numerics.checkpointing),
        Check("stochastic depth", numerics.stochastic_depth),
        Check("parameter groups", numerics.parameter_groups),
        *numerics.NUMERICS,
        Check("torch.compile", compiles, quick=False),
        Check("torch.export", exports, quick=False),
        Check("onnx", onnx, quick=False),
    ),
)


def check_backbone(
    spec_or_callable: Spec | Callable[..., nn.Module],
    attention: Spec | Sequence[Spec] | None = None,
    *,
    img_size: int | Sequence[int] = 64,
    quick: bool = False,
) -> Report:
    """Checks on the CPU that a backbone fulfils timm's contract, and accepts images of any size and any attention.

    Parameters are first moved away from their initial values. An exception inside a check, including `sys.exit`, is a
    failure of that check and is reported where it first occurs; a size that the backbone rejects by a `UserError` that
    names it is "not supported".

    Args:
        spec_or_callable: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class or
            function itself.
        attention: One spec for all blocks, or a list, as the backbone takes it; None keeps its default.
        img_size: Side, or (H, W), of the images of most lines and of the instances for them; "any input" builds for the
            constructor's own size.
        quick: Skip `torch.compile`, `torch.export`, ONNX and the largest images.

    Raises:
        UserError: If there is no such backbone, or it rejects its options.

    Example:
        >>> from linvit.testing import check_backbone
        >>> report = check_backbone("flatten_swin_tiny", quick=True)
        >>> assert report.passed, report
    """
    return CONTRACT.report(BackboneSubject(spec_or_callable, attention, img_size, quick), quick)
