"""The table of an experiment as Markdown, CSV, LaTeX, and cells of a page."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from linvit.experiments.compare.costs import Costs
from linvit.experiments.compare.grid import BUDGETS
from linvit.experiments.compare.results import AVERAGED, Results, Variant
from linvit.experiments.compare.statistics import LEAST, Difference, spread
from linvit.experiments.crossover import crossover_text
from linvit.plain_text import markdown_table, printable
from linvit.runs.folder import EVALUATED
from linvit.tasks.teacher import START

STARTED = f"{START}score"
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def titles(results: Results) -> list[str]:
    """Of the columns of `rows`."""
    optional = ["published"] if results.source else []
    rank = ["rank"] if any(variant.rank() is not None for variant in results.variants) else []
    costs = ["parameters", "MACs", "latency (ms)", "memory (MiB)"] * any(variant.costs for variant in results.variants)
    costs += ["state (KiB)"] * any(isinstance(one.costs, Costs) and one.costs.state for one in results.variants)
    start = ["before any step"] * bool(results.teachers)
    scores = [*start, results.tag, *_raw(results), "epoch", "seeds"]
    scores.append(f"difference{'' if results.matched else f' from {results.baseline}'} [95 % interval]")
    scores.append("best (epoch)")
    scores += [f"{what} to {results.level:g}" for what in ("epochs", "seconds") if results.level is not None]
    distances = ["distance before", "distance"] * bool(results.teachers)
    crossover = ["faster from (px)"] * bool(results.teachers and costs)
    return [
        "variant",
        *[f"{key} (tuned)" for key in results.tuned],
        *scores,
        *distances,
        *costs,
        *crossover,
        *rank,
        *optional,
    ]


def rows(results: Results) -> list[list[str]]:
    """A row per variant, as it is read."""
    columns, differences = titles(results), results.differences()
    return [_row(results, variant, differences.get(variant.name), columns) for variant in results.variants]


def notes(results: Results) -> list[str]:
    """What a reader of the table must know: how its numbers came about, and what is doubtful."""
    costs = [variant.costs for variant in results.variants if isinstance(variant.costs, Costs)]
    found = [
        f"Score: {results.tag} of the epoch beside it, a run's last, mean ± standard deviation over seeds. "
        f"Difference: mean over the seeds that both have, with its 95 % confidence interval by the paired t-test, "
        f"which is not corrected for the number of comparisons. A star marks a difference that is significant at 5 % "
        f"by Holm's correction for all comparisons of the table; it takes at least {LEAST} seeds, on which the "
        f"differences are not all equal."
    ]
    found.append("Best: the best score of each run, mean over seeds, and the median of its epoch.")
    if results.level is not None:
        found[-1] += (
            f" Epochs and seconds to {results.level:g}: until a run's score first was as high, mean over the runs that "
            f"reached it; seconds of training alone, by each run's own images per second."
        )
    if results.budget in ("cpu_time", "macs"):
        what = {"cpu_time": "time", "macs": "number of multiply-accumulates"}[results.budget]
        found.append(
            f"Budget: {BUDGETS[results.budget]}. How many epochs (or steps) a variant is trained, as a whole number, "
            f"follows from the {what} of its training step relative to that of the row that it is compared with."
        )
    for key, values in results.tuned.items():
        found.append(
            f"{key} was tuned: of {', '.join(map(str, values))} each variant has the value with the best {results.tag} "
            f"in one run with a seed that is not among those of the table."
        )
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
    if costs:
        found.append(
            "Latency: median of a forward pass per image, in batches of two, all variants in turns. MACs: of one "
            "image. Memory: the most that a forward and a backward pass of two images allocate, beyond the weights. "
            "State: what attention keeps of all keys and values of an image, in float32, sum over layers: the sums of "
            "features and values that its thin factors allow, or else the keys and values, which is an upper bound."
        )
    if results.teachers:
        found.append(
            "A teacher is the trained network that runs are copies of; each has scored it on its own data. As a "
            "baseline it is one number, so intervals show the spread of its students alone. Before any step: the score "
            "of a student with its teacher's weights; of several stages, before the last. Distance: mean squared error "
            "of attention's outputs over the mean square of the teacher's, mean over layers and seeds, on the first "
            "batch of the validation split, before any step and of the trained weights at the end; 0 is the same, 1 as "
            "far off as zeros would be. "
            "Faster from: the side from which on a student's forward pass of one image takes less time than its "
            "teacher's; always or never among those that were measured, multiples of the runs' own."
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
    """A table in GitHub's Markdown, its title above and the notes below it."""
    parts = [f"**{printable(results.caption)}**", markdown_table([titles(results), *rows(results)])]
    return "\n\n".join([*parts, *map(printable, notes(results))]) + "\n"


def latex(results: Results) -> str:
    """A `tabular` for the package booktabs, and the notes below it."""
    lines = [" & ".join(map(_tex, line)) + r" \\" for line in [titles(results), *rows(results)]]
    columns = "l" + "r" * (len(titles(results)) - 1)
    body = "\n".join(["\\toprule", lines[0], "\\midrule", *lines[1:], "\\bottomrule"])
    below = "\n".join(f"\\par\\smallskip{{\\footnotesize {_tex(note)}\\par}}" for note in notes(results))
    note = f"% {printable(results.caption, lines=False)}; needs \\usepackage{{booktabs}}"
    return f"{note}\n\\begin{{tabular}}{{{columns}}}\n{body}\n\\end{{tabular}}\n{below}\n"


def numbers(results: Results) -> list[list[Any]]:
    """The rows of the CSV file, titles first: scores as they were logged, seconds, bytes; None where there is none."""
    rows = [_numbers(results, variant) for variant in results.variants]
    known = ([None if number != number else number for number in row.values()] for row in rows)
    return [[*rows[0]], *known]


def _numbers(results: Results, variant: Variant) -> dict[str, Any]:
    """A row of the CSV file."""
    mean, deviation, seeds = results.summary(variant)
    raw = results.summary(variant, EVALUATED)[0] if _raw(results) else None
    row: dict[str, Any] = {"variant": variant.name}
    row |= {key: results.best_value(variant, key)[0] for key in results.tuned}
    row |= {"mean": mean, "standard_deviation": deviation, "seeds": seeds, "raw_mean": raw}
    row["best_mean"] = (results.best(variant) or [None])[0]
    if results.level is not None:
        for name, values in zip(("epochs_to_level", "seconds_to_level"), results.reached(variant), strict=True):
            row[name] = statistics.fmean(values) if values else None
    if results.teachers:
        before, of_before, _ = results.summary(variant, STARTED) if variant.runs else (None, None, None)
        row |= {"before_mean": before, "before_standard_deviation": of_before}
        for name, start in (("distance_before", START), ("distance", "")):
            row[name] = statistics.fmean(distances) if (distances := variant.distances(start)) else None
    row["untrained_part"] = results.untrained().get(variant.name)
    difference = results.differences().get(variant.name)
    names = ("difference", "interval_low", "interval_high", "pairs", "p", "p_holm")
    row |= {"reference": results.references.get(variant.name)}
    row |= dict(zip(names, difference or [None] * len(names), strict=True))
    row["star"] = None if difference is None else int(difference.significant)
    columns = ("parameters", "macs", "latency_seconds", "latency_low", "latency_high", "memory_bytes", "state_bytes")
    costs = found.numbers if isinstance(found := variant.costs, Costs) else {}
    row |= {name: costs.get(name) for name in columns} | {"rank": variant.rank(), "published": variant.published}
    if results.teachers:
        row["faster_from"] = found.crossover if isinstance(found, Costs) else None
    scores = variant.scores(results.score)
    for seed in sorted({seed for one in results.variants for seed in (*one.runs, *one.trouble)}):
        score = scores.get(seed)
        row[f"score_seed{seed}"], row[f"epoch_seed{seed}"] = score and score.value, (score and score.epoch) or None
    trouble = (f"seed {seed}: {printable(text, lines=False)}" for seed, text in sorted(variant.trouble.items()))
    return row | {"trouble": "; ".join(trouble)}


def count(number: float) -> str:
    """A number with three digits and a prefix: 5.72M."""
    for size, letter in UNITS:
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def _row(results: Results, variant: Variant, difference: Difference | None, columns: Sequence[str]) -> list[str]:
    if difference is None:
        apart = "baseline" if variant.name == results.baseline else "reference"
    elif math.isnan(difference.mean):
        apart = "-"
    else:
        interval = f" [{difference.low:+.4f}, {difference.high:+.4f}]{' *' * difference.significant}"
        apart = f"{difference.mean:+.4f}{interval * (not math.isnan(difference.low))}"
        apart += f" from {results.references[variant.name]}" * results.matched
    start = [STARTED] * bool(results.teachers)
    scores = [_score(*results.summary(variant, tag)) for tag in (*start, None, *_raw(results))]
    epochs = sorted({score.epoch for score in variant.scores(results.score).values()})
    incomplete = f" ({len(variant.trouble)} incomplete)" if variant.trouble else ""
    row = [variant.name, *scores, " to ".join(map(str, [*epochs[:1], *epochs[1:][-1:]])) or "-"]
    row += [f"{results.summary(variant)[2]}{incomplete}", apart]
    if variant.known:  # one number, without seeds
        score = f"{results.summary(variant)[0]:.4f}"
        row = [variant.name, *["-"] * len(start), score, *["-"] * (len(scores) - len(start) - 1), "-", "-", apart]
    best, runs = results.best(variant), len(variant.finished)
    row.append("-" if best is None else f"{best[0]:.4f} ({best[1]})")
    for values in results.reached(variant) if results.level is not None else ():
        row.append(f"{statistics.fmean(values):.1f}" if values else "-")
        row[-1] += f" ({len(values)} of {runs})" * (0 < len(values) < runs)
    row[1:1] = [results.best_value(variant, key)[0] for key in results.tuned]
    if results.teachers:
        row += [
            _score(statistics.fmean(d), spread(d), len(d)) if (d := variant.distances(s)) else "-" for s in (START, "")
        ]
    costs, rank = variant.costs, variant.rank()
    if "MACs" in columns and isinstance(costs, Costs):
        row += [count(costs.parameters), count(costs.macs), f"{costs.latency.median * 1e3:.2f}"]
        row.append(f"{costs.memory / 2**20:.1f}")
    elif "MACs" in columns:
        row += ["-"] * 4
    if "state (KiB)" in columns:
        row.append(f"{costs.state / 2**10:.1f}" if isinstance(costs, Costs) and costs.state else "-")
    if "faster from (px)" in columns:
        row.append(crossover_text(costs.crossover if isinstance(costs, Costs) else None))
    if "rank" in columns:
        row.append("-" if rank is None else f"{rank:.1f}")
    if "published" in columns:
        row.append("-" if variant.published is None else f"{variant.published:g}")
    return row


def _score(mean: float, spread: float, seeds: int) -> str:
    return "-" if math.isnan(mean) else f"{mean:.4f}" + (f" ± {spread:.4f}" if seeds > 1 else "")


def _raw(results: Results) -> list[str]:
    """The column of the trained weights' score, beside that of their moving average."""
    return [EVALUATED] if results.tag == f"{AVERAGED}score" else []


TEX: dict[str, str | int | None] = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}
TEX |= {letter: f"\\{letter}" for letter in "&%#_{}$"}


def _tex(text: str) -> str:
    start = "{}" * text.startswith(("[", "*"))  # which would be an argument of the line break before it
    return start + printable(text, lines=False).translate(str.maketrans(TEX))
