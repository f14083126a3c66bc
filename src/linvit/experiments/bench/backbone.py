"""What whole backbones cost over the size of the image, and their accuracy beside it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from linvit.backbones.create import create_backbone
from linvit.experiments.bench.attention import check_builds, spec_label
from linvit.experiments.bench.costs import Cost, format_size, measure_costs
from linvit.experiments.bench.report import CostReport
from linvit.experiments.bench.runner import Candidate, Settings
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.model_info import model_info
from linvit.registry import Spec, backbones


def backbone_costs(
    specs: Sequence[Spec],
    sizes: Sequence[tuple[int, int]],
    settings: Settings,
    *,
    attention: Spec | Sequence[Spec] | None = None,
    budget: float,
    report: Callable[[str], None],
    **measuring: Any,
) -> tuple[list[Cost], bool]:
    """Measures backbones with their classifier at every image size (H, W); see `measure_costs`.

    The backbones of one size take turns; sizes follow one another, so that not all weights are in memory at once.
    `attention` replaces that of all of them, as in a configuration.
    """
    builders = {backbone_label(spec): partial(_backbone, spec, attention, settings) for spec in specs}
    for builder in builders.values():
        check_builds(builder, sizes)
    costs: list[Cost] = []
    interrupted = False
    for size in sorted(sizes, key=lambda size: size[0] * size[1]):
        candidates = [
            Candidate(name, size, size[0] * size[1], builder, mode)
            for name, builder in builders.items()
            for mode in settings.modes
        ]

        def told(text: str, at: str = format_size(size)) -> None:
            report(f"{at}: {text}")

        found, interrupted = measure_costs(candidates, settings, budget=budget / len(sizes), report=told, **measuring)
        costs += found
        if interrupted:
            break
    return costs, interrupted


def published(report: CostReport) -> dict[str, float]:
    """Published ImageNet-1K top-1, in per cent, of those backbones that are as their authors published them."""
    known = model_info()
    return {name: top1 for name in report.names if name in known for top1 in [known[name].top1] if top1 is not None}


def accuracy_plot(report: CostReport, top1: Mapping[str, float]) -> str:
    """Draws published accuracies over the time of a forward pass per image, as SVG: Figure 7 of the FLatten paper.

    A backbone that was measured at several sizes stands at its published one, or the smallest.
    """
    series = []
    batch = int(report.conditions["batch"])
    for name, score in top1.items():
        side = model_info()[name].img_size
        timed = [cost for cost in report.costs if cost.name == name and "forward" in cost.seconds]
        for cost in sorted(timed, key=lambda cost: (cost.size != (side, side), cost.amount))[:1]:
            point = (cost.seconds["forward"].median / batch * 1e3, score)
            series.append(Series(name, (point,), labels=(name,)))
    what, time = "published ImageNet-1K top-1, %", "time of a forward pass per image, ms"
    return line_plot(f"{what} over time", series, Axis(time, log=True), Axis(what), report.footnote(), front=True)


def backbone_label(spec: Spec) -> str:
    """A spec as it stands in tables."""
    name, options = backbones.parse(spec)
    return f"timm {options['model']}" if name == "timm" and set(options) == {"model"} else spec_label(spec)


def _backbone(
    spec: Spec, attention: Spec | Sequence[Spec] | None, settings: Settings, size: tuple[int, int]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A backbone with images (B, 3, H, W)."""
    model = create_backbone(spec, attention, img_size=list(size))
    images = torch.randn(settings.batch, 3, *size).to(settings.device, settings.weights)
    return model, (images,), {}
