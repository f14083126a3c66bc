"""Reading the files of a training run: its configuration, its hyper-parameters and its curves."""

import csv
import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from linvit import yaml_text
from linvit.errors import UserError

CONFIG, CURVES, HPARAMS = "config.yaml", "metrics.csv", "hparams.yaml"
EVALUATED = "val/score"
"""The curve that every evaluation adds to."""
PER_RUN = ("seed_everything", "ckpt_path", "trainer.default_root_dir", "trainer.enable_progress_bar")
"""Options that may differ between the runs of one variant."""


class Score(NamedTuple):
    """The last value of a curve of scores.

    Attributes:
        value: The score.
        step: Optimiser step at which it was logged, from 0.
        epoch: Epochs that had been trained, counted from 1; 0 if the curves do not say.
    """

    value: float
    step: int
    epoch: int


@dataclass(frozen=True)
class Run:
    """A run that has begun to train.

    Attributes:
        folder: `.../NAME/version_N`, which has the files.
    """

    folder: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The complete configuration, of a resumed run that with which it went on last."""
        newest = max(self.folder.glob("config*.yaml"), key=lambda path: path.stat().st_mtime_ns)
        return read_yaml(newest)

    @cached_property
    def hparams(self) -> dict[str, Any]:
        """Arguments of the task, the facts of the data included."""
        return read_yaml(self.folder / HPARAMS) if (self.folder / HPARAMS).exists() else {}

    @cached_property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Steps and values by tag, finite values only."""
        found: dict[str, list[tuple[int, float]]] = {}
        if not (self.folder / CURVES).exists():
            return found
        with (self.folder / CURVES).open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file, restval=""):
                for tag, text in row.items():
                    if tag != "step" and _finite(text) and row["step"].isdigit():
                        found.setdefault(tag, []).append((int(row["step"]), float(text)))
        return found

    @property
    def seed(self) -> int:
        """Of the run."""
        return int(self.config.get("seed_everything") or 0)

    @property
    def epochs(self) -> int | None:
        """The epochs that its configuration asks for; None if steps, a time or `EarlyStopping` may end it before."""
        trainer = self._trainer
        epochs, steps, callbacks = (trainer.get(key) for key in ("max_epochs", "max_steps", "callbacks"))
        others = (steps or -1) >= 0 or trainer.get("max_time") or "EarlyStopping" in str(callbacks)
        return None if others or epochs is None or epochs < 0 else int(epochs)

    @property
    def fraction(self) -> float:
        """How much of its epochs, or else of its steps, a run has evaluated: 0 to 1."""
        score = self.score(EVALUATED)
        if score is None:
            return 0.0
        steps, epochs = self._trainer.get("max_steps") or -1, self._trainer.get("max_epochs") or -1
        done, all_of_it = (score.step + 1, steps) if steps > 0 else (score.epoch, epochs)
        return min(1.0, done / all_of_it) if all_of_it > 0 else 0.0

    @property
    def complete(self) -> bool:
        """Whether the run's last evaluation is in its curves, which a kill may have cut off."""
        if self.score(EVALUATED) is None:
            return False
        trained = max((int(epoch) + 1 for _, epoch in self.curves.get("epoch", [])), default=0)
        seen = max(curve[-1][0] for curve in self.curves.values()) + 1
        steps, epochs = self._trainer.get("max_steps") or -1, self._trainer.get("max_epochs") or -1
        if steps > 0:
            return self.evaluated(None, steps) or (epochs > 0 and self.evaluated(epochs, steps))
        wanted = trained if self.epochs is None else self.epochs
        return trained >= wanted and self.evaluated(wanted, seen)

    def evaluated(self, epochs: int | None, steps: int) -> bool:
        """Whether the evaluation that follows upon so many whole epochs, or that many steps have, is in the curves.

        Args:
            epochs: Epochs that have been trained to their end; None if that is not known.
            steps: Optimiser steps, which count where evaluations do not follow epochs.
        """
        every = self._trainer.get("check_val_every_n_epoch", 1)
        if self._trainer.get("limit_val_batches") == 0:
            return True
        score = self.score(EVALUATED)
        if epochs is not None and every:
            return epochs < every or (score is not None and score.epoch >= epochs - epochs % every)
        if score is None:
            return True  # its steps may end before the first evaluation
        before = [-1, *(step for step, _ in self.curves[EVALUATED])][-2]
        return 2 * score.step - before >= steps  # where the next one would be

    def score(self, tag: str) -> Score | None:
        """The last value of a curve; None if there is none."""
        curve = self.curves.get(tag)
        if not curve:
            return None
        step, value = curve[-1]
        return Score(value, step, int(dict(self.curves.get("epoch", [])).get(step, -1)) + 1)

    @property
    def progress(self) -> str:
        """How far it was evaluated, as a sentence."""
        score = self.score(EVALUATED)
        if score is None:
            return f"there is no evaluation in its {CURVES}"
        epochs = self._trainer.get("max_epochs") or -1
        return (
            f"its last evaluation is that of epoch {score.epoch}{f' of {epochs}' * (epochs > 0)}, step {score.step + 1}"
        )

    @property
    def command(self) -> str:
        """The command that continues it."""
        return f"linvit fit --config {shlex.quote(str(self.folder / CONFIG))} --resume=auto"

    @property
    def _trainer(self) -> dict[str, Any]:
        return self.config.get("trainer") or {}

    def score_tag(self, given: str | None = None) -> str:
        """The curve of scores: `val/score`, of the moving average where the task predicts with that."""
        averaged = _model(self.config).get("predict_with") == "ema"
        return given or ("val/ema_score" if averaged else "val/score")

    def untrained(self, score: Score) -> float:
        """The part that the initial weights have in the moving average at a score; 0 without an average."""
        decay = _model(self.config).get("ema_decay")
        return 0.0 if decay is None else float(decay ** (score.step + 1))

    def options(self) -> dict[str, Any]:
        """The configuration as options of the command line, without those that may differ between seeds."""
        return {key: value for key, value in flat(self.config).items() if key not in PER_RUN}


def read_yaml(path: Path) -> dict[str, Any]:
    """A mapping that a run has written.

    Raises:
        UserError: If it is none.
    """
    try:
        content = yaml_text.load_with_tuples(yaml_text.read(path), f"'{path}'")
    except (yaml.YAMLError, OSError) as error:
        raise UserError(f"'{path}' cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is no configuration of a run")
    return content


def newest(folder: Path) -> Run | None:
    """The newest run `version_N` in a folder."""
    found = [path.parent for path in folder.glob(f"version_*/{CONFIG}")]
    numbered = [path for path in found if path.name.removeprefix("version_").isdigit()]
    return max(map(Run, numbered), key=lambda run: int(run.folder.name.removeprefix("version_")), default=None)


def find(folders: Iterable[Path]) -> list[Run]:
    """The runs in folders: each is the folder of a run, or has such folders below it.

    Raises:
        UserError: If a folder has none.
    """
    found: dict[Path, Run] = {}
    for folder in folders:
        configs = sorted(folder.rglob(CONFIG))
        if not configs:
            raise UserError(f"there is no run in '{folder}': a run's folder has a {CONFIG}, such as NAME/version_0")
        found |= {path.parent.resolve(): Run(path.parent) for path in configs}
    return list(found.values())


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names, without `init_args`; a list is one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        name = prefix if key == "init_args" else f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and value:
            found |= flat(value, name)
        else:
            found[name] = value
    return found


def differing(options: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The options in which configurations differ, with the value of each configuration; `None` where it has none."""
    every = list(options)
    names = dict.fromkeys(name for one in every for name in one)
    values = {name: [one.get(name) for one in every] for name in names}
    return {name: found for name, found in values.items() if any(value != found[0] for value in found)}


def covered(name: str, keys: Iterable[str]) -> bool:
    """Whether an option is one of `keys`, or a part of one, or has one as a part."""
    return any(name == key or name.startswith(f"{key}.") or key.startswith(f"{name}.") for key in keys)


def outermost(names: Iterable[str]) -> list[str]:
    """Names of options without those that are a part of another one: `model.attention`, not `model.attention.name`."""
    every = list(dict.fromkeys(names))
    return [name for name in every if not any(name.startswith(f"{other}.") for other in every)]


def shown(options: Mapping[str, Any], name: str) -> str:
    """The value of an option, or its parts, such as `focused, dwc=False`; "-" if there is none."""
    parts = {key[len(name) + 1 :]: value for key, value in options.items() if key.startswith(f"{name}.")}
    own = [str(parts.pop("name"))] if "name" in parts else []
    return ", ".join([*own, *(f"{part}={value}" for part, value in parts.items())]) or (
        "-" if options.get(name) is None else str(options[name])
    )


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = (config.get("model") or {}).get("init_args") or {}
    return options


def _finite(text: str | None) -> bool:
    try:
        return bool(text) and math.isfinite(float(text or ""))
    except ValueError:
        return False
