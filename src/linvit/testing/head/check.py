"""`check_head`: the contracts of heads of semantic segmentation and of detection, applied to one of them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from linvit.heads.detection.base import DetectionHead
from linvit.registry import Spec, heads
from linvit.testing import behaviour, compile
from linvit.testing.backbone import numerics
from linvit.testing.constructor import constructor
from linvit.testing.head import detection, segmentation
from linvit.testing.head.subject import DetectionSubject, HeadSubject
from linvit.testing.report import Report
from linvit.testing.runner import Check, Contract

CONTRACT: Contract[HeadSubject] = Contract(
    first=(Check("constructor", constructor),),
    clauses=(
        Check("shapes", segmentation.shapes),
        Check("any size", segmentation.any_size),
        Check("other pyramids", segmentation.other_pyramids),
        Check("auxiliary outputs", segmentation.auxiliary),
        Check("classifiers", segmentation.classifiers),
        Check("gradients", behaviour.gradients),
        Check("determinism", behaviour.determinism),
        Check("batch independence", behaviour.batch_independence),
        Check("copies", behaviour.copies),
        Check("float32 and float64", numerics.float32_and_float64),
        Check("autocast bfloat16", numerics.autocast(torch.bfloat16)),
        Check("autocast float16", numerics.autocast(torch.float16)),
        Check("devices", numerics.devices),
        Check("torch.compile", compile.compiles, quick=False),
        Check("torch.export", compile.exports, quick=False),
    ),
)

DETECTION: Contract[DetectionSubject] = Contract(
    first=(Check("constructor", constructor),),
    clauses=(
        Check("losses", detection.losses),
        Check("empty targets", detection.empty_targets),
        Check("detections", detection.detections),
        Check("any size", detection.any_size),
        Check("other pyramids", detection.other_pyramids),
        Check("classifiers", segmentation.classifiers),
        Check("gradients", behaviour.gradients),
        Check("determinism", behaviour.determinism),
        Check("copies", behaviour.copies),
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
