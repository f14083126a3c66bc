"""An experiment in its folder: the grid, its runs, and what they amount to."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from linvit.errors import UserError
from linvit.experiments.compare.grid import Sweep, SweepSpec
from linvit.experiments.compare.results import Results, Variant
from linvit.experiments.compare.sweep_run import SweepRun
from linvit.files import lock, replacing, unlock
from linvit.runs.folder import read_yaml

FILE = "compare.yaml"
"""The grid of an experiment, in its folder."""


@dataclass(frozen=True)
class Experiment:
    """A grid and the folder of its runs.

    Attributes:
        root: The folder, whose name is the experiment's.
        grid: What is compared.
    """

    root: Path
    grid: Sweep

    @classmethod
    def of(cls, root: Path) -> "Experiment | None":
        """The experiment whose folder this is, if it is one."""
        file = root / FILE
        return cls(root, SweepSpec.read(read_yaml(file), f"'{file}'").grid()) if file.exists() else None

    @property
    def runs(self) -> list[SweepRun]:
        """All runs, those of one seed together, so that a comparison over few seeds is there early."""
        return [SweepRun(self.root, variant, seed) for seed in self.grid.seeds for variant in self.grid.variants]

    def prepare(self, configs: Mapping[str, dict[str, Any]]) -> None:
        """Writes the grid and the configurations of all runs; keeps other processes out until this one ends.

        Args:
            configs: The complete configuration of each variant.

        Raises:
            UserError: If runs of other configurations are there, or processes that train them.
        """
        try:
            lock(self.root)
        except UserError as error:
            raise UserError(f"another linvit compare is running in '{self.root}'. Wait for its end") from error
        for run in self.runs:
            run.prepare(configs[run.variant])
            begun = run.newest
            if begun is not None and run.state != "finished":
                _check_free(run, begun.folder / "checkpoints")
        with replacing(self.root / FILE) as file:
            file.write(yaml.safe_dump(self._content(), sort_keys=False).encode())

    def results(self) -> Results:
        """What the runs that have been run amount to."""
        published = self.grid.published
        variants = [Variant(name) for name in self.grid.variants]
        for variant in variants:
            variant.published = published.scores.get(variant.name) if published else None
            for seed in self.grid.seeds:
                run = SweepRun(self.root, variant.name, seed)
                begun, state = run.newest, run.state
                if begun is not None:
                    variant.runs[seed] = begun
                if state == "failed":
                    variant.trouble[seed] = f"it failed: {run.last_words()} ({run.log})"
                elif state != "finished":
                    variant.trouble[seed] = "it has not begun" if begun is None else begun.progress
        source = published.source if published else ""
        return Results(self.root.name, variants, self.grid.baseline, self.grid.score, self.grid.keys, source)

    def _content(self) -> dict[str, Any]:
        """The grid as a file describes it."""
        grid = self.grid
        spec = SweepSpec(
            config=list(grid.configs),
            set=dict(grid.settings),
            variants={name: dict(settings) for name, settings in grid.variants.items()},
            seeds=list(grid.seeds),
            baseline=grid.baseline,
            score=grid.score,
            published=asdict(grid.published) if grid.published else {},
        )
        return {key: value for key, value in asdict(spec).items() if value not in (None, {})}


def _check_free(run: SweepRun, folder: Path) -> None:
    if folder.is_dir():
        try:
            lock(folder)
        except UserError as error:
            raise UserError(
                f"the run '{run.name}' is still being trained, by a process that an earlier linvit compare has left. "
                f"Wait for its end, or end it"
            ) from error
        unlock(folder)
