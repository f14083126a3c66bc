"""Results of the runs of an experiment: one row per variant."""

import io
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from linvit.errors import UserError
from linvit.experiments.compare.costs import Costs
from linvit.experiments.compare.grid import TEACHER
from linvit.experiments.compare.options import covered, differing, option_text, outermost, references
from linvit.experiments.compare.statistics import Difference, bootstrap, paired_differences, spread, wilson
from linvit.io.plain_text import printable
from linvit.io.reading import read_text
from linvit.runs import result
from linvit.runs.folder import RESULT, RunFolder, Score, flat
from linvit.tasks.teacher import DISTANCE
from linvit.tasks.teacher import TEACHER as OF_TEACHER

AVERAGED = "val/ema_"  # how curves of a moving average's scores begin
MOST_UNTRAINED = 0.1
EXACT = 1e-6  # scores are logged in float32


@dataclass
class Variant:
    """The runs of one variant."""

    name: str
    runs: dict[int, RunFolder] = field(default_factory=dict)  # by seed
    trouble: dict[int, str] = field(default_factory=dict)  # of a seed whose run failed, or has not been finished
    published: float | None = None  # reported by a paper, in its unit
    costs: Costs | None = None  # if they were measured
    known: dict[int, Score] = field(default_factory=dict)  # of a teacher, which has no runs: what its students logged
    source: str = ""  # of the weights of a teacher

    @property
    def finished(self) -> dict[int, RunFolder]:
        """The runs that were trained and evaluated to their end, by seed."""
        return {seed: run for seed, run in self.runs.items() if seed not in self.trouble}

    def scores(self, tag: str | None) -> dict[int, Score]:
        """Returns finite scores of the finished runs' last evaluations, by seed, or the teacher's score."""
        if self.known:
            return self.known
        found = {seed: run.score(run.score_tag(tag)) for seed, run in self.finished.items()}
        return {seed: score for seed, score in found.items() if score is not None and math.isfinite(score.value)}

    def without_score(self, tag: str | None) -> dict[int, str]:
        """Returns why seeds have no score: a run has failed or is unfinished, or its last evaluation has none."""
        found, names = dict(self.trouble), {seed: run.score_tag(tag) for seed, run in self.finished.items()}
        for seed in names.keys() - self.scores(tag).keys():
            last = self.runs[seed].last.get(name := names[seed])
            found[seed] = f"its last evaluation has no {name}" if last is None else f"its last {name} is {last}"
        return dict(sorted(found.items()))

    @cached_property
    def evaluations(self) -> dict[str, list[float]]:
        """Top-1 of finished runs by the names of the sets on which `linvit evaluate` has scored them."""
        found: dict[str, list[float]] = {}
        for run in self.finished.values():
            if (run.folder / RESULT).exists():
                for name, top1 in result.read(run.folder / RESULT)["evaluation"].items():
                    found.setdefault(printable(name, lines=False), []).append(top1)
        return found

    def layers(self, kind: str) -> list[dict[str, float]]:
        """Returns the last value of each layer in each finished run, from tags `KIND/LAYER`."""
        return [
            {
                tag.rpartition("/")[2]: value
                for tag, value in run.last.items()
                if tag.rpartition("/")[0] == kind and math.isfinite(value)
            }
            for run in self.finished.values()
        ]

    def ranks(self) -> dict[str, float]:
        """Returns the rank of each layer that was measured last, mean over heads and finished runs."""
        runs = self.layers("rank")
        return {one: statistics.fmean(own[one] for own in runs if one in own) for one in dict.fromkeys(chain(*runs))}

    def distances(self, start: str = "") -> list[float]:
        """Returns each finished run's distance from its teacher, mean over layers; with `START` before any step."""
        return [statistics.fmean(own.values()) for own in self.layers(f"{start}{DISTANCE}".strip("/")) if own]

    def rank(self) -> float | None:
        """Returns the mean of `ranks` over the layers; None if none were measured."""
        ranks = self.ranks()
        return statistics.fmean(ranks.values()) if ranks else None


@dataclass(frozen=True)
class Results:
    """An experiment that has been run."""

    title: str
    variants: Sequence[Variant]  # in the order of the table
    baseline: str  # the variant that the others are compared with, or whose like is their reference
    score: str | None  # the curve that is compared, if it was chosen
    keys: Sequence[str]  # the options that are said to differ
    source: str = ""  # of the published scores
    tuned: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # options, with the values that were tried
    unscored: Sequence[str] = ()  # runs that tune, without a score

    @property
    def tag(self) -> str:
        """The name of the score."""
        tags = {run.score_tag(self.score): None for variant in self.variants for run in variant.runs.values()}
        return " or ".join(tags) or self.score or "val/score"

    @property
    def sign(self) -> int:
        """1 if a higher score is better, -1 for a loss."""
        return -1 if self.tag.endswith("loss") else 1

    @property
    def teachers(self) -> dict[str, str]:
        """Names of the teachers of variants, if they are among the rows."""
        rows = {variant.source: variant.name for variant in self.variants if variant.known}
        sources = {variant.name: _teacher(run) for variant in self.variants for run in variant.runs.values()}
        return {name: rows[source] for name, source in sources.items() if source in rows}

    @cached_property
    def references(self) -> dict[str, str]:
        """The variant with which each variant is compared; see `references`."""
        options = {name: run.options() for name, run in self.firsts.items()}
        return references([one.name for one in self.variants], options, self.baseline, self.keys)

    @property
    def firsts(self) -> dict[str, RunFolder]:
        """The run with the least seed of each variant that has runs."""
        return {variant.name: variant.runs[min(variant.runs)] for variant in self.variants if variant.runs}

    @property
    def trouble(self) -> dict[tuple[str, int], str]:
        """Why runs have no score, by variant and seed."""
        return {(one.name, seed): text for one in self.variants for seed, text in one.without_score(self.score).items()}

    @property
    def matched(self) -> bool:
        """True if some variants are compared with another variant than the baseline."""
        return any(reference != self.baseline for reference in self.references.values())

    def differences(self) -> dict[str, Difference]:
        """Returns the differences of variants from their references, over common seeds."""
        scores = {variant.name: variant.scores(self.score) for variant in self.variants}
        pairs = []
        for name, reference in self.references.items():
            ours, theirs = scores[name], scores[reference]
            seeds = sorted(ours.keys() & theirs.keys())
            pairs.append(([ours[seed].value for seed in seeds], [theirs[seed].value for seed in seeds]))
        return dict(zip(self.references, paired_differences(pairs), strict=True))

    @cached_property
    def right(self) -> dict[str, dict[int, np.ndarray]]:
        """Correctness of each image (N,), bool, by variant and seed, where runs are scored by accuracy."""
        found: dict[str, dict[int, np.ndarray]] = {variant.name: {} for variant in self.variants}
        first: list[np.ndarray] = []  # labels: runs on other images are left out
        for variant in (variant for variant in self.variants if not variant.known):
            for seed, score in variant.scores(self.score).items():
                labels, classes = _predictions(variant.runs[seed], "ema" if self.tag.startswith(AVERAGED) else "raw")
                right = labels == classes
                first = first or [labels] * (len(labels) > 0)
                if len(labels) and abs(right.mean() - score.value) < EXACT and np.array_equal(first[0], labels):
                    found[variant.name][seed] = right
        return found

    def over_images(self, variant: Variant) -> tuple[tuple[float, float], tuple[float, float]]:
        """Returns 95 % intervals of a variant's score and of its difference from its reference; NaN if unknown."""
        own, unknown = self.right[variant.name], (math.nan, math.nan)
        if not own or len(own) < len(variant.finished):
            return unknown, unknown
        theirs = self.right.get(self.references.get(variant.name, ""), {})
        both = [own[seed] * 1.0 - theirs[seed] for seed in sorted(own.keys() & theirs.keys())]
        shares = np.mean([*own.values()], 0)
        alike = np.isin(shares, (0, 1)).all()  # in all seeds, if there are several
        score = wilson(shares.mean(), len(shares)) if alike else bootstrap(shares)
        return score, bootstrap(np.mean(both, 0)) if both else unknown

    def untrained(self) -> dict[str, float]:
        """Returns the share of initial weights in the scored moving average, for variants where it is above 10 %."""
        found = {}
        for variant in self.variants:
            scores = variant.scores(self.score)
            parts = [run.untrained(scores[seed]) for seed, run in variant.finished.items() if seed in scores]
            if max(parts, default=0.0) > MOST_UNTRAINED and self.tag.startswith(AVERAGED):
                found[variant.name] = max(parts)
        return found

    def summary(self, variant: Variant, tag: str | None = None) -> tuple[float, float, int]:
        """Returns mean and deviation (of a teacher NaN) of scores over seeds, or of another curve, and their number."""
        found = {} if variant.known and tag else variant.scores(tag or self.score)
        scores = [score.value for score in found.values()]
        mean = statistics.fmean(scores) if scores else math.nan
        return mean, math.nan if variant.known else spread(scores), len(scores)

    def best(self, variant: Variant) -> tuple[float, int] | None:
        """Returns the best score of a run, mean over seeds, and the median of its epoch; None without scores."""
        runs = [] if variant.known else [variant.runs[seed] for seed in variant.scores(self.score)]
        found = (run.best_score(run.score_tag(self.score), self.sign) for run in runs)
        best = [score for score in found if score is not None]
        if not best:
            return None
        return statistics.fmean(one.value for one in best), statistics.median_low(one.epoch for one in best)

    def best_value(self, variant: Variant, key: str) -> tuple[str, bool]:
        """Returns the value of a tuned option, and True if it is the smallest or largest of the numbers tried."""
        value = option_text(self.firsts[variant.name].options(), key) if variant.runs else "-"
        try:
            tried = [float(one) for one in self.tuned[key]]
            return value, float(value) in (min(tried), max(tried))
        except (TypeError, ValueError):
            return value, False

    def controls(self) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the options that differ between runs, with all values: the experiment's, then uncontrolled ones.

        Folders of runs and data are not compared; see `result.portable`.
        """
        runs = [run for variant in self.variants for run in variant.runs.values()]
        values = differing(result.portable(run.options()) for run in runs)
        own = {name: found for name, found in values.items() if covered(name, [*self.keys, *self.tuned])}
        return own, {name: found for name, found in values.items() if name not in own}


def with_published(results: Results) -> Results:
    """Returns the same with the scores that the authors of the models published, in per cent, where there are some."""
    sources: dict[str, None] = {}
    for variant in results.variants:
        if variant.costs is not None and (published := variant.costs.published) is not None:
            metric, score = next(iter(published.scores.items()))
            variant.published = 100 * score
            sources[f"{metric} in per cent ({published.source})"] = None
    return replace(results, source="; ".join(sources))


def with_teachers(results: Results) -> Results:
    """Returns results with the runs' teachers as first rows; a single teacher becomes the missing baseline."""
    found: dict[str, Variant] = {}
    for variant in results.variants:
        for seed, run in variant.finished.items():
            for score in run.finite(f"{OF_TEACHER}score"):
                source = _teacher(run)
                name = printable(f"{TEACHER} {source}", lines=False)
                found.setdefault(source, Variant(name, source=source)).known[seed] = Score(score, 0, 0)
    if len(found) == 1 and TEACHER not in (variant.name for variant in results.variants):
        (own,) = found.values()
        own.name = TEACHER
    variants = [*found.values(), *results.variants]
    chosen = results.baseline in [variant.name for variant in variants]
    first = variants[0] if len(found) == 1 else results.variants[0]
    return replace(results, variants=variants, baseline=results.baseline if chosen else first.name)


def _teacher(run: RunFolder) -> str:
    option = run.model.get("teacher")
    return str(option.get("source") if isinstance(option, dict) else option)


def _predictions(run: RunFolder, weights: str) -> np.ndarray:
    """Returns labels and predicted classes (2, N) of the last evaluation; N is 0 if it has written none."""
    with suppress(OSError, ValueError), io.StringIO(read_text(run.folder / "val_images.csv")) as file:
        columns = file.readline().strip().split(",")
        places = [columns.index(name) for name in ("label", weights)]
        found: np.ndarray = np.loadtxt(file, np.int64, delimiter=",", usecols=places, ndmin=2).T
        return found
    return np.empty((2, 0))


def is_rank(tag: str) -> bool:
    """True if a curve is the rank of a layer, and not of a part of its matrix."""
    return tag.startswith("rank/") and tag.count("/") == 1


def group(runs: Iterable[RunFolder]) -> list[Variant]:
    """Groups runs that differ only in their seed; names each variant by its folder or by the options that differ."""
    every = sorted(runs, key=lambda run: _by_number(str(run.folder)))
    options = [result.portable(run.options()) for run in every]
    keys = outermost(differing(options))
    found: dict[str, Variant] = {}
    for run, own in zip(every, options, strict=True):
        identity = repr([option_text(own, key) for key in keys])
        variant = found.setdefault(identity, Variant(_name(run, own, keys)))
        before = variant.runs.get(run.seed)
        if before is not None and before.folder.parent != run.folder.parent:
            rank_zero_warn(
                f"{before.folder} and {run.folder} have one configuration and seed: the table has the latter"
            )
        variant.runs[run.seed] = run  # of two with one seed, the newer one
    names = [variant.name for variant in found.values()]
    for variant in found.values():
        if names.count(variant.name) > 1:
            run = next(iter(variant.runs.values()))
            variant.name = f"{run.folder.parent.name}/{run.folder.name}"
    for variant in found.values():
        variant.name = printable(variant.name, lines=False)  # a folder's name need not be text, which plots must draw
        variant.trouble = {
            seed: f"{run.progress}. Resume it with: {run.command}"
            for seed, run in variant.runs.items()
            if not run.complete
        }
    return list(found.values())


def _by_number(text: str) -> list[str | int]:
    """Returns the key to sort texts by their words and numbers: version_9 is before version_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def check_comparable(variants: Sequence[Variant]) -> None:
    """Raises a `UserError` unless all runs have trained the same task."""
    tasks = {str(flat(run.config).get("model.class_path")) for variant in variants for run in variant.runs.values()}
    if len(tasks) > 1:
        raise UserError(f"these runs cannot be compared, since their tasks differ: {', '.join(sorted(tasks))}")


def _name(run: RunFolder, options: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`focused` of a folder `focused-seed0/version_0`, or else the values that differ."""
    stem, seed, _ = run.folder.parent.name.rpartition("-seed")
    if seed:
        return stem
    parts = [f"{key.rpartition('.')[2]}={value}" for key in keys if (value := option_text(options, key)) != "-"]
    return ", ".join(parts) or run.folder.parent.name
