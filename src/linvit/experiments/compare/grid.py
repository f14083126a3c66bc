"""The grid of an experiment: options that differ between its runs, their values, and the seeds of each run."""

import itertools
import re
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jsonargparse import ArgumentParser

from linvit.errors import UserError, check_choice, check_number
from linvit.registry import attentions, backbones, heads
from linvit.registry.layouts import is_layout
from linvit.registry.signatures import parameters_of

Settings = Mapping[str, Any]
"""Options of `linvit fit` by name, such as `{"model.attention": "softmax"}`."""

UNSAFE = re.compile(r"[^\w.+-]+")
REGISTRIES = {"attention": attentions, "backbone": backbones, "head": heads}
CONVOLUTIONS = {"dwc": False, "dwc_kernel": 0, "lepe_kernel": 0, "residual_kernel": 0, "conv_size": 0, "scales": []}
"""Options of mechanisms that have a convolution, and the values that leave it out."""
TEACHER = "teacher"  # the name of a row of the table: the teacher of the runs, whose score they have logged
TUNING_SEED = 1000
LONGEST = 80  # characters of a variant's name, which names folders


@dataclass
class Sweep:
    """Variants of one configuration, each to be run with each seed, as a file or a command line describes them."""

    config: str | list[str] = field(default_factory=list)  # that all start from: files or names, a later one wins
    set: dict[str, Any] = field(default_factory=dict)  # options that all variants share
    vary: dict[str, list[Any]] = field(default_factory=dict)  # options whose values, combined, are variants
    variants: dict[str, Settings] = field(default_factory=dict)  # what differs, by name; the order of the table
    seeds: int | list[int] = 1  # their number, or which; a run has one as `seed_everything`
    baseline: str | None = None  # a variant or "teacher"; None: the teacher of the runs, or else the first variant
    score: str | None = None  # the curve that is compared; None: of the weights that the task predicts with
    tune: dict[str, list[Any]] = field(
        default_factory=dict
    )  # candidate values by option; each variant gets the best ones
    published: dict[str, Any] = field(default_factory=dict)  # of a paper: `source`, and `scores` by variant

    @property
    def keys(self) -> list[str]:
        """The options that differ between variants, but for those that are tuned."""
        keys = dict.fromkeys(key for settings in self.variants.values() for key in settings)
        return [key for key in keys if key not in self.tune]

    @property
    def all_seeds(self) -> list[int]:
        """The seeds, each."""
        return self.seeds if isinstance(self.seeds, list) else list(range(self.seeds))

    @classmethod
    def read(cls, content: Any, what: str) -> "Sweep":
        """Returns the content of a file."""
        keys = [one.name for one in fields(cls)]
        if not isinstance(content, dict):
            raise UserError(f"{what} is not a grid: it must be a mapping with {', '.join(keys)}")
        for key in content:
            check_choice(f"a key of {what}", key, keys)
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(cls)
        try:
            spec = cls(**parser.parse_object(content).as_dict())
        except ArgumentError as error:
            raise UserError(f"{what} is not a grid: {error}") from error
        spec.config = [spec.config] if isinstance(spec.config, str) else spec.config
        return spec

    def grid(self) -> "Sweep":
        """Returns the grid with all variants and seeds named: all combinations of `variants` and values of `vary`."""
        seeds = self.all_seeds
        for seed in seeds:
            check_number("seeds", seed, at_least=0, whole=True)
        if not seeds or len(set(seeds)) < len(seeds):
            raise UserError(f"seeds must be a number of seeds, or a list in which each is once; got {self.seeds!r}")
        if twice := [key for key in self.tune if key in self.vary]:
            raise UserError(f"'{twice[0]}' is tuned for each variant, so it cannot be varied as well")
        variants = self._variants()
        if fixed := [key for key in self.set if any(key in settings for settings in variants.values())]:
            raise UserError(f"'{fixed[0]}' differs between the variants, so it cannot be set for all of them")
        if self.baseline is not None:
            check_choice("baseline", self.baseline, [*variants, TEACHER])
        scores = self.published.get("scores")
        if self.published and (self.published.keys() != {"source", "scores"} or not isinstance(scores, dict)):
            raise UserError(f"'published' must have a source, and scores by variant; got {self.published!r}")
        for name in () if self.vary else scores or ():  # with further options varied they are those of no variant
            check_choice("a variant of 'published'", name, variants)
        return replace(self, vary={}, variants=variants, seeds=seeds)

    def tuning(self) -> "Sweep":
        """Returns the grid of the tuning runs, without the values to try, with a seed that no other run has."""
        seed = next(seed for seed in itertools.count(TUNING_SEED) if seed not in self.all_seeds)
        common = {key: value for key, value in self.set.items() if key not in self.tune}
        return replace(self, set=common, tune={}, seeds=[seed], baseline=None, published={})

    def all_trials(self) -> "Sweep":
        """Returns the runs that tune: each variant with all values of `tune`."""
        return replace(self.tuning(), vary=self.tune).grid()

    def tuned(self, scores: Mapping[str, float]) -> "Sweep":
        """Returns the same with the values of `tune` that score best, by name of trial; the middle one of equals."""
        trials, chosen = self.all_trials(), {}
        for name, settings in self.variants.items():
            own = [
                trial
                for trial, tried in trials.variants.items()
                if trial in scores and tried == {**settings, **{key: tried[key] for key in self.tune}}
            ]
            if not own:
                raise UserError(f"no run that tunes the variant '{name}' has a score, so it has no best value")
            best = [trial for trial in own if scores[trial] == max(scores[trial] for trial in own)]
            chosen[name] = trials.variants[best[len(best) // 2]]
        return replace(self, set=trials.set, variants=chosen)

    def _variants(self) -> dict[str, Settings]:
        """Variants by name; what `vary` adds is named by its values."""
        varied = [[(key, value) for value in expand_names(key, values)] for key, values in self.vary.items()]
        found: dict[str, Settings] = {}
        for name, own in (self.variants or {"": {}}).items():
            for combination in itertools.product(*varied):
                parts = [str(name), *(value_label(key, value) for key, value in combination)]
                whole = UNSAFE.sub("-", "-".join(filter(None, parts))).strip("-.")[:LONGEST] or "all"
                settings = {**own, **dict(combination)}
                if found.get(whole) == settings:
                    raise UserError(f"the variant '{whole}' is there twice: {settings}. Leave one of them out")
                while whole in found:  # other settings whose names are cut, or written alike
                    whole = f"{whole}+"
                found[whole] = settings
        return found


def expand_names(key: str, values: Sequence[Any]) -> list[Any]:
    """Values of an option, with registered names in the place of a pattern: `model.attention: ["*"]` is all of them."""
    registry = REGISTRIES.get(key.rpartition(".")[2])
    found: list[Any] = []
    for value in values:
        if registry is None or not (isinstance(value, str) and "*" in value):
            found.append(value)
        elif names := registry.names(value):
            found += names
        else:
            raise UserError(f"no registered name fits {key}={value!r}: linvit list has them")
    return found


def without_convolution(spec: Any) -> Any:
    """Returns an attention, or a list of them, without its convolution of tokens, if it has an option for that."""
    if spec is None or isinstance(spec, list):
        return spec and [without_convolution(one) for one in spec]
    if is_layout(spec):
        return spec | {"linear": without_convolution(spec["linear"])} if "linear" in spec else spec
    name, options = attentions.parse(spec)
    given = parameters_of(attentions.get(name)) | options
    for option, off in CONVOLUTIONS.items():
        if given.get(option, 0) not in (0, False):
            return {"name": name, **options, option: off}
    return spec


def value_label(key: str, value: Any) -> str:
    """Returns a short name of a value: `softmax`, `focused-focusing_factor4`, `lr0.001`, `window_size7`."""
    match value:
        case str():
            return value
        case {"name": str(name), **options} | {"layout": str(name), **options}:
            return "-".join([name, *(f"{option}{_plain(given)}" for option, given in options.items())])
        case [*values] if any(isinstance(entry, str | dict) for entry in values):
            runs = [
                (name, len(list(same))) for name, same in itertools.groupby(value_label("", entry) for entry in values)
            ]
            return "-".join(f"{count}{name}" if count > 1 else name for name, count in runs)
        case _:
            return f"{key.rpartition('.')[2]}{_plain(value)}"


def split(text: str) -> list[str]:
    """Returns the values of an option: parts between commas that stand outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _plain(value: Any) -> str:
    match value:
        case [*values]:
            return "-".join(map(_plain, values))
        case dict():
            return "-".join(f"{key}{_plain(entry)}" for key, entry in value.items())
        case bool() | None:
            return {True: "-true", False: "-false", None: "-null"}[value]
        case _:
            return f"-{value}" if isinstance(value, str) else f"{value}"
