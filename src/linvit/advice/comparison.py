"""Rows of one size that are measured in turns: rivals, mechanisms, and networks that lose quality."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import nn

from linvit.advice.bench import MOST_TURNS, TURNS, Bench, Context, Way
from linvit.advice.bench import reason as reason_of
from linvit.advice.ceiling import InterceptedAttention
from linvit.advice.mechanisms import placements, specs_of
from linvit.advice.subject import cores_of, find_subject, without_cores
from linvit.advice.verdict import JUDGED, SIEVE, UNCHANGED, Measured, Row, state_of
from linvit.backbones.replace_attention import softmax_blocks
from linvit.errors import quote_first
from linvit.experiments.bench.builders import spec_label
from linvit.experiments.measure import Turns
from linvit.registry import Spec
from linvit.registry.layouts import is_layout, window_side

WINDOW = 14  # largest side of windows, in patches


class Comparison:
    """Adds rows to a size and measures them in at most about so many seconds, at least one row of each kind.

    Args:
        bench: Builds and measures networks.
        size: Gets rows and notes.
        way: Execution of softmax, and of all rows but the unchanged network.
        seconds: Time limit.
    """

    def __init__(self, bench: Bench, size: Measured, way: Way, seconds: float) -> None:
        self.bench, self.size, self.way, self.end = bench, size, way, bench.now() + seconds
        self.turns = Turns[str](bench.settings.device, bench.clock)
        self.network = bench.network(size.img_size, way.dtype)
        self.bare = without_cores(bench.subject, self.network, size.img_size)
        self.blocks = len(cores_of(self.bare))
        self.softmax = softmax_blocks(self.network) == self.blocks
        self.left_out = list[str]()

    @property
    def window(self) -> int | None:
        """Side of windows; None for a pyramid, and for grids that are one window."""
        grids = {core.grid for core in cores_of(self.bare)}
        if len(grids) != 1 or any(grid.kv_size is not None for grid in grids):
            return None
        length = max(next(iter(grids)).size)
        return window_side(length) if length > WINDOW else None

    def add(
        self,
        row: Row,
        build: Callable[[], nn.Module],
        img_size: tuple[int, int] | None = None,
        way: Way | None = None,
        around: Context = nullcontext,
    ) -> None:
        """Adds a row, or a note if its network cannot be built or run."""
        try:
            network = build()
        except Exception as error:
            row.note = reason_of(error)
        else:
            self.bench.add(self.turns, row, network, img_size or self.size.img_size, way or self.way, around)
        if row.note:
            self.size.notes.append(f"{self.size.size}: {row.name}: {row.note}")
        else:
            self.size.rows.append(row)

    def replace(self, row: Row, specs: Sequence[Any]) -> None:
        """Adds a row of the network with other attention, a spec per block."""
        row.attention = list(specs)
        self.add(row, lambda: self.bench.subject.with_attention(self.network, specs, self.size.img_size))

    def add_rivals(self, ways: Sequence[Row], intercepted: bool) -> None:
        """Adds the network as it is, executed at its best, without cores, fused, and with softmax in windows."""
        self.add(Row(UNCHANGED, "now"), lambda: self.bench.network(self.size.img_size), way=Way())
        if self.way != Way():
            self.add(Row(self.way.label, "softmax"), lambda: self.network)
        around: Context = InterceptedAttention if intercepted else nullcontext
        ceiling = Row("no attention (the ceiling)", "ceiling")
        self.add(ceiling, lambda: self.bare, way=self.way._replace(backend=None), around=around)
        calls_sdpa = "softmax, math" in self.bench.slow or any(row.name.startswith("softmax, math") for row in ways)
        if self.blocks and not calls_sdpa:
            self.replace(Row("softmax, fused", "softmax"), ["softmax"] * self.blocks)
        if self.window and self.blocks > 4:
            layout = {"layout": "vitdet", "window": self.window}
            row = Row("softmax in windows, 4 global blocks", "windows")
            self.replace(row, specs_of(layout, self.blocks, self.softmax))

    def fits(self, calls: float) -> bool:
        """Returns True if these rows with their turns, and `calls` of the unchanged network, fit the time."""
        seconds = self.bench.calls
        costs = [seconds[row.name] for row in self.size.rows if row.kind != "mechanism"]
        own = sorted(seconds[row.name] for row in self.size.rows if row.kind == "mechanism")
        turned = (SIEVE + TURNS) * sum(costs) + SIEVE * sum(own) + TURNS * sum(own[:JUDGED])
        return self.bench.now() + self.bench.pace * (turned + calls * seconds.get(UNCHANGED, 0.0)) < self.end

    def add_mechanisms(self, specs: Sequence[Spec]) -> None:
        """Adds layouts, then each mechanism in all blocks, then each in the next placement, while there is time."""
        layouts = [spec for spec in specs if is_layout(spec)]
        rows = [(spec_label(spec), spec_label(spec), specs_of(spec, self.blocks, self.softmax)) for spec in layouts]
        others = [spec for spec in specs if not is_layout(spec)]
        each = [placements(spec, self.blocks, self.softmax, self.window) for spec in others]
        rows += [row for same in zip(*each, strict=True) for row in same]
        for name, placement, chosen in rows:
            if not any(row.kind == "mechanism" for row in self.size.rows) or self.fits(2 + SIEVE):
                self.replace(Row(name, "mechanism", placement=placement, sieved=True), chosen)
            else:
                self.left_out.append(name)

    def add_cheaper(self, small: str | None) -> None:
        """Adds softmax at three quarters of the sides, and a smaller model, while there is time."""
        subject, settings, img_size = self.bench.subject, self.bench.settings, self.size.img_size
        step = subject.multiple
        height, width = (max(1, round(0.75 * side / step)) * step for side in img_size)
        rows = [Row(f"softmax at {height} x {width}", "loses quality", img_size=(height, width))]
        rows += [Row(f"softmax, {small}", "loses quality", model=small)] if small else []

        def build(row: Row) -> nn.Module:
            made = find_subject(row.model).build(img_size) if row.model else subject.build((height, width))
            return made.to(settings.device, self.way.dtype or settings.weights)

        for row in rows if (height, width) != img_size else rows[1:]:
            if self.fits(2 + SIEVE + TURNS):
                self.add(row, partial(build, row), row.img_size)
            else:
                self.left_out.append(row.name)

    def take_turns(self) -> None:
        """Measures all rows in two turns, then rivals and the quickest mechanisms until the answer is known."""
        bench, size, turns = self.bench, self.size, self.turns
        if self.left_out:
            names = quote_first(self.left_out)
            size.notes.append(f"{size.size}: no time for {len(self.left_out)} rows ({names}): more --minutes")
        for _ in range(SIEVE):
            bench.round(turns, size.rows, size.size)
        mechanisms = sorted((row for row in size.rows if row.kind == "mechanism"), key=lambda row: row.median)
        everything = bench.now() + bench.pace * TURNS * sum(row.median for row in size.rows) < self.end
        rivals = [row for row in size.rows if row.kind != "mechanism"]
        going = [*rivals, *(mechanisms if everything else mechanisms[:JUDGED])]
        for turn in range(MOST_TURNS):
            if turn == TURNS:
                going = [row for row in going if row.kind != "loses quality"]
            if turn >= TURNS and (bench.now() > self.end or state_of(size) in ("pays", "loses")):
                break
            bench.round(turns, going, size.size)
