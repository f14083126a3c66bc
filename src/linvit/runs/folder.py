"""Folder of a run, `checkpoints/CONFIG_NAME/version_N`: its files, its configuration and its curves."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from linvit.errors import UserError
from linvit.io.files import BEST, BEST_AVERAGE, CHECKPOINTS, LAST, resume_command
from linvit.io.plain_text import read_csv
from linvit.io.reading import read_text
from linvit.registry.model_info import CONFIGS
from linvit.runs import yaml_text
from linvit.runs.configs import find as find_config

CONFIG, CURVES, HPARAMS = "config.yaml", "metrics.csv", "hparams.yaml"
RESULT = "result.json"
"""Record of a finished run; see `linvit.runs.result`."""
TUNING = "tuning"
"""Subfolder of a comparison's folder for the tuning runs."""
OUTCOME = "outcome.json"
"""File beside the `version_N` of a run of `linvit compare`: how its last process ended."""
VERSION = re.compile(r"version_\d+")
RESUMED = re.compile(r"config_from_step_(\d+)\.yaml")
PRELIMINARY = re.compile(rf"(^|/)(stage_\d+|{TUNING})/[^/]+/version_\d+/")
"""Pattern of the folders of tuning runs and of stages before the last."""
EVALUATED = "val/score"
"""Curve that every evaluation adds to."""
PER_RUN = (
    *("seed_everything", "ckpt_path", "trainer.default_root_dir"),
    *("trainer.enable_progress_bar", "trainer.enable_model_summary"),
)
"""Options that may differ between the runs of one variant."""
SOURCE = "model.pretrained.source"


class Score(NamedTuple):
    """Last value of a curve of scores."""

    value: float
    step: int  # at which it was logged, counted from 0
    epoch: int  # number of epochs trained, counted from 1; 0 if the curves do not contain it


@dataclass(frozen=True)
class RunFolder:
    """Folder of a run that has begun to train."""

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """Complete configuration; for a resumed run, the one with which it was resumed last."""
        return read_yaml(run_config(self.folder))

    @cached_property
    def hparams(self) -> dict[str, Any]:
        """Arguments of the task, including those that the data sets."""
        return read_yaml(self.folder / HPARAMS) if (self.folder / HPARAMS).exists() else {}

    @property
    def model(self) -> dict[str, Any]:
        """Arguments of the task."""
        return mapping(mapping(self.config.get("model")).get("init_args"))

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Steps and values by tag, as logged, including NaN and infinity."""
        found: dict[str, list[tuple[int, float]]] = {}
        for step, values in read_curves(self.folder / CURVES):
            for tag, text in values.items():
                found.setdefault(tag, []).append((step, float(text)))
        return found

    def finite(self, tag: str) -> list[float]:
        """Returns the finite values of a curve."""
        return [value for _, value in self.curves.get(tag, []) if math.isfinite(value)]

    @property
    def last(self) -> dict[str, float]:
        """Last value of each curve; for validation curves, that of the last validation, if logged then. May be NaN."""
        ends = {tag: curve[-1] for tag, curve in self.curves.items()}
        step, _ = ends.get(EVALUATED, (0, 0.0))
        return {tag: value for tag, (at, value) in ends.items() if at >= step or not tag.startswith("val/")}

    @property
    def seed(self) -> int:
        """Seed of the run."""
        return int(self.config.get("seed_everything") or 0)

    @property
    def complete(self) -> bool:
        """True if the run is finished, that is, has a record; resuming a run deletes its record until the run ends."""
        return (self.folder / RESULT).is_file()

    @cached_property
    def _recorded(self) -> dict[str, Any]:
        """Scores in the record; empty without a record."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            return dict(json.loads(read_text(self.folder / RESULT))["score"])
        return {}

    @property
    def trained(self) -> int:
        """Number of trained epochs, including a last partial one."""
        return max((epoch + 1 for epoch in self.epoch_at.values()), default=0)

    @property
    def epoch_at(self) -> dict[int, int]:
        """Epochs, from 0, by the steps at which the curves contain them."""
        return {step: int(epoch) for step, epoch in self.curves.get("epoch", []) if math.isfinite(epoch)}

    def score(self, tag: str) -> Score | None:
        """Returns the last value of a curve, perhaps NaN; None without one, or without one of the last validation."""
        return self.scores(tag)[-1] if tag in self.last else None

    def best_score(self, tag: str, sign: int = 1) -> Score | None:
        """Returns the best score in the record of the run, which is the score of its best checkpoint.

        For other curves, and without a record, returns the largest finite value, or with sign -1 the smallest. Of equal
        values it returns the last, as for best.ckpt.
        """
        scores = [score for score in self.scores(tag) if math.isfinite(score.value)]
        found = max(scores, key=lambda score: (sign * score.value, score.step), default=None)
        told = self._recorded
        if told.get("tag") == tag and told.get("best") is not None and sign == 1:
            epochs = [score for score in scores if score.epoch == told["best_epoch"]]
            return Score(told["best"], epochs[-1].step if epochs else -1, told["best_epoch"])
        return found

    def scores(self, tag: str) -> list[Score]:
        """Returns all values of a curve."""
        epochs = self.epoch_at
        return [Score(value, step, epochs.get(step, -1) + 1) for step, value in self.curves.get(tag, [])]

    @property
    def progress(self) -> str:
        """Describes the last evaluation in a sentence."""
        score = self.score(EVALUATED)
        if score is None:
            return f"its {CURVES} has no evaluation"
        epochs = mapping(self.config.get("trainer")).get("max_epochs") or -1
        return (
            f"its last evaluation is that of epoch {score.epoch}{f' of {epochs}' * (epochs > 0)}, step {score.step + 1}"
        )

    @property
    def command(self) -> str:
        """Command that resumes the run."""
        return resume_command(run_config(self.folder))

    def check_complete(self, way: str = "") -> None:
        """Raises a `UserError` if the run is not finished, with the command that resumes it and another `way`."""
        if not self.complete:
            start = f"the run '{self.folder}' is not finished: {self.progress}. Resume it with"
            raise UserError(f"{start}\n  {self.command}{way}")

    @property
    def best(self) -> list[str]:
        """Names of its best checkpoint, the preferred one first; see `best_checkpoints`."""
        return best_checkpoints(self.model.get("predict_with", "raw"))

    def is_best(self, source: str | Path) -> bool:
        """Returns True if a source is its folder or its best checkpoint, whose scores are the scores of the run."""
        return Path(source).is_dir() or Path(source).name == self.best[0]

    def score_tag(self, given: str | None = None) -> str:
        """Returns the curve of scores: `val/score`, or that of the moving average where the task predicts with it."""
        averaged = self.model.get("predict_with") == "ema"
        return given or ("val/ema_score" if averaged else "val/score")

    def untrained(self, score: Score) -> float:
        """Returns the share of the initial weights in the moving average at a score; 0 without an average."""
        decay = self.model.get("ema_decay")
        return 0.0 if decay is None else float(decay ** (score.step + 1))

    def options(self) -> dict[str, Any]:
        """Returns options of the configuration except `PER_RUN` and the weights of the previous stage."""
        stage = re.compile(rf"stage_\d+/{re.escape(self.folder.parent.name)}/version_")
        found = {key: value for key, value in flat(self.config).items() if key not in PER_RUN}
        return {key: value for key, value in found.items() if not (key == SOURCE and stage.search(str(value)))}


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping in a file that a run has written."""
    return yaml_text.mapping(path, yaml_text.load_with_tuples)


def newest(folder: Path, *, students: bool = True) -> RunFolder | None:
    """Returns the newest run `version_N` in a folder, with or without those that have learned from a teacher."""
    runs = (RunFolder(run) for run in reversed(versions(folder)) if (run / CONFIG).exists())
    return next((run for run in runs if students or not run.model.get("teacher")), None)


def best_checkpoints(predict_with: str) -> list[str]:
    """Returns names of the best checkpoint of a run that predicts with these weights, the preferred one first."""
    return [BEST_AVERAGE] * (predict_with == "ema") + [BEST]


def find(folders: Iterable[Path]) -> list[RunFolder]:
    """Returns the runs in folders; each folder is a run, or contains runs at any depth."""
    found: dict[Path, RunFolder] = {}
    for folder in folders:
        configs = sorted(files(folder, CONFIG))
        if not configs:
            raise UserError(f"'{folder}' contains no run: the folder of a run has a {CONFIG}, such as NAME/version_0")
        found |= {path.parent.resolve(): RunFolder(path.parent) for path in configs}
    return list(found.values())


def files(folder: Path, name: str) -> Iterator[Path]:
    """Yields files of a name below a folder, except those of preliminary runs (tuning, earlier stages) in it."""
    return (path for path in folder.rglob(name) if not PRELIMINARY.search(path.relative_to(folder).as_posix()))


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as dotted names, without `init_args`; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def run_name(configs: Sequence[str | Path]) -> str:
    """Returns the name of a run: that of its last configuration outside `base/`, or, in a run's folder, of the run."""
    if not configs:
        return "unnamed"
    parts = CONFIGS / "base"
    files = {config: (find_config(str(config)) or Path(config)).resolve() for config in reversed(configs)}
    last = next((config for config, file in files.items() if not file.is_relative_to(parts)), configs[-1])
    folder = Path(last).absolute().parent
    return folder.parent.name if is_run(folder) else Path(last).stem


def run_of_config(configs: Sequence[str | Path]) -> Path | None:
    """Returns the run folder that contains the last configuration; None if it is not in one."""
    folder = Path(configs[-1]).absolute().parent if configs else Path()
    return folder if is_run(folder) else None


def is_run(folder: Path) -> bool:
    """Returns True for the folder of a run, `version_N`, also if it was renamed."""
    return bool(VERSION.fullmatch(folder.name)) or ((folder / HPARAMS).is_file() and (folder / CHECKPOINTS).is_dir())


def versions(folder: Path) -> list[Path]:
    """Returns the run folders `version_N` in a folder, sorted by number."""
    found = [path for path in folder.glob("version_*") if VERSION.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=_number)


def next_version(folder: Path) -> int:
    """Returns the number of the next run in a folder."""
    return max(map(_number, versions(folder)), default=-1) + 1


def claim_version(folder: Path) -> int:
    """Creates the folder of the next run, atomically, and returns its number: no other process gets the same one."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        number = next_version(folder)
        with suppress(FileExistsError):
            (folder / f"version_{number}").mkdir()
            return number


def _number(version: Path) -> int:
    return int(version.name.removeprefix("version_"))


def run_of_checkpoint(checkpoint: str | Path) -> Path | None:
    """Returns the run folder `.../NAME/version_N` that is or contains a checkpoint; None if there is none."""
    path = Path(checkpoint).absolute()
    folder = path if (path / CHECKPOINTS).is_dir() else path.parent.parent
    return folder if is_run(folder) else None


def run_configs(run: Path) -> list[Path]:
    """Returns the configurations with which a run was started and resumed, sorted by the steps in their names."""
    found = {int(match[1]): path for path in run.glob("*.yaml") if (match := RESUMED.fullmatch(path.name))}
    return [run / CONFIG, *(found[step] for step in sorted(found))]


def run_config(run: Path) -> Path:
    """Returns the configuration with which a run was started or last resumed."""
    return run_configs(run)[-1]


def how_to_resume(run: Path, command: str | None = None) -> str:
    """Returns how to resume a run that was interrupted, or how to start it again if it has saved no checkpoint.

    For verbs other than fit, `command` replaces the command of the run.
    """
    if not run_config(run).exists():
        return ""
    saved = any((run / CHECKPOINTS).glob("*.ckpt"))
    how = "resume" if saved else "no checkpoint was saved; start again"
    return f"{how} with\n  {command or RunFolder(run).command}"


def check_finished(model: Path, verb: str) -> None:
    """Raises a `UserError` for the folder of an unfinished run; its checkpoints may be given instead."""
    folder = model / CHECKPOINTS
    if folder.is_dir():
        there = [folder / name for name in (*RunFolder(model).best, LAST) if (folder / name).exists()]
        RunFolder(model).check_complete(
            "".join(f"\nor name the checkpoint to {verb}, such as {path}" for path in there[:1])
        )


def mapping(part: Any) -> dict[str, Any]:
    """Returns a part of a configuration; an empty mapping if it is something else, as in a file of another program."""
    return part if isinstance(part, dict) else {}


def read_curves(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Returns the steps of a metrics.csv with the values logged at each, by tag, as text; empty if there is no file."""

    def parse(row: Mapping[str, str]) -> tuple[int, dict[str, str]]:
        if not re.fullmatch("[0-9]{1,18}", row["step"]):
            raise ValueError(f"{row['step'][:20]!r} is not a step")
        values = {tag: text for tag, text in row.items() if tag != "step" and text}
        for text in values.values():
            float(text)
        return int(row["step"]), values

    return read_csv(path, "step", parse) if path.exists() else []


def finite_or_none(value: float) -> float | None:
    """Returns a number as stored in a record: NaN and infinity become None."""
    return value if math.isfinite(value) else None
