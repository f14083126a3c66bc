"""Progress over all runs of an experiment, with the time that is left."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from tqdm import tqdm

from linvit.experiments.compare.experiment import SweepRun

EVERY = 2.0  # seconds between two readings of the curves of runs


class Progress:
    """A bar in a terminal, and a line for each run that has ended.

    Args:
        runs: All runs, those that are finished included.
        say: Prints a line.
    """

    def __init__(self, runs: Sequence[SweepRun], say: Callable[[str], None] = tqdm.write) -> None:
        self._runs, self._say = runs, say
        self._read = time.monotonic()
        self._parts = {run.name: run.fraction() for run in runs}
        self._bar = tqdm(
            total=len(runs), initial=math.fsum(self._parts.values()), unit="run", disable=None, dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n:.1f} of {total} runs, {remaining} left",
        )  # fmt: skip

    def __call__(self, ended: SweepRun | None) -> None:
        """Reads how far the runs are; says how a run has ended."""
        if ended is None and time.monotonic() - self._read < EVERY:
            return
        self._read = time.monotonic()
        self._parts |= {run.name: run.fraction() for run in self._runs if self._parts[run.name] < 1}
        if ended is not None:
            self._say(self._line(ended))
        self._bar.n = math.fsum(self._parts.values())
        self._bar.refresh()

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()

    def _line(self, run: SweepRun) -> str:
        finished = sum(other.state == "finished" for other in self._runs)
        how, begun = f"{run.state} after {timedelta(seconds=round(run.seconds))}", run.newest
        score = begun.score(begun.score_tag()) if begun is not None else None
        if run.state == "failed":
            how += f": {run.last_words()} ({run.log})"
        elif begun is not None and score is not None:
            how += f", {begun.score_tag()} {score.value:.4f} of epoch {score.epoch}"
        return f"{run.name} {how}; {finished} of {len(self._runs)} runs"
