"""Progress over all cells of an experiment, with the time that is left."""

import math
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from tqdm import tqdm

from linvit.experiments.compare.cells import Cell

LOOK = 2.0  # seconds between two looks at the curves of running cells


class Progress:
    """A bar in a terminal, and a line for each cell that has ended.

    Args:
        cells: All cells, those that are finished included.
        say: Prints a line.
    """

    def __init__(self, cells: Sequence[Cell], say: Callable[[str], None] = tqdm.write) -> None:
        self._cells, self._say = cells, say
        self._start, self._looked = time.monotonic(), -math.inf
        self._done = {cell.name: cell.fraction() for cell in cells}
        self._first = self._sum
        self._bar = tqdm(
            total=len(cells), initial=self._first, unit="run", disable=None, dynamic_ncols=True,
            bar_format="{percentage:3.0f}%|{bar}| {n:.1f} of {total} runs{postfix}",
        )  # fmt: skip

    @property
    def _sum(self) -> float:
        return math.fsum(self._done.values())

    def left(self) -> str:
        """The time that is left, as far as the cells so far tell."""
        gained = self._sum - self._first
        if gained <= 0:
            return ""
        seconds = (len(self._cells) - self._sum) * (time.monotonic() - self._start) / gained
        return f"about {timedelta(seconds=round(seconds))} left"

    def __call__(self, ended: Cell | None) -> None:
        """Looks at the running cells; says how a cell has ended."""
        if ended is None and time.monotonic() - self._looked < LOOK:
            return
        self._looked = time.monotonic()
        for cell in self._cells:
            if self._done[cell.name] < 1:
                self._done[cell.name] = cell.fraction()
        if ended is not None:
            self._say(self._line(ended))
        self._bar.n = self._sum
        self._bar.set_postfix_str(self.left())

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()

    def _line(self, cell: Cell) -> str:
        finished = sum(other.state == "finished" for other in self._cells)
        how = f"{cell.state} after {timedelta(seconds=round(cell.seconds))}"
        run = cell.run
        last = run.score(run.score_tag()) if run is not None else None
        score = f", {run.score_tag()} {last.value:.4f} of epoch {last.epoch}" if run is not None and last else ""
        words = f": {cell.last_words()} ({cell.log})" if cell.state == "failed" else score
        left = self.left() if finished < len(self._cells) else ""
        return f"{cell.name} {how}{words}; {finished} of {len(self._cells)} runs{', ' * bool(left)}{left}"
