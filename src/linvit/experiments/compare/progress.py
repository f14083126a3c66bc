"""Progress over all runs of an experiment, with the time that is left."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from tqdm import tqdm

from linvit.experiments.compare.sweep_run import SweepRun

LOOK = 2.0  # seconds between two looks at the curves of running runs


class Progress:
    """A bar in a terminal, and a line for each run that has ended.

    Args:
        runs: All runs, those that are finished included.
        say: Prints a line.
    """

    def __init__(self, runs: Sequence[SweepRun], say: Callable[[str], None] = tqdm.write) -> None:
        self._runs, self._say = runs, say
        self._start, self._looked = time.monotonic(), -math.inf
        self._done = {run.name: run.fraction() for run in runs}
        self._first = self._sum
        self._bar = tqdm(
            total=len(runs), initial=self._first, unit="run", disable=None, dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n:.1f} of {total} runs{postfix}",
        )  # fmt: skip

    @property
    def _sum(self) -> float:
        return math.fsum(self._done.values())

    def left(self) -> str:
        """The time that is left, as far as the runs so far tell."""
        gained = self._sum - self._first
        if gained <= 0:
            return ""
        seconds = (len(self._runs) - self._sum) * (time.monotonic() - self._start) / gained
        return f"about {timedelta(seconds=round(seconds))} left"

    def __call__(self, ended: SweepRun | None) -> None:
        """Looks at the running runs; says how a run has ended."""
        if ended is None and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for run in self._runs:
            if self._done[run.name] < 1:
                self._done[run.name] = run.fraction()
        if ended is not None:
            self._say(self._line(ended))
        self._bar.n = self._sum
        self._bar.set_postfix_str(self.left())

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()

    def _line(self, run: SweepRun) -> str:
        finished = sum(other.state == "finished" for other in self._runs)
        how = f"{run.state} after {timedelta(seconds=round(run.seconds))}"
        begun = run.newest
        last = begun.score(begun.score_tag()) if begun is not None else None
        score = f", {begun.score_tag()} {last.value:.4f} of epoch {last.epoch}" if begun is not None and last else ""
        words = f": {run.last_words()} ({run.log})" if run.state == "failed" else score
        left = self.left() if finished < len(self._runs) else ""
        return f"{run.name} {how}{words}; {finished} of {len(self._runs)} runs{', ' * bool(left)}{left}"
