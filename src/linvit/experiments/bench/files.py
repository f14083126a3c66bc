"""The costs of modules as files: CSV, JSON, Markdown, and plots."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linvit.experiments.bench.costs import PASSES, Cost
from linvit.experiments.bench.report import CostReport
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.plain_text import CsvWriter


def write_report(report: CostReport, folder: Path) -> None:
    """Writes `costs.csv`, `costs.json`, `costs.md` and a plot of each cost over the size; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(cost, report.conditions["batch"]) for cost in report.costs]
    with (folder / "costs.csv").open("w", newline="", encoding="utf-8") as file:
        writer = CsvWriter(file)
        writer.writerow([*rows[0], "date", "machine"])
        also = [report.conditions["date"], report.conditions["machine"]]
        writer.writerows([*("" if value is None else value for value in row.values()), *also] for row in rows)
    (folder / "costs.json").write_text(json.dumps(_json(report, rows), indent=1) + "\n", encoding="utf-8")
    (folder / "costs.md").write_text(report.markdown(), encoding="utf-8")
    for name, text in plots(report):
        (folder / name).write_text(text, encoding="utf-8")


def plots(report: CostReport) -> Iterator[tuple[str, str]]:
    """The name and the text of an SVG file for each cost."""
    ticks = tuple(sorted({float(cost.amount) for cost in report.costs}))
    baseline, note = next(iter(report.baselines), None), report.footnote()
    if baseline is not None:
        note += f"\nin brackets: {report.axis} from which on it costs at most what {baseline} does"
    for metric in report.metrics():
        series = []
        for name in report.names:
            measured = [cost for cost in report.costs if cost.label == name and metric.value(cost) is not None]
            measured.sort(key=lambda cost: cost.amount)
            points = tuple((float(cost.amount), metric.value(cost) or 0.0) for cost in measured)
            spread = tuple(bounds for cost in measured for bounds in [metric.spread(cost)] if bounds is not None)
            met = None if baseline in (None, name) else report.crossover(name, str(baseline), metric)
            series.append(Series(name if met is None else f"{name} ({met.brief})", points, spread))
        title = f"{report.title}: {metric.title}"
        axes = Axis(report.axis, True, ticks), Axis(f"{metric.title}, {metric.unit}", True)
        yield f"{metric.key}.svg", line_plot(title, series, *axes, note)


def _row(cost: Cost, batch: str) -> dict[str, Any]:
    """The columns of the CSV file; seconds and bytes."""
    row: dict[str, Any] = {"name": cost.name, "mode": cost.mode, "height": cost.size[0], "width": cost.size[1]}
    row |= {"amount": cost.amount, "batch": int(batch)}
    row |= {"parameters": cost.parameters, "macs": cost.macs, "flops": cost.flops}
    for key in PASSES:
        timing = cost.seconds.get(key)
        low, high = (None, None) if timing is None else timing.quartiles
        row |= {f"{key}_seconds": None if timing is None else timing.median}
        row |= {f"{key}_seconds_low": low, f"{key}_seconds_high": high}
        row |= {f"{key}_samples": None if timing is None else len(timing.samples)}
        row |= {f"{key}_images_per_second": None if timing is None else int(batch) / timing.median}
        row |= {f"{key}_peak_bytes": cost.peak.get(key)}
    return row | {"kept_for_backward_bytes": cost.kept, "note": cost.note}


def _json(report: CostReport, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All that is known, each sample included."""
    samples = [{key: timing.samples for key, timing in cost.seconds.items()} for cost in report.costs]
    exponents: dict[str, Any] = {}
    for name in report.names:
        fits = {metric.key: report.exponent(name, metric) for metric in report.metrics()}
        exponents[name] = {key: fit._asdict() for key, fit in fits.items() if fit is not None}
    crossovers: dict[str, Any] = {}
    for baseline in report.baselines:
        for name in report.compared:
            met = {metric.key: report.crossover(name, baseline, metric) for metric in report.metrics()}
            found = {key: crossover._asdict() for key, crossover in met.items() if crossover is not None}
            crossovers.setdefault(baseline, {})[name] = found
    return {
        "title": report.title,
        "axis": report.axis,
        "conditions": dict(report.conditions),
        "costs": [row | {"samples": own} for row, own in zip(rows, samples, strict=True)],
        "crossovers": crossovers,
        "exponents": exponents,
    }
