"""`check_head`: the contracts of heads of semantic segmentation and of detection, applied to one of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from linvit.heads.detection.base import DetectionHead
from linvit.registry import Spec, heads
from linvit.testing import behaviour
from linvit.testing.backbone import numerics
from linvit.testing.backbone.images import CLASSES
from linvit.testing.head import detection
from linvit.testing.head.subject import CHANNELS, REDUCTIONS, DetectionSubject, HeadSubject
from linvit.testing.numbers import EXACT, relative_error
from linvit.testing.report import Check, Contract, Report, at, require
from linvit.testing.subject import sized

SIZES = ((97, 131), (33, 64), (64, 192))


@torch.no_grad()
def shapes(subject: HeadSubject) -> str:
    """Checks finite logits (B, K, H / reduction, W / reduction); where no reduction divides the sides, (B, K, ...)."""
    head, known = subject.model.head, (subject.size, subject.wide)
    for size in (*SIZES, *known):
        with at(sized(size)):
            logits = head(subject.maps(size))
        want = (2, CLASSES, *(-(-side // head.reduction) for side in size))
        compared, shape = 4 if size in known else 2, tuple(logits.shape)
        said = f"logits {shape} instead of {want} at {sized(size)}, by the head's reduction {head.reduction}"
        require(shape[:compared] == want[:compared], said)
        require(logits.isfinite().all(), f"{int((~logits.isfinite()).sum())} logits not finite at {sized(size)}")
    return f"logits {want} at {sized(size)}"


@torch.no_grad()
def other_pyramids(subject: HeadSubject) -> str:
    """Checks a pyramid of other widths and fewer maps: the head takes it, or refuses it by a `UserError`."""
    given: Any = subject.inputs(None)
    for channels, reductions in (((8, 8, 8, 8), REDUCTIONS), (CHANNELS[:3], REDUCTIONS[:3])):
        with at(f"channels {channels}"):
            model = subject.create(channels=channels, reductions=reductions).double()
            if isinstance(subject, DetectionSubject):
                detection.finite_losses(model, given)
            out = given(model.eval())
        if not isinstance(subject, DetectionSubject):
            shape = tuple(out.shape)
            require(shape == (2, CLASSES, *subject.size), f"channels {channels} give {shape}")
    return "other widths, fewer maps"


@torch.no_grad()
def auxiliary(subject: HeadSubject) -> str:
    """Checks that `with_auxiliary` returns the same logits, and auxiliary ones of as many classes."""
    head, maps = subject.model.head, subject.maps()
    logits, others = head.with_auxiliary(maps)
    require(relative_error(logits, head(maps)) <= EXACT, "its logits are others than forward's")
    shapes = [tuple(other.shape) for other in others]
    wrong = [shape for shape in shapes if shape[:2] != (2, CLASSES) or len(shape) != 4]
    require(not wrong, f"auxiliary logits {wrong} instead of {(2, CLASSES, 'h', 'w')}")
    return ", ".join(map(str, shapes)) or "none"


@torch.no_grad()
def classifiers(subject: HeadSubject) -> str:
    """Checks that another number of classes changes the layers that `classifiers` names, and no others."""
    shapes = {name: t.shape for name, t in subject.model.state_dict().items()}
    other = subject.create(num_classes=CLASSES + 2)
    changed = {name for name, tensor in other.state_dict().items() if tensor.shape != shapes.get(name)}
    named = {module: f"{name}." for name, module in other.named_modules()}
    announced = tuple(named[module] for module in other.head.classifiers())
    missing = [name for name in changed if not name.startswith(announced)]
    same = [prefix for prefix in announced if not any(name.startswith(prefix) for name in changed)]
    said = f"layers of another shape that it does not name: {missing}; named, of the same shape: {same}"
    require(not missing and not same, said)
    return ", ".join(prefix.removeprefix("head.").rstrip(".") for prefix in announced)


CONTRACT = Contract(
    first=(Check("constructor", behaviour.constructor),),
    clauses=(
        Check("shapes", shapes),
        Check("other pyramids", other_pyramids, refusable=True),
        Check("auxiliary outputs", auxiliary),
        Check("classifiers", classifiers),
        behaviour.BATCH_INDEPENDENCE,
        *behaviour.COMMON,
        *numerics.NUMERICS,
        *behaviour.COMPILER,
    ),
)

DETECTION = Contract(
    first=(Check("constructor", behaviour.constructor),),
    clauses=(
        Check("losses", detection.losses),
        Check("empty targets", detection.empty_targets),
        Check("detections", detection.detections),
        Check("any size", detection.any_size),
        Check("other pyramids", other_pyramids, refusable=True),
        Check("classifiers", classifiers),
        *behaviour.COMMON,
        Check("autocast bfloat16", detection.autocast),
    ),
)


def check_head(
    spec_or_callable: Spec | Callable[..., nn.Module], *, img_size: int | Sequence[int] = 64, quick: bool = False
) -> Report:
    """Checks on the CPU that a head of semantic segmentation or of detection keeps its contract, on a small pyramid.

    Parameters are moved away from their initial values first. An exception inside a check, `sys.exit` included, is that
    check's failure.

    Args:
        spec_or_callable: A registered name, `{name: ..., option: value}`, "package.module:Class", or the class itself.
        img_size: Side, or (H, W), of the images of most lines.
        quick: Leave out `torch.compile` and `torch.export`.

    Raises:
        UserError: If there is no such head, or it refuses its options.

    Example:
        >>> from linvit.testing import check_head
        >>> report = check_head("upernet", quick=True)
        >>> assert report.passed, report
    """
    made: Any = spec_or_callable if callable(spec_or_callable) else heads.get(heads.parse(spec_or_callable)[0])
    if getattr(made, "task", None) == DetectionHead.task:
        return DETECTION.report(DetectionSubject(spec_or_callable, img_size, quick), quick)
    return CONTRACT.report(HeadSubject(spec_or_callable, img_size, quick), quick)
