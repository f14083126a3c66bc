"""Modules for `linvit bench`: mechanisms, alone or in their layer, beside softmax attention; and whole backbones."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.analysis.operations import make_inputs
from linvit.attention.base import Attention, Grid
from linvit.attention.declarations import Facts
from linvit.backbones.create import create_backbone
from linvit.errors import UserError
from linvit.experiments.bench.costs import Cost
from linvit.experiments.bench.report import CostReport
from linvit.experiments.bench.runner import Built, Settings
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.layers.attention_layer import AttentionLayer
from linvit.registry import Spec, attentions, backbones
from linvit.registry.layouts import is_layout
from linvit.registry.model_info import model_info

BASELINES: Mapping[str, Spec] = {
    "torch's SDPA": "linvit.experiments.bench.builders:ScaledDotProduct",
    "naive softmax": "linvit.experiments.bench.builders:NaiveSoftmax",
}


class ScaledDotProduct(Attention):
    """Calls `torch.nn.functional.scaled_dot_product_attention`, O(N) memory where it has a fused kernel."""

    facts = Facts(complexity="O(N^2)")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return F.scaled_dot_product_attention(q, k, v)


class NaiveSoftmax(Attention):
    """Writes `softmax(q k^T / sqrt(dk)) v` out in the precision of its inputs, O(N^2) memory."""

    facts = Facts(complexity="O(N^2)")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        weights: Tensor = ((q * self.key_dim**-0.5) @ k.mT).softmax(-1)  # (B, h, N, M)
        return weights @ v


def mechanism(spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]) -> Built:
    """Builds a mechanism and normal q, k and v (B, h, N, d), like the outputs of a host's projections."""
    grid = Grid(size)
    mechanism: Attention = attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, key_dim=None)

    def make(*shape: int) -> Tensor:
        # (B, N, C) is the layer's input, in the precision of the weights
        dtype = settings.dtype if len(shape) == 3 else settings.weights
        return torch.randn(settings.batch, *shape).to(settings.device, dtype).requires_grad_()

    return mechanism, *make_inputs(mechanism, grid, make)


def layer(spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]) -> Built:
    """Returns the same in an `AttentionLayer`, with its projections, and the layer's input (B, N, C)."""
    grid = Grid(size)
    x = torch.randn(settings.batch, grid.num_queries, dim).to(settings.device, settings.weights)
    return AttentionLayer(dim, num_heads, grid, attention=spec), (x.requires_grad_(), grid), {}


def backbone(spec: Spec, attention: Spec | Sequence[Spec] | None, settings: Settings, size: tuple[int, int]) -> Built:
    """Returns a backbone with its classifier, whose attention may be replaced, and images (B, 3, H, W)."""
    images = torch.randn(settings.batch, 3, *size).to(settings.device, settings.weights)
    return create_backbone(spec, attention, img_size=list(size)), (images,), {}


def spec_label(spec: Spec) -> str:
    """Returns the label of a spec in tables: the name, and options in braces."""
    if isinstance(spec, str):
        return spec.rpartition(":")[2]
    options = ", ".join(f"{key}: {value}" for key, value in spec.items() if key not in ("name", "layout"))
    name = f"layout {spec['layout']}" if is_layout(spec) else spec_label(str(spec.get("name")))
    return f"{name} {{{options}}}" if options else name


def backbone_label(spec: Spec) -> str:
    """Returns the same of a backbone; a model of timm has its own name."""
    name, options = backbones.parse(spec)
    return f"timm {options['model']}" if name == "timm" and set(options) == {"model"} else spec_label(spec)


def kernel_ratios(costs: Sequence[Cost], specs: Sequence[Spec], settings: Settings) -> str:
    """Returns a phrase with torch's time over a kernel's by mechanism, at the least favourable size."""
    at = {(cost.name, cost.mode, cost.size): cost.seconds.get(settings.passes[-1]) for cost in costs}
    said = []
    for kernel in settings.kernels:
        ratios = dict[str, float]()
        for name in map(spec_label, specs):
            for size in {cost.size for cost in costs}:
                slow, quick = at.get((name, "eager", size)), at.get((name, kernel, size))
                if slow is not None and quick is not None:
                    ratios[name] = min(ratios.get(name, math.inf), slow.over(quick).median)
        each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
        said.append(f"torch / {kernel}, at the least favourable size: {each or 'nothing measured'}")
    return "; ".join(said)


def accuracy_plot(report: CostReport) -> dict[str, str]:
    """Plots published accuracies over the time of a forward pass at their or the smallest size (FLatten, Figure 7)."""
    series, info = [], model_info()
    for name in report.names:
        timed = [cost for cost in report.costs if cost.name == name and "forward" in cost.seconds]
        if name in info and (score := info[name].top1) is not None and timed:
            nominal = (info[name].img_size,) * 2
            cost = min(timed, key=lambda cost: (cost.size != nominal, cost.amount))
            point = (cost.seconds["forward"].median / int(report.conditions["batch"]) * 1e3, score)
            series.append(Series(name, (point,), labels=(name,)))
    if not series:
        return {}
    what, time = "published ImageNet-1K top-1, %", "time of a forward pass per image, ms"
    x, y = Axis(time, log=True), Axis(what)
    return {"accuracy.svg": line_plot(f"{what} over time", series, x, y, report.footnote(), front=True)}


def check_builds(build: Callable[[tuple[int, int]], Any], sizes: Sequence[tuple[int, int]]) -> None:
    """Raises the `UserError` of modules that cannot be built at any size, before minutes of measurement."""
    errors = []
    for size in sorted(sizes, key=math.prod):
        try:
            build(size)
            return
        except UserError as error:
            errors.append(error)
    raise errors[0]
