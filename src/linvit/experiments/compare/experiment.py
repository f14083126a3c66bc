"""An experiment in its folder: the grid, its runs, and their results."""

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from linvit.errors import UserError
from linvit.experiments.compare.grid import UNSAFE, Sweep, value_label
from linvit.experiments.compare.options import differing
from linvit.experiments.compare.results import Results, Variant, with_teachers
from linvit.io.files import CHECKPOINTS, is_locked, lock, write_text
from linvit.io.reading import read_text
from linvit.io.signals import STOP
from linvit.registry.removed import OPTIONS, without_removed
from linvit.runs.folder import CONFIG, OUTCOME, PER_RUN, TUNING, RunFolder, flat, read_yaml, versions

FILE = "compare.yaml"  # the grid, in the folder of an experiment

State = Literal["waiting", "stopped", "failed", "finished"]


class SweepRun:
    """One run of an experiment, in a folder `VARIANT-seedN` with its configuration, log, and `version_N`.

    The folder's name is that of the run's curves in TensorBoard, and that of its complete configuration.
    """

    def __init__(self, folder: Path, variant: str, seed: int) -> None:
        self.folder, self.variant, self.seed, self.name = folder, variant, seed, folder.name
        self.config, self.log = folder / f"{folder.name}.yaml", folder / "log.txt"

    @property
    def newest(self) -> RunFolder | None:
        """The newest run folder with its configuration, if the run has started; students of it may be beside it."""
        runs = [RunFolder(run) for run in versions(self.folder)[::-1] if (run / CONFIG).exists()]
        if len(runs) < 2 or not self.config.exists():
            return next(iter(runs), None)
        own = flat(read_yaml(self.config))
        return min(runs, key=lambda run: len(differing([own, flat(run.config)])))

    @property
    def command(self) -> list[str]:
        """Command that starts or resumes the run; with several stages, all but the last have separate folders."""
        arguments = ["--config", str(self.config), f"--trainer.default_root_dir={self.folder.parent}", "--resume=auto"]
        verb = ["linearize", "--no_page"] if read_yaml(self.config).get("stages") else ["fit"]
        return [sys.executable, "-m", "linvit", *verb, *arguments]

    @property
    def state(self) -> State:
        """Outcome of its last process: "waiting" if none has ended, "stopped" if the run is not finished."""
        state: State = self._outcome().get("state", "waiting")
        if state == "finished" and (begun := self.newest) is not None and not begun.complete:
            return "stopped"
        return state

    @property
    def busy(self) -> bool:
        """True if a process left by a killed command is still saving."""
        checkpoints = None if self.newest is None else self.newest.folder / CHECKPOINTS
        return checkpoints is not None and checkpoints.is_dir() and is_locked(checkpoints)

    @property
    def seconds(self) -> float:
        """Seconds that all its processes together have taken."""
        return float(self._outcome().get("seconds", 0.0))

    def prepare(self, config: dict[str, Any]) -> None:
        """Writes its configuration."""
        config = {**config, "seed_everything": self.seed}
        if self.config.exists():
            before = without_removed(read_yaml(self.config), f"'{self.config}'")
            both = [flat(before), flat(config)]
            if different := {key: found for key, found in differing(both).items() if key not in PER_RUN}:
                key, (was, now) = next(iter(different.items()))
                more = f" and {len(different) - 1} more options" if len(different) > 1 else ""
                raise UserError(
                    f"'{self.folder}' is a run of another configuration: its {key} is {was!r}, and now it would be "
                    f"{now!r}{more}. Give this comparison another name with --name, or delete that folder"
                )
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(self.config, yaml.safe_dump(config, sort_keys=False))

    def check_folder(self) -> None:
        """Raises a `UserError` if the folder was renamed or deleted since it was made."""
        if not self.folder.is_dir():
            raise UserError(
                f"'{self.folder}' was renamed or deleted while linvit compare was running, so it ends. Give it back "
                f"its name, then repeat the command, which starts the missing runs"
            )

    def ended(self, code: int, seconds: float) -> State:
        """Records the exit code of a process, and the seconds it has taken."""
        self.check_folder()
        stopped = STOP.received is not None or STOP.is_exit_code(code)
        state: State = "finished" if code == 0 else "stopped" if stopped else "failed"
        outcome = {"state": state, "exit_code": code, "seconds": round(self.seconds + seconds, 1)}
        write_text(self.folder / OUTCOME, json.dumps(outcome))
        return state

    def last_words(self) -> str:
        """Returns the signal that ended its process, or else the last error in its log, or its last line."""
        code = self._outcome().get("exit_code", 0)
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        text = read_text(self.log, errors="replace") if self.log.exists() else ""
        lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing was printed"]
        errors = [number for number, line in enumerate(lines) if "error:" in line.lower()]
        last = errors[-1] if errors else len(lines) - 1
        return " ".join(lines[last : last + 3]).removeprefix("linvit: error: ")  # one of an option has three lines

    def _outcome(self) -> dict[str, Any]:
        try:
            content = json.loads(read_text(self.folder / OUTCOME))
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}


@dataclass(frozen=True)
class Experiment:
    """A grid, and the folder of its runs, whose name is the experiment's."""

    root: Path
    grid: Sweep

    @classmethod
    def of(cls, root: Path) -> "Experiment | None":
        """Returns the experiment in this folder; None if there is none."""
        file = root / FILE
        if not file.exists():
            return None
        content = {key: value for key, value in read_yaml(file).items() if f"compare.{key}" not in OPTIONS}
        return cls(root, Sweep.read(content, f"'{file}'").grid())

    @property
    def runs(self) -> list[SweepRun]:
        """All runs, seed by seed, so that a comparison over few seeds is available early."""
        return [self.run(variant, seed) for seed in self.grid.all_seeds for variant in self.grid.variants]

    def run(self, variant: str, seed: int) -> SweepRun:
        """Returns the run of a variant with a seed; each tuned value, such as `-lr0.002`, has a separate run."""
        settings = self.grid.variants[variant]
        tuned = "".join(f"-{value_label(key, settings[key])}" for key in self.grid.tune if key in settings)
        return SweepRun(self.root / f"{variant}{UNSAFE.sub('-', tuned)}-seed{seed}", variant, seed)

    def prepare(self, configs: Mapping[str, dict[str, Any]]) -> None:
        """Writes the grid and the complete configuration of each variant; keeps other processes out meanwhile."""
        try:
            lock(self.root)
        except UserError as error:
            raise UserError(f"another linvit compare is running in '{self.root}'. Wait for its end") from error
        for run in self.runs:
            run.prepare(configs[run.variant])
        self.save()

    def save(self) -> None:
        """Writes the grid."""
        content = {key: value for key, value in asdict(self.grid).items() if value not in (None, {})}
        write_text(self.root / FILE, yaml.safe_dump(content, sort_keys=False))

    def results(self) -> Results:
        """Results of the finished runs."""
        grid, scores = self.grid, self.grid.published.get("scores", {})
        variants = [Variant(name, published=scores.get(name)) for name in grid.variants]
        for variant in variants:
            for seed in grid.all_seeds:
                run = self.run(variant.name, seed)
                begun, state = run.newest, run.state
                if begun is not None:
                    variant.runs[seed] = begun
                if state == "failed":
                    variant.trouble[seed] = f"it failed: {run.last_words()} ({run.log})"
                elif state != "finished":
                    variant.trouble[seed] = "it has not begun" if begun is None else begun.progress
        tuning = self.of(self.root / TUNING) if grid.tune else None
        tuned = [] if tuning is None else tuning.results().variants
        results = Results(
            self.root.name,
            variants,
            grid.baseline or "",
            grid.score,
            grid.keys,
            source=str(grid.published.get("source", "")),
            tuned=grid.tune,
            unscored=[one.name for one in tuned if not one.scores(grid.score)],
        )
        return with_teachers(results)
