"""The table of an experiment as Markdown, CSV, LaTeX, and cells of a page."""

import io
import math
from collections.abc import Sequence

from linvit.experiments.compare.costs import Costs
from linvit.experiments.compare.results import Results, Variant
from linvit.experiments.compare.runs import Score
from linvit.plain_text import CsvWriter, printable

UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def titles(results: Results) -> list[str]:
    """Of the columns of `rows`."""
    optional = ["published"] if results.source else []
    rank = ["rank"] if any(variant.rank() is not None for variant in results.variants) else []
    costs = ["parameters", "MACs", "latency (ms)", "memory (MiB)"] * any(variant.costs for variant in results.variants)
    scores = [results.tag, "epoch", "seeds", f"difference from {results.baseline} [95 % interval]"]
    return ["variant", *scores, *costs, *rank, *optional]


def rows(results: Results) -> list[list[str]]:
    """A row per variant, as it is read."""
    return [_row(results, variant, titles(results)) for variant in results.variants]


def markdown(results: Results) -> str:
    """A table in GitHub's Markdown."""
    lines = [titles(results), ["---"] + ["---:"] * (len(titles(results)) - 1), *rows(results)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def latex(results: Results) -> str:
    """A `tabular` for the package booktabs."""
    lines = [" & ".join(map(_tex, line)) + r" \\" for line in [titles(results), *rows(results)]]
    columns = "l" + "r" * (len(titles(results)) - 1)
    body = "\n".join(["\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"])
    return f"% needs \\usepackage{{booktabs}}\n\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n"


def csv_text(results: Results) -> str:
    """Plain numbers: scores as they were logged, seconds, bytes; an empty cell where there is none."""
    file = io.StringIO(newline="")
    writer = CsvWriter(file)
    seeds = sorted({seed for variant in results.variants for seed in variant.runs} | _troubled(results.variants))
    writer.writerow(
        ["variant", "mean", "standard_deviation", "seeds", "difference", "interval_low", "interval_high"]
        + ["parameters", "macs", "latency_seconds", "latency_low", "latency_high", "memory_bytes", "rank", "published"]
        + [f"{what}_seed{seed}" for seed in seeds for what in ("score", "epoch")]
        + ["trouble"]
    )
    for variant in results.variants:
        mean, spread, count = results.summary(variant)
        difference = results.difference(variant)
        costs = variant.costs if isinstance(variant.costs, Costs) else None
        scores = variant.scores(results.score)
        measured = (
            ["", "", "", "", "", ""]
            if costs is None
            else [costs.parameters, costs.macs, costs.latency.median, *costs.latency.quartiles, costs.memory]
        )
        numbers = [mean, spread, count, *(difference[:3] if difference else ["", "", ""]), *measured]
        numbers += [
            variant.rank(),
            variant.published,
            *(value for seed in seeds for value in _of_seed(scores.get(seed))),
        ]
        cells = ["" if number is None or number != number else number for number in numbers]
        writer.writerow([variant.name, *cells, _trouble(variant)])
    return file.getvalue()


def count(number: float) -> str:
    """A number with three digits and a prefix: 5.72M."""
    for size, letter in UNITS:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _row(results: Results, variant: Variant, columns: Sequence[str]) -> list[str]:
    mean, spread, seeds = results.summary(variant)
    difference = results.difference(variant)
    score = "-" if math.isnan(mean) else f"{mean:.4f}" + (f" ± {spread:.4f}" if seeds > 1 else "")
    if difference is None:
        apart = "baseline"
    elif math.isnan(difference.low):
        apart = "-" if math.isnan(difference.mean) else f"{difference.mean:+.4f}"
    else:
        apart = f"{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]"
        apart += " *" if difference.significant else ""
    cells = [variant.name, score, _epochs(results, variant), f"{seeds}{_mark(variant)}", apart]
    costs = variant.costs
    if "MACs" in columns:
        cells += ["-"] * 4 if not isinstance(costs, Costs) else _costs(costs)
    rank = variant.rank()
    if "rank" in columns:
        cells.append("-" if rank is None else f"{rank:.1f}")
    if "published" in columns:
        cells.append("-" if variant.published is None else f"{variant.published:g}")
    return cells


def _costs(costs: Costs) -> list[str]:
    latency, memory = f"{costs.latency.median * 1e3:.2f}", f"{costs.memory / 2**20:.1f}"
    return [count(costs.parameters), count(costs.macs), latency, memory]


def _of_seed(score: Score | None) -> tuple[float | None, int | None]:
    """A score and its epoch."""
    return (None, None) if score is None else (score.value, score.epoch)


def _epochs(results: Results, variant: Variant) -> str:
    """Of which epochs the scores are."""
    found = [score.epoch for score in variant.scores(results.score).values()]
    if not found:
        return "-"
    return f"{min(found)}" if min(found) == max(found) else f"{min(found)} to {max(found)}"


def _mark(variant: Variant) -> str:
    return f" ({len(variant.trouble)} incomplete)" if variant.trouble else ""


def _trouble(variant: Variant) -> str:
    return "; ".join(f"seed {seed}: {printable(text, lines=False)}" for seed, text in sorted(variant.trouble.items()))


def _troubled(variants: Sequence[Variant]) -> set[int]:
    return {seed for variant in variants for seed in variant.trouble}


TEX: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
TEX |= {letter: f"\\{letter}" for letter in "&%#_{}$"}


def _tex(text: str) -> str:
    return text.translate(str.maketrans(TEX))
