"""The costs of modules as tables, files and plots."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from linvit.experiments.bench.costs import Cost, shown
from linvit.experiments.bench.growth import Crossover, Exponent, crossover, growth_exponent
from linvit.experiments.bench.metrics import METRICS, Metric
from linvit.experiments.bench.runner import Mode
from linvit.plain_text import markdown_table

CROSSOVER = (
    "Crossover: from which {0} on a module costs at most what {1} does, up to the largest that was measured "
    "({2}). Between two measured sizes the ratio of the two costs is taken for a straight line on log axes. Where "
    "memory does not suffice for one of the two, the other one costs less."
)
EXPONENT = (
    "The exponent b of cost = a x size^b, by least squares on log axes over the upper half of the measured range "
    "({}: {}). 1 is linear growth, 2 quadratic."
)
OPERATIONS = (
    "MACs are multiply-accumulates of matrix products and convolutions. FLOPs count two for each of them, and one for "
    "each element that any other operator reads or makes. Many papers write FLOPs and mean MACs."
)
TIMES = (
    "Medians, quartiles in parentheses. The modules take turns, so that whatever else the machine does meets them all. "
    "Memory is that of the call, beyond inputs and weights; kept for backward are all tensors but weights."
)


class CostReport(NamedTuple):
    """Costs, and under which conditions they were measured.

    Attributes:
        title: Of the whole.
        axis: What costs are compared over: "tokens N".
        costs: The costs.
        conditions: Machine, versions, date, settings, in the order in which they are printed.
        baselines: Names of the modules that the others are compared with.
    """

    title: str
    axis: str
    costs: Sequence[Cost]
    conditions: Mapping[str, str]
    baselines: Sequence[str] = ()

    @property
    def names(self) -> list[str]:
        """The modules in each of their modes, once."""
        return list(dict.fromkeys(cost.label for cost in self.costs))

    def metrics(self) -> list[Metric]:
        """Those that were measured at all."""
        return [metric for metric in METRICS if any(metric.value(cost) is not None for cost in self.costs)]

    def curve(self, name: str, metric: Metric) -> dict[float, float]:
        """A cost by tokens or pixels; infinity where memory did not suffice."""
        found = {}
        for cost in self.costs:
            value = metric.value(cost)
            if cost.label == name and value is not None:
                found[float(cost.amount)] = value
            elif cost.label == name and "out of memory" in cost.note:
                found[float(cost.amount)] = float("inf")
        return found

    def exponent(self, name: str, metric: Metric) -> Exponent | None:
        """How a cost grows."""
        return growth_exponent({n: value for n, value in self.curve(name, metric).items() if value < float("inf")})

    @property
    def compared(self) -> list[str]:
        """The modules, in each of their modes, that are no baselines."""
        return list(dict.fromkeys(cost.label for cost in self.costs if cost.name not in self.baselines))

    def crossover(self, name: str, baseline: str, metric: Metric) -> Crossover | None:
        """From which size a module costs at most what a baseline does, in the same mode if it was measured in that."""
        mode = next(cost.mode for cost in self.costs if cost.label == name)
        same = {cost.mode: cost.label for cost in self.costs if cost.name == baseline}.get(mode, baseline)
        return crossover(self.curve(name, metric), self.curve(same, metric))

    def table(self, metric: Metric, *, spread: bool) -> list[list[str]]:
        """A metric: a row per module, a column per size."""
        at = {(cost.label, cost.size): cost for cost in self.costs}
        rows = [[name, *(_cell(at.get((name, size)), metric, spread) for size in self.sizes)] for name in self.names]
        return [self._head(), *rows]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Those that were measured, the smallest first."""
        return [size for _, size in sorted({(cost.amount, cost.size) for cost in self.costs})]

    @property
    def grows(self) -> bool:
        """Whether it can be said how costs grow: something was measured, at two sizes or more."""
        return len(self.sizes) > 1 and bool(self.metrics())

    def _head(self) -> list[str]:
        """The first row of a table over the sizes: numbers of tokens where these differ, else sizes."""
        amounts = [height * width for height, width in self.sizes]
        plain = self.axis == "tokens N" and len(set(amounts)) == len(amounts)
        return ["", *([f"{amount:,}" for amount in amounts] if plain else map(shown, self.sizes))]

    def modes(self) -> list[Mode]:
        """Those that are compared with eager."""
        return list(dict.fromkeys(cost.mode for cost in self.costs if cost.mode != "eager" and cost.peak))

    def ratios(self, mode: Mode) -> list[list[str]]:
        """What modules cost in a mode over what they cost eager: a row per module and metric, a column per size.

        Those of times are medians over the rounds.
        """
        at = {(cost.name, cost.mode, cost.size): cost for cost in self.costs}
        rows = [self._head()]
        for name in dict.fromkeys(cost.name for cost in self.costs if cost.mode == mode):
            for metric in self.metrics():
                found = [metric.ratio(at[name, mode, size], at[name, "eager", size]) for size in self.sizes]
                if any(found):
                    rows.append([f"{name}, {metric.short}", *("-" if one is None else f"{one:.2f}" for one in found)])
        return rows

    def operations(self) -> list[list[str]]:
        """Parameters, MACs and FLOPs at each size."""
        rows = [["", "size", "parameters", "MACs", "FLOPs"]]
        for cost in (cost for cost in self.costs if cost.mode == "eager"):
            numbers = (cost.parameters, cost.macs, cost.flops)
            rows.append([cost.name, shown(cost.size), *("-" if n is None else f"{n:,}" for n in numbers)])
        return rows

    def crossovers(self, baseline: str, *, brief: bool) -> list[list[str]]:
        """From which size each module costs at most what a baseline does, a column per metric."""
        rows = [["", *(metric.short for metric in self.metrics())]]
        for name in self.compared:
            found = [self.crossover(name, baseline, metric) for metric in self.metrics()]
            rows.append([name, *("-" if one is None else one.brief if brief else str(one) for one in found)])
        return rows

    def exponents(self) -> list[list[str]]:
        """The exponent of each cost, a column per metric."""
        rows = [["", *(metric.short for metric in self.metrics())]]
        for name in self.names:
            found = [self.exponent(name, metric) for metric in self.metrics()]
            rows.append([name, *("-" if one is None else f"{one.value:.2f}" for one in found)])
        return rows

    def crossover_note(self, baseline: str) -> str:
        """What the table of crossovers says, and how it was made."""
        amounts = [cost.amount for cost in self.costs]
        return CROSSOVER.format(self.axis, baseline, f"{min(amounts):,} to {max(amounts):,}")

    def ratio_title(self, mode: Mode) -> str:
        """The head of the table of ratios."""
        return f"{mode.capitalize()} / eager, over {self.axis}"

    def exponent_note(self) -> str:
        """What the table of exponents says, and what they are fitted to."""
        fits = (self.exponent(name, metric) for name in self.names for metric in self.metrics())
        ranges = sorted({(fit.first, fit.last) for fit in fits if fit is not None})
        fitted = "; ".join(f"{first:,.0f} to {last:,.0f}" for first, last in ranges) or "too few sizes"
        return EXPONENT.format(self.axis, fitted)

    def notes(self) -> list[str]:
        """What was not measured, and why."""
        return [f"{cost.label}, {shown(cost.size)}: {cost.note}" for cost in self.costs if cost.note]

    def footnote(self) -> str:
        """How and on what was measured, in two lines."""
        return "{settings}\n{machine}; {date}".format(**self.conditions)

    def markdown(self) -> str:
        """All tables, with the plots beside them."""
        parts = [f"# {self.title}", "\n".join(f"- {key}: {value}" for key, value in self.conditions.items())]
        parts.append(TIMES)
        for metric in self.metrics():
            heading = f"{metric.title[0].upper()}{metric.title[1:]}, {metric.unit}"
            parts += [f"## {heading}", f"![{metric.title}]({metric.key}.svg)"]
            parts.append(markdown_table(self.table(metric, spread=True)))
        for mode in self.modes():
            parts += [f"## {self.ratio_title(mode)}", markdown_table(self.ratios(mode))]
        for baseline in self.baselines if self.grows else ():
            parts += [f"## Crossover with {baseline}", self.crossover_note(baseline)]
            parts.append(markdown_table(self.crossovers(baseline, brief=False)))
        if self.grows:
            parts += ["## Growth exponents", self.exponent_note(), markdown_table(self.exponents())]
        parts += ["## Operations of a forward pass on one image", OPERATIONS, markdown_table(self.operations())]
        if self.notes():
            parts += ["## Not measured", "\n".join(f"- {note}" for note in self.notes())]
        return "\n\n".join(parts) + "\n"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _cell(cost: Cost | None, metric: Metric, spread: bool) -> str:
    value = None if cost is None else metric.value(cost)
    if cost is None or value is None:
        return "memory" if cost is not None and "out of memory" in cost.note else "-"
    quartiles = metric.spread(cost) if spread else None
    return number(value) + (f" ({number(quartiles[0])}-{number(quartiles[1])})" if quartiles else "")
