"""`check_head`: the contracts of heads of semantic segmentation and of detection, applied to one of them."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from linvit.heads.detection.base import DetectionHead
from linvit.registry import Spec, heads
from linvit.testing import behaviour
from linvit.testing.backbone import numerics
from linvit.testing.head import detection, segmentation
from linvit.testing.head.subject import DetectionSubject, HeadSubject
from linvit.testing.report import Check, Contract, Report

CONTRACT = Contract(
    first=(Check("constructor", behaviour.constructor),),
    clauses=(
        Check("shapes", segmentation.shapes),
        Check("other pyramids", segmentation.other_pyramids),
        Check("auxiliary outputs", segmentation.auxiliary),
        Check("classifiers", segmentation.classifiers),
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
        Check("other pyramids", detection.other_pyramids),
        Check("classifiers", segmentation.classifiers),
        *behaviour.COMMON,
        Check("autocast bfloat16", detection.autocast),
        Check("devices", detection.devices),
        Check("torch.compile of the backbone", detection.compiles, quick=False),
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
