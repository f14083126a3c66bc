"""Reading the files of a training run: its configuration, its hyper-parameters and its curves."""

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from linvit import yaml_text
from linvit.errors import UserError

CONFIG, CURVES, HPARAMS = "config.yaml", "metrics.csv", "hparams.yaml"
PER_RUN = ("seed_everything", "ckpt_path", "trainer.default_root_dir", "trainer.enable_progress_bar")
"""Options that may differ between the runs of one variant."""


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
    def fraction(self) -> float:
        """How much of its epochs, or else of its steps, a run has done, as far as its curves tell: 0 to 1."""
        trainer = self.config.get("trainer", {})
        epochs, steps = trainer.get("max_epochs"), trainer.get("max_steps")
        done = max((epoch for _, epoch in self.curves.get("epoch", [])), default=-1) + 1
        if steps and steps > 0:
            step = max((points[-1][0] for points in self.curves.values()), default=-1) + 1
            return min(1.0, float(step / steps))
        return min(1.0, float(done / epochs)) if epochs and epochs > 0 else 0.0

    def score_tag(self, given: str | None = None) -> str:
        """The curve of scores: `val/score`, of the moving average where the task predicts with that."""
        averaged = _model(self.config).get("predict_with") == "ema"
        return given or ("val/ema_score" if averaged else "val/score")

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
