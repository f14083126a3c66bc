"""Plots of an experiment: scores over costs, and curves over the steps."""

import math
import statistics
from collections.abc import Callable, Sequence

from linvit.experiments.compare.costs import Costs
from linvit.experiments.compare.results import Results, Variant, is_rank
from linvit.experiments.plots import Axis, Series, line_plot, scatter_plot

MOST_POINTS = 60  # of a curve; more are averaged


def costs_plots(results: Results, where: str) -> dict[str, str]:
    """Score over latency and over MACs, with the Pareto front."""
    measured = [(variant, variant.costs) for variant in results.variants if isinstance(variant.costs, Costs)]
    axes: dict[str, tuple[str, Callable[[Costs], float]]] = {
        "score_over_latency": ("latency (ms)", lambda costs: costs.latency.median * 1e3),
        "score_over_MACs": ("multiply-accumulates of one image (millions)", lambda costs: costs.macs / 1e6),
    }
    plots = {}
    for name, (label, cost) in axes.items():
        series = []
        for variant, costs in measured:
            mean, spread, _ = results.summary(variant)
            if not math.isnan(mean):
                bars = () if math.isnan(spread) else ((mean - spread, mean + spread),)
                series.append(Series(variant.name, ((cost(costs), mean),), bars, (variant.name,)))
        if series:
            title = f"{results.title}: {name.replace('_', ' ')}"
            note = f"grey: the Pareto front; bars: one standard deviation over seeds\n{where}"
            plots[name] = scatter_plot(
                title, series, Axis(label, log=_wide(series)), Axis(results.tag), note, front=True
            )
    return plots


def _wide(series: Sequence[Series]) -> bool:
    """Whether costs differ so much that a logarithmic axis shows them better."""
    values = [x for one in series for x, _ in one.points]
    return max(values) > 10 * min(values)


def curve_plots(results: Results, where: str) -> dict[str, str]:
    """Score, loss and rank over the steps, mean over seeds."""
    plots = {}
    for name, tag in (("score", None), ("loss", "train/loss"), ("rank", "rank")):
        series = [
            Series(variant.name, points)
            for variant in results.variants
            if (points := mean_curve(variant, results, tag))
        ]
        if series:
            label = {"score": results.tag, "loss": "train/loss", "rank": "rank of the attention, mean over layers"}[
                name
            ]
            plots[f"{name}_curves"] = line_plot(
                f"{results.title}: {name}", series, Axis("step"), Axis(label), f"mean over seeds\n{where}"
            )
    return plots


def mean_curve(variant: Variant, results: Results, tag: str | None) -> tuple[tuple[float, float], ...]:
    """A curve of a variant, mean over its seeds, of at most `MOST_POINTS`.

    Args:
        variant: The variant.
        results: Those of the experiment, which say what the score is.
        tag: Of the curve; None for the score, "rank" for the ranks of all layers.
    """
    values: dict[int, list[float]] = {}
    for run in variant.runs.values():
        wanted = tag or run.score_tag(results.score)
        for name, curve in run.curves.items():
            if name == wanted or (tag == "rank" and is_rank(name)):
                for step, value in curve:
                    values.setdefault(step, []).append(value)
    means = [(float(step), statistics.fmean(found)) for step, found in sorted(values.items())]
    window = math.ceil(len(means) / MOST_POINTS)
    parts = [means[start : start + window] for start in range(0, len(means), window)] if means else []
    return tuple((part[-1][0], statistics.fmean(value for _, value in part)) for part in parts)
