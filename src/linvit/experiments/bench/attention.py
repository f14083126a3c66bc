"""What attention mechanisms cost over the number of tokens, beside softmax attention."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.analysis.operations import make_inputs
from linvit.analysis.roofline import GPUS, Operators, least_seconds
from linvit.attention.base import Attention, Grid
from linvit.attention.kernels.choice import add_findings, kernel_name
from linvit.errors import UserError
from linvit.experiments.bench.costs import Cost, measure_costs
from linvit.experiments.bench.runner import Candidate, Mode, Runner, Settings
from linvit.layers.attention_layer import AttentionLayer
from linvit.registry import Spec, attentions

BASELINES: Mapping[str, Spec] = {
    "torch's SDPA": "linvit.experiments.bench.attention:ScaledDotProduct",
    "naive softmax": "linvit.experiments.bench.attention:NaiveSoftmax",
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


def attention_costs(
    specs: Sequence[Spec],
    grids: Sequence[tuple[int, int]],
    settings: Settings,
    *,
    dim: int = 96,
    num_heads: int = 3,
    layer: bool = False,
    **measuring: Any,
) -> tuple[list[Cost], bool]:
    """Measures mechanisms and the baselines at every grid (H, W); see `measure_costs`, also for `measuring`.

    Queries, keys and values are normal noise, one tensor each, as a host's projections would make them. The defaults
    are the channels and heads of Swin-T's first stage. With `layer`, `AttentionLayer`s are measured, with their
    projections. Returns the costs, baselines last and not without recomputing, and whether Ctrl-C ended the
    measurement.
    """
    named = {spec_label(spec): spec for spec in specs} | dict(BASELINES)
    build = _layer if layer else _mechanism
    builders = {name: partial(build, spec, dim, num_heads, settings) for name, spec in named.items()}
    for builder in builders.values():
        check_builds(builder, grids)
    candidates = [
        Candidate(name, grid, grid[0] * grid[1], builder, mode)
        for name, builder in builders.items()
        for grid in grids
        for mode in settings.modes
        if not (name in BASELINES and mode in ("no recompute", "triton"))
    ]
    return measure_costs(candidates, settings, **measuring)


def record_kernels(costs: Sequence[Cost], specs: Sequence[Spec], settings: Settings) -> str:
    """Has `attention_kernel: auto` choose on such a card by these costs, the least favourable size of each mechanism.

    Returns a line that says what was found. On a CPU, where an interpreter runs the kernels, nothing is recorded.
    """
    at = {(cost.name, cost.mode, cost.size): cost.seconds.get(settings.passes[-1]) for cost in costs}
    ratios: dict[str, float] = {}
    for spec in specs:
        name = kernel_name(attentions.get(spec if isinstance(spec, str) else spec["name"]))
        for (label, mode, size), quick in at.items():
            slow = at.get((label, "eager", size))
            if label == spec_label(spec) and mode == "triton" and slow is not None and quick is not None:
                ratios[name] = min(ratios.get(name, math.inf), slow.over(quick))
    said = ", ".join(f"{name.rpartition('.')[2]} {ratio:.2f}" for name, ratio in ratios.items()) or "nothing measured"
    if torch.device(settings.device).type != "cuda" or not ratios:
        return f"torch / triton: {said}; not recorded, which needs a GPU"
    path = add_findings(torch.cuda.get_device_name(settings.device), ratios)
    return f"torch / triton, at the least favourable size: {said}; recorded for attention_kernel=auto in {path}"


def roofline(
    specs: Sequence[Spec], grids: Sequence[tuple[int, int]], settings: Settings, *, layer: bool = False, **shape: Any
) -> list[list[str]]:
    """Counts the operators of mechanisms and of torch's SDPA on a CUDA device, and predicts their least times.

    A row each, below a head; forward + backward, the second time that they run. A GPU chooses other operators than a
    CPU, so there is no counting without one.
    """
    if torch.device(settings.device).type != "cuda":
        raise UserError("--roofline counts the operators that torch chooses for a GPU: add --device cuda")
    rows = [["", "tokens", "operators", "GB", "GFLOP", *(f"{name} ms" for name in GPUS)]]
    baseline, build = next(iter(BASELINES)), _layer if layer else _mechanism
    mode: Mode = "no recompute" if "no recompute" in settings.modes else "eager"
    for name, spec in ({spec_label(spec): spec for spec in specs} | {baseline: BASELINES[baseline]}).items():
        for grid in grids:
            runner = Runner(*build(spec, shape["dim"], shape["num_heads"], settings, grid), settings, mode)
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


def spec_label(spec: Spec) -> str:
    """A spec as it stands in tables: the name, and options in braces."""
    if isinstance(spec, str):
        return spec.rpartition(":")[2]
    options = ", ".join(f"{key}: {value}" for key, value in spec.items() if key != "name")
    name = spec_label(str(spec.get("name")))
    return f"{name} {{{options}}}" if options else name


def check_builds(build: Callable[[tuple[int, int]], Any], sizes: Sequence[tuple[int, int]]) -> None:
    """Raises the `UserError` of what can be built at no size, before minutes of measurement."""
    errors = []
    for size in sorted(sizes, key=lambda size: size[0] * size[1]):
        try:
            build(size)
            return
        except UserError as error:
            errors.append(error)
    raise errors[0]


def _mechanism(
    spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A mechanism with queries, keys and values (B, h, N, d)."""
    grid = Grid(size)
    mechanism: Attention = attentions.create(spec, dim=dim, num_heads=num_heads, grid=grid, key_dim=None)

    def make(*shape: int) -> Tensor:
        # (B, N, C) is the layer's input, in the precision of the weights
        dtype = settings.dtype if len(shape) == 3 else settings.weights
        return torch.randn(settings.batch, *shape).to(settings.device, dtype).requires_grad_()

    return mechanism, *make_inputs(mechanism, grid, make)


def _layer(
    spec: Spec, dim: int, num_heads: int, settings: Settings, size: tuple[int, int]
) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """An attention layer with tokens (B, N, C)."""
    grid = Grid(size)
    x = torch.randn(settings.batch, grid.num_queries, dim).to(settings.device, settings.weights)
    return AttentionLayer(dim, num_heads, grid, attention=spec), (x.requires_grad_(), grid), {}
