"""`check_head`: the contracts of heads of semantic segmentation and of detection, applied to one of them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from linvit.heads.detection.base import DetectionHead
from linvit.registry import Spec, heads
from linvit.testing.backbone import behaviour, compile, numerics
from linvit.testing.backbone.images import Subject
from linvit.testing.head import clauses, detection
from linvit.testing.head.network import HeadSubject
from linvit.testing.report import Finding, Report
from linvit.testing.runner import Check, Contract


def _of_network(name: str, run: Callable[[Subject], Finding], quick: bool = True) -> Check[HeadSubject]:
    """A clause of backbones that holds of the network of the head, too."""
    return Check(name, cast("Callable[[HeadSubject], Finding]", run), quick)


CONTRACT: Contract[HeadSubject] = Contract(
    first=(Check("constructor", clauses.constructor),),
    clauses=(
        Check("shapes", clauses.shapes),
        Check("any size", clauses.any_size),
        Check("other pyramids", clauses.other_pyramids),
        Check("auxiliary outputs", clauses.auxiliary),
        Check("classifiers", clauses.classifiers),
        Check("gradients", clauses.gradients),
        _of_network("determinism", behaviour.determinism),
        _of_network("batch independence", behaviour.batch_independence),
        _of_network("copies", behaviour.copies),
        _of_network("float32 and float64", numerics.float32_and_float64),
        _of_network("autocast bfloat16", numerics.autocast(torch.bfloat16)),
        _of_network("autocast float16", numerics.autocast(torch.float16)),
        _of_network("devices", numerics.devices),
        _of_network("torch.compile", compile.compiles, quick=False),
        _of_network("torch.export", functools.partial(compile.exports, any_size=False), quick=False),
    ),
)

DETECTION: Contract[HeadSubject] = Contract(
    first=(Check("constructor", detection.constructor),),
    clauses=(
        Check("losses", detection.losses),
        Check("empty targets", detection.empty_targets),
        Check("detections", detection.detections),
        Check("any size", detection.any_size),
        Check("other pyramids", detection.other_pyramids),
        Check("classifiers", clauses.classifiers),
        Check("gradients", detection.gradients),
        Check("determinism", detection.determinism),
        Check("copies", detection.copies),
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
    contract = DETECTION if getattr(made, "task", None) == DetectionHead.task else CONTRACT
    return contract.report(HeadSubject(spec_or_callable, img_size, quick), quick)
