"""What `linvit bench` measures: mechanisms, alone or in their layer, beside softmax attention; and whole backbones."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.analysis.operations import make_inputs
from linvit.analysis.roofline import GPUS, Operators, least_seconds
from linvit.attention.base import Attention, Grid
from linvit.attention.kernels.choice import WIDEST_MEASURED, add_findings, mechanism_name, set_attention_kernel
from linvit.backbones.create import create_backbone
from linvit.errors import UserError
from linvit.experiments.bench.costs import Cost
from linvit.experiments.bench.report import CostReport
from linvit.experiments.bench.runner import Build, Built, Mode, Runner, Settings
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.layers.attention_layer import AttentionLayer
from linvit.model_info import model_info
from linvit.registry import Spec, attentions, backbones

BASELINES: Mapping[str, Spec] = {
    "torch's SDPA": "linvit.experiments.bench.builders:ScaledDotProduct",
    "naive softmax": "linvit.experiments.bench.builders:NaiveSoftmax",
}


class ScaledDotProduct(Attention):
    """Calls `torch.nn.functional.scaled_dot_product_attention`, O(N) memory where it has a fused kernel."""

    complexity = "O(N^2)"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        return F.scaled_dot_product_attention(q, k, v)


class NaiveSoftmax(Attention):
    """Writes `softmax(q k^T / sqrt(dk)) v` out in the precision of its inputs, O(N^2) memory."""

    complexity = "O(N^2)"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> Tensor:
        """(B, h, N, dk), (B, h, M, dk), (B, h, M, d) -> (B, h, N, d)."""
        weights: Tensor = ((q * self.key_dim**-0.5) @ k.mT).softmax(-1)  # (B, h, N, M)
        return weights @ v


def mechanism(spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]) -> Built:
    """A mechanism with queries, keys and values (B, h, N, d): normal noise, as a host's projections would make them."""
    grid = Grid(size)
    mechanism: Attention = attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, key_dim=None)

    def make(*shape: int) -> Tensor:
        # (B, N, C) is the layer's input, in the precision of the weights
        dtype = settings.dtype if len(shape) == 3 else settings.weights
        return torch.randn(settings.batch, *shape).to(settings.device, dtype).requires_grad_()

    return mechanism, *make_inputs(mechanism, grid, make)


def layer(spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]) -> Built:
    """The same in an `AttentionLayer`, with its projections, and the layer's input (B, N, C)."""
    grid = Grid(size)
    x = torch.randn(settings.batch, grid.num_queries, dim).to(settings.device, settings.weights)
    return AttentionLayer(dim, num_heads, grid, attention=spec), (x.requires_grad_(), grid), {}


def backbone(spec: Spec, attention: Spec | Sequence[Spec] | None, settings: Settings, size: tuple[int, int]) -> Built:
    """A backbone with its classifier, whose attention may be replaced, and images (B, 3, H, W)."""
    images = torch.randn(settings.batch, 3, *size).to(settings.device, settings.weights)
    return create_backbone(spec, attention, img_size=list(size)), (images,), {}


def spec_label(spec: Spec) -> str:
    """A spec as it stands in tables: the name, and options in braces."""
    if isinstance(spec, str):
        return spec.rpartition(":")[2]
    options = ", ".join(f"{key}: {value}" for key, value in spec.items() if key != "name")
    name = spec_label(str(spec.get("name")))
    return f"{name} {{{options}}}" if options else name


def backbone_label(spec: Spec) -> str:
    """The same of a backbone; a model of timm has its own name."""
    name, options = backbones.parse(spec)
    return f"timm {options['model']}" if name == "timm" and set(options) == {"model"} else spec_label(spec)


def record_kernels(costs: Sequence[Cost], specs: Sequence[Spec], settings: Settings, width: int) -> str:
    """Has `attention_kernel: auto` choose on such a GPU by these costs of heads of a width, at the worst size.

    Returns what was found.
    """
    at = {(cost.name, cost.mode, cost.size): cost.seconds.get(settings.passes[-1]) for cost in costs}
    found: dict[str, dict[str, float]] = {kernel: {} for kernel in settings.kernels}
    for spec in specs:
        name = mechanism_name(attentions.get(spec if isinstance(spec, str) else spec["name"]))
        for (label, mode, size), quick in at.items():
            slow = at.get((label, "eager", size))
            if label == spec_label(spec) and mode in found and slow is not None and quick is not None:
                found[mode][name] = min(found[mode].get(name, math.inf), slow.over(quick))
    chosen = settings.dtype == torch.bfloat16 and width <= WIDEST_MEASURED  # where "auto" goes by it
    recorded = torch.device(settings.device).type == "cuda" and chosen
    said = []
    for kernel, ratios in found.items():
        each = ", ".join(f"{name.rpartition('.')[2]} {ratio:.2f}" for name, ratio in ratios.items())
        said.append(f"torch / {kernel}, at the least favourable size: {each or 'nothing measured'}")
        if ratios and recorded:
            path = add_findings(torch.cuda.get_device_name(settings.device), kernel, ratios)
            said.append(f"recorded for attention_kernel=auto in {path}")
    if not recorded:
        said.append(
            f"not recorded, which needs a GPU, --dtype bfloat16, and heads of at most {WIDEST_MEASURED} channels"
        )
    return "; ".join(said)


def roofline(builders: Mapping[str, Build], grids: Sequence[tuple[int, int]], settings: Settings) -> list[list[str]]:
    """Counts the operators of mechanisms and of torch's SDPA, forward + backward, and predicts their least times.

    A GPU chooses other operators than a CPU, so there is no counting without one.
    """
    if torch.device(settings.device).type != "cuda":
        raise UserError("--roofline counts the operators that torch chooses for a GPU: add --device cuda")
    rows = [["", "tokens", "operators", "GB", "GFLOP", *(f"{name} ms" for name in GPUS)]]
    mode: Mode = "no recompute" if "no recompute" in settings.modes else "eager"
    for name, build in builders.items():
        for grid in grids if name != "naive softmax" else ():
            runner = Runner(*build(grid), settings, mode)
            set_attention_kernel(runner.trained, "torch")  # whose operators can be counted
            runner.forward_backward()
            with Operators() as there:
                out = runner.training_forward()
            with Operators() as back:
                out.backward(runner.gradient)
            both = there.called, back.called
            figures = [[sum(one.bytes for one in own) / 1e9 for own in both]]
            figures.append([sum(one.flops for one in own) / 1e9 for own in both])
            figures += [[1e3 * least_seconds(own, gpu) for own in both] for gpu in GPUS.values()]
            counts = " + ".join(str(len(own)) for own in both)
            rows.append([name, f"{grid[0] * grid[1]:,}", counts, *(f"{a:.3g} + {b:.3g}" for a, b in figures)])
    return rows


def accuracy_plot(report: CostReport) -> dict[str, str]:
    """Published accuracies over the time of a forward pass at their size, or the smallest: Figure 7 of FLatten."""
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
    """Raises the `UserError` of what can be built at no size, before minutes of measurement."""
    errors = []
    for size in sorted(sizes, key=math.prod):
        try:
            build(size)
            return
        except UserError as error:
            errors.append(error)
    raise errors[0]
