"""The costs of modules as tables, files and plots."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linvit.callbacks.report import write_table
from linvit.experiments.bench.costs import PASSES, Cost, crossover, format_size, growth_exponent
from linvit.experiments.measure import Timing
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.io.files import write_text
from linvit.io.plain_text import markdown_table, markdown_text

CROSSOVER = (
    "From which {0} on a module costs at most what {1} does, up to the largest that was measured ({2}). Between two "
    "measured sizes the ratio of the two costs is taken for a straight line on log axes. Where memory does not suffice "
    "for one of the two, the other one costs less."
)
EXPONENT = (
    "The exponent b of cost = a x size^b, by least squares on log axes over the upper half of the sizes ({}) at which "
    "a module was measured. 1 is linear growth, 2 quadratic."
)
OPERATIONS = (
    "MACs are multiply-accumulates of matrix products and convolutions. FLOPs count two for each of them, and one for "
    "each element that any other operator reads or makes. Many papers write FLOPs and mean MACs."
)
TIMES = (
    "Medians; costs.csv has quartiles. The modules take turns, so that other work of the machine slows all of them. "
    "Memory is that of the call, beyond inputs and weights; kept for backward are all tensors but weights."
)


class Metric(NamedTuple):
    """One of the costs that are compared; `key` names it in files, `short` heads a narrow column."""

    key: str
    title: str
    short: str
    unit: str
    attribute: str  # of a cost
    of: str = ""  # the pass

    def value(self, cost: Cost) -> float | None:
        """Returns the cost in its unit; None if it was not measured."""
        found = getattr(cost, self.attribute)
        found = found.get(self.of) if self.of else found
        return found.median * 1e3 if isinstance(found, Timing) else None if found is None else found / 2**20


METRICS = (
    *(
        Metric(f"{key}_{kind}", f"{what} of a {title}", f"{short} {kind}", unit, attribute, key)
        for kind, what, unit, attribute in (("time", "time", "ms", "seconds"), ("peak", "peak memory", "MiB", "peak"))
        for key, (title, short) in PASSES.items()
    ),
    Metric("kept", "memory kept for backward", "kept", "MiB", "kept"),
)


Section = tuple[str, str, list[list[str]], str]
"""A table: its title, the text above it, its rows, and the file of its plot, "" if it has none."""


class CostReport:
    """Costs over an axis, such as "tokens N", and the conditions under which they were measured.

    Other modules are compared with the `baselines`. Times that are not `fitted`, of a busy machine,
    have no exponents.
    """

    def __init__(
        self,
        title: str,
        axis: str,
        costs: Sequence[Cost],
        conditions: Mapping[str, str],
        baselines: Sequence[str],
        fitted: bool = True,
    ) -> None:
        self.title, self.axis, self.costs, self.conditions, self.baselines = title, axis, costs, conditions, baselines
        self.fitted = fitted
        self.names = list(dict.fromkeys(cost.label for cost in costs))  # the modules in each of their modes
        self.metrics = [each for each in METRICS if any(each.value(cost) is not None for cost in costs)]
        self.sizes = list(dict.fromkeys(cost.size for cost in costs))  # the smallest first
        known = {cost.label: cost.softmax_blocks for cost in costs if cost.softmax_blocks is not None}
        cells = {"": "softmax blocks"} | {name: str(known.get(name, "-")) for name in self.names}
        self._blocks = {name: [cell] * bool(known) for name, cell in cells.items()}  # by row; of mechanisms no column

    def curve(self, name: str, metric: Metric) -> dict[float, float]:
        """Returns a cost by tokens or pixels; infinity where memory did not suffice."""
        found = {}
        for cost in self.costs:
            value = metric.value(cost)
            if cost.label == name and value is not None:
                found[float(cost.amount)] = value
            elif cost.label == name and "out of memory" in cost.note:
                found[float(cost.amount)] = float("inf")
        return found

    def crossover(self, name: str, baseline: str, metric: Metric) -> str:
        """Returns the size from which a module costs at most as much as a baseline, in the same mode if measured."""
        mode = next(cost.mode for cost in self.costs if cost.label == name)
        same = {cost.mode: cost.label for cost in self.costs if cost.name == baseline}.get(mode, baseline)
        return str(crossover(self.curve(name, metric), self.curve(same, metric)) or "-")

    def sections(self) -> Iterator[Section]:
        """Returns all tables."""
        for metric in self.metrics:
            at = {(cost.label, cost.size): _entry(cost, metric) for cost in self.costs}
            rows = [
                [name, *self._blocks[name], *(at.get((name, size), "-") for size in self.sizes)] for name in self.names
            ]
            yield f"{metric.title}, {metric.unit}, over {self.axis}", "", [self._head(), *rows], f"{metric.key}.svg"
        if len(self.sizes) > 1 and self.metrics:
            amounts, titles = [cost.amount for cost in self.costs], ["", *(metric.short for metric in self.metrics)]
            compared = dict.fromkeys(cost.label for cost in self.costs if cost.name not in self.baselines)
            for baseline in self.baselines if compared else ():
                rows = [[name, *(self.crossover(name, baseline, each) for each in self.metrics)] for name in compared]
                note = CROSSOVER.format(self.axis, baseline, f"{min(amounts):,} to {max(amounts):,}")
                yield f"crossover with {baseline}", note, [titles, *rows], ""
            fits = {name: [self._exponent(name, metric) for metric in self.metrics] for name in self.names}
            rows = [[name, *("-" if fit is None else f"{fit:.2f}" for fit in own)] for name, own in fits.items()]
            yield "growth exponents", EXPONENT.format(self.axis), [titles, *rows], ""

    def _exponent(self, name: str, metric: Metric) -> float | None:
        known = self.fitted or metric.attribute != "seconds"
        return growth_exponent(self.curve(name, metric)) if known else None

    def notes(self) -> list[str]:
        """Reasons for missing measurements."""
        return [f"{cost.label}, {format_size(cost.size)}: {cost.note}" for cost in self.costs if cost.note]

    def footnote(self) -> str:
        """Settings and machine of the measurement, in two lines."""
        return "{settings}\n{machine}; {date}".format(**self.conditions)

    def _head(self) -> list[str]:
        """Returns the first row of a table over the sizes: numbers of tokens where these differ, else sizes."""
        amounts = [height * width for height, width in self.sizes]
        plain = self.axis == "tokens N" and len(set(amounts)) == len(amounts)
        sizes = [f"{amount:,}" for amount in amounts] if plain else map(format_size, self.sizes)
        return ["", *self._blocks[""], *sizes]

    def markdown(self) -> str:
        """Returns all tables, with the plots beside them."""
        parts = [f"# {self.title}", "\n".join(f"- {key}: {value}" for key, value in self.conditions.items()), TIMES]
        counted = [["", *self._blocks[""], "size", "parameters", "MACs", "FLOPs"]]
        for cost in (cost for cost in self.costs if cost.mode == "eager"):
            numbers = (cost.parameters, cost.macs, cost.flops)
            cells = [format_size(cost.size), *("-" if n is None else f"{n:,}" for n in numbers)]
            counted.append([cost.name, *self._blocks[cost.label], *cells])
        operations = "operations of a forward pass on one image", OPERATIONS, counted, ""
        for title, note, rows, plot in (*self.sections(), operations):
            picture = f"![{title}]({plot})" if plot else ""
            parts += filter(None, [f"## {title[0].upper()}{title[1:]}", picture, note, markdown_table(rows)])
        if self.notes():
            parts += ["## Not measured", "\n".join(f"- {markdown_text(note)}" for note in self.notes())]
        return "\n\n".join(parts) + "\n"

    def plots(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of an SVG file for each cost."""
        ticks, baseline = tuple(sorted({float(cost.amount) for cost in self.costs})), self.baselines[0]
        note = f"{self.footnote()}\nin brackets: {self.axis} from which on it costs at most what {baseline} does"
        for metric in self.metrics:
            series = []
            for name in self.names:
                met = "-" if name == baseline else self.crossover(name, baseline, metric)
                points = tuple(self.curve(name, metric).items())
                series.append(Series(name if met == "-" else f"{name} ({met})", points))
            axes = Axis(self.axis, True, ticks), Axis(f"{metric.title}, {metric.unit}", True)
            yield f"{metric.key}.svg", line_plot(f"{self.title}: {metric.title}", series, *axes, note)

    def write(self, folder: Path, plots: Mapping[str, str]) -> None:
        """Writes `costs.csv`, `costs.md`, a plot of each cost over the size, and `plots`; the folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        also = {"date": self.conditions["date"], "machine": self.conditions["machine"]}
        rows = [_row(cost, int(self.conditions["batch"])) | also for cost in self.costs]
        write_table(folder / "costs.csv", [[*rows[0]], *([*row.values()] for row in rows)])
        for name, text in (("costs.md", self.markdown()), *self.plots(), *plots.items()):
            write_text(folder / name, text)


def _row(cost: Cost, batch: int) -> dict[str, Any]:
    """Returns the columns of the CSV file; seconds and bytes."""
    row: dict[str, Any] = {"name": cost.name, "mode": cost.mode, "height": cost.size[0], "width": cost.size[1]}
    row |= {"amount": cost.amount, "batch": batch}
    row |= {"softmax_blocks": cost.softmax_blocks}
    row |= {"parameters": cost.parameters, "macs": cost.macs, "flops": cost.flops}
    for key in PASSES:
        timing = cost.seconds.get(key)
        columns = ("seconds", "seconds_low", "seconds_high", "samples", "images_per_second")
        row |= {f"{key}_{column}": None for column in columns}
        if timing is not None:
            median, samples = timing.median, len(timing.samples)
            values = (median, *timing.quartiles, samples, batch / median)
            row |= {f"{key}_{column}": value for column, value in zip(columns, values, strict=True)}
        row |= {f"{key}_peak_bytes": cost.peak.get(key)}
    return row | {"kept_for_backward_bytes": cost.kept, "note": cost.note}


def _entry(cost: Cost, metric: Metric) -> str:
    """Formats three digits, without an exponent."""
    value = metric.value(cost)
    if value is None:
        return "memory" if "out of memory" in cost.note else "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
