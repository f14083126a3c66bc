"""The table of an experiment as Markdown, CSV, and cells of a page."""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from linvit.experiments.compare.results import AVERAGED, Results
from linvit.experiments.compare.statistics import LEAST, Difference, spread
from linvit.io.plain_text import markdown_table, markdown_text, printable
from linvit.runs.folder import EVALUATED
from linvit.tasks.teacher import START

STARTED = f"{START}score"
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
COSTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "softmax blocks": ("softmax_blocks", lambda number: f"{number:.0f}"),
    "parameters": ("parameters", lambda number: count(number)),
    "MACs": ("macs", lambda number: count(number)),
    "latency (ms)": ("latency_seconds", lambda seconds: f"{seconds * 1e3:.2f}"),
    "memory (MiB)": ("memory_bytes", lambda size: f"{size / 2**20:.1f}"),
    "state (KiB)": ("state_bytes", lambda size: f"{size / 2**10:.1f}"),
}
"""Columns of `Costs.numbers`, and how they are read."""


class Cell(NamedTuple):
    """Cell of a variant in a table, and the numbers behind it, by the columns of the CSV file."""

    text: str
    numbers: dict[str, Any]


def rows(results: Results) -> list[list[str]]:
    """Returns the displayed table: titles, and a row per variant. Columns without a known cell are left out."""
    table = _table(results)
    titles = [title for title in table[0] if title == results.tag or any(row[title].text != "-" for row in table)]
    return [titles, *([row[title].text for title in titles] for row in table)]


def numbers(results: Results) -> list[list[Any]]:
    """Returns the rows of the CSV file, titles first: scores as logged, seconds, bytes; None if missing."""
    table = [{name: n for cell in row.values() for name, n in cell.numbers.items()} for row in _table(results)]
    return [[*table[0]], *([None if number != number else number for number in row.values()] for row in table)]


def notes(results: Results) -> list[str]:
    """Returns the notes below a table: origin of its numbers, and doubtful results."""
    found = [
        f"Score: {results.tag} of the epoch beside it, a run's last, mean ± standard deviation over seeds. "
        f"Difference: mean over the seeds that both have, with its 95 % confidence interval by the paired t-test, "
        f"which is not corrected for the number of comparisons. A star marks a difference that is significant at 5 % "
        f"by Holm's correction for all comparisons of the table; it takes at least {LEAST} seeds, on which the "
        f"differences are not all equal."
    ]
    if any(results.right.values()):
        found.append(
            "Over images: the 95 % confidence interval of the score by 10,000 bootstrap samples of the images, each "
            "its mean over seeds (Wilson's of one seed, or where all agree on each image); of the difference by paired "
            "samples. The networks are given: the spread over seeds is not in it."
        )
    if any(variant.evaluations for variant in results.variants):
        found.append(
            "Top-1 on a set: of each run's best checkpoint, by linvit evaluate, mean over the runs that have it."
        )
    found.append("Best: the best score of each run, mean over seeds, and the median of its epoch.")
    for key, values in results.tuned.items():
        found.append(
            f"{key} was tuned: of {', '.join(map(str, values))} each variant has the value with the best {results.tag} "
            f"in one run with a seed, and of generated data with images, that are not those of the table."
        )
        if results.unscored:
            found[-1] += f" Not chosen from, as these runs have no score: {', '.join(results.unscored)}."
        if edges := [one.name for one in results.variants if results.best_value(one, key)[1]]:
            found[-1] += f" At the edge of these, beyond which a better value may lie: {', '.join(edges)}."
    if results.matched:
        found.append("A difference is that from the row that is named, whose other options are the same.")
    if parts := results.untrained():
        most = ", ".join(f"{name} ({part:.0%})" for name, part in parts.items())
        found.append(
            f"Warning: {results.tag} scores a moving average of the weights that still consists, in part, of the "
            f"untrained start: {most}. Compare the trained weights instead, by --score=val/score, train for more "
            f"steps, or lower --model.ema_decay."
        )
    if any(variant.costs for variant in results.variants):
        found.append(
            "Latency: median of a forward pass per image, in batches of two, all variants in turns. MACs: of one "
            "image. Memory: the most that a forward and a backward pass of two images allocate, beyond the weights. "
            "State: what attention keeps of all keys and values of an image, in float32, sum over layers: sums of "
            "features and values where it has thin factors, or else the keys and values, an upper bound."
        )
    if results.teachers:
        found.append(
            "A teacher is the trained network that runs are copies of. As a baseline it is one number: intervals show "
            "the spread of its students alone. Before any step: the score of a student with its teacher's weights; of "
            "several stages, before the last. Distance: mean squared error of attention's outputs over the mean square "
            "of the teacher's, mean over layers and seeds, on the first batch of the validation split; 1 is as far off "
            "as zeros would be. Faster from: the side of the image from which on a student's forward pass takes less "
            "time than its teacher's, among those that were measured."
        )
    if any(variant.rank() is not None for variant in results.variants):
        found.append(
            "Rank: of the attention matrix, mean over layers, heads and seeds, when last measured; a mechanism that "
            "mixes channels and no tokens (xca) has none."
        )
    if results.source:
        found.append(f"Published are the scores of {results.source}; they are the authors', not ours.")
    return found


def markdown(results: Results) -> str:
    """Returns a table in GitHub's Markdown, its title above and the notes below it."""
    parts = [f"**{markdown_text(results.title)}**", markdown_table(rows(results))]
    return "\n\n".join([*parts, *map(markdown_text, notes(results))]) + "\n"


def count(number: float) -> str:
    """Returns a number with three digits and a prefix: 5.72M."""
    for size, letter in UNITS:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _table(results: Results) -> list[dict[str, Cell]]:
    """Returns a row per variant: cells by the titles of columns."""
    differences, untrained = results.differences(), results.untrained()
    seeds = sorted({seed for one in results.variants for seed in (*one.runs, *one.trouble)})
    sets = dict.fromkeys(name for variant in results.variants for name in variant.evaluations)
    curves = {"before any step": (STARTED, "before_"), results.tag: (None, "")}
    if results.tag == f"{AVERAGED}score":
        curves[EVALUATED] = (EVALUATED, "raw_")  # of the trained weights, beside that of their moving average
    apart = f"difference{f' from {results.baseline}' * (not results.matched)} [95 % interval]"
    table = []
    for variant in results.variants:
        scores, best = variant.scores(results.score), results.best(variant)
        found = variant.costs
        costs: dict[str, float] = found.numbers if found else {}
        met = found.crossover if found else None
        row = {"variant": _cell(str, variant=variant.name)}
        row |= {f"{key} (tuned)": _cell(str, **{key: results.best_value(variant, key)[0]}) for key in results.tuned}
        for title, (tag, name) in curves.items():
            mean, deviation, _ = results.summary(variant, tag)
            row[title] = _score(mean, deviation, f"{name}mean", f"{name}standard_deviation")
        own, of_difference = results.over_images(variant)
        row["over images"] = _interval(own, "images")
        epochs = sorted({score.epoch for score in scores.values()} - {0})
        row["epoch"] = Cell(" to ".join(map(str, [*epochs[:1], *epochs[1:][-1:]])) or "-", {})
        without = variant.without_score(results.score)
        incomplete = f" ({len(without)} incomplete)" * bool(without)
        row["seeds"] = Cell("-" if variant.known else f"{len(scores)}{incomplete}", {"seeds": len(scores)})
        row[apart] = _difference(results, variant.name, differences.get(variant.name))
        row["difference over images"] = _interval(of_difference, "difference_images")
        row["best (epoch)"] = Cell(f"{best[0]:.4f} ({best[1]})" if best else "-", {"best_mean": best and best[0]})
        for name in sets:
            row[f"top-1 on {name}"] = _mean(variant.evaluations.get(name, []), f"top1_{name}")
        for title, start in (("distance before", START), ("distance", "")):
            row[title] = _mean(variant.distances(start), title.replace(" ", "_"))
        for title, (name, form) in COSTS.items():
            row[title] = _cell(form, **{name: costs.get(name)})
        row["faster from (px)"] = Cell(str(met or "-"), {"faster_from": met and met.size})
        row["rank"] = _cell("{:.1f}".format, rank=variant.rank())
        row["published"] = _cell("{:g}".format, published=variant.published)
        details: dict[str, Any] = {"untrained_part": untrained.get(variant.name)}
        details |= {name: costs.get(name) for name in ("latency_low", "latency_high")}
        for seed in seeds:
            score = scores.get(seed)
            details |= {
                f"score_seed{seed}": score and score.value,
                f"epoch_seed{seed}": (score and score.epoch) or None,
            }
        trouble = (f"seed {seed}: {printable(text, lines=False)}" for seed, text in without.items())
        row["details"] = Cell("-", details | {"trouble": "; ".join(trouble)})
        table.append(row)
    return table


def _cell(form: Callable[[Any], str], **numbers: Any) -> Cell:
    """Returns a formatted number; of several numbers, the first."""
    first = next(iter(numbers.values()))
    return Cell("-" if first is None or first != first else form(first), numbers)


def _mean(values: Sequence[float], name: str) -> Cell:
    return _score(statistics.fmean(values) if values else math.nan, spread(values), name)


def _score(mean: float, deviation: float, *names: str) -> Cell:
    """Returns a mean over seeds, with its standard deviation if there are several."""
    more = "" if math.isnan(deviation) else f" ± {deviation:.4f}"
    return _cell(lambda mean: f"{mean:.4f}{more}", **dict(zip(names, (mean, deviation), strict=False)))


def _interval(ends: tuple[float, float], name: str) -> Cell:
    return _cell(
        lambda low: f"[{low:.4f}, {ends[1]:.4f}]", **dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True))
    )


def _difference(results: Results, name: str, difference: Difference | None) -> Cell:
    if difference is None:
        text = "baseline" if name == results.baseline else "reference"
    elif math.isnan(difference.mean):
        text = "-"
    else:
        interval = f" [{difference.low:+.4f}, {difference.high:+.4f}]{' *' * difference.significant}"
        text = f"{difference.mean:+.4f}{interval * (not math.isnan(difference.low))}"
        text += f" from {results.references[name]}" * results.matched
    names = ("difference", "interval_low", "interval_high", "pairs", "p", "p_holm")
    numbers = dict(zip(names, difference or [None] * len(names), strict=True))
    star = None if difference is None else int(difference.significant)
    return Cell(text, {"reference": results.references.get(name), **numbers, "star": star})
