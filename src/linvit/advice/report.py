"""Advice as text, JSON and an HTML page."""

import json
import math
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from linvit.advice.subject import Subject
from linvit.advice.verdict import SIEVE, Measured, Row, Verdict, milliseconds
from linvit.experiments.measure import Estimate
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.io.files import write_text
from linvit.io.terminal import reflow, table

HEAD = [
    "size",
    "row",
    "softmax blocks",
    "time",
    "95 % interval",
    "turns",
    "memory",
    "share of the ceiling's gain",
    "score",
]
ABOUT = (
    "Times are medians of turns in which all rows of a size take part, each turn beginning with another. Speed-ups are "
    "medians of ratios within a turn with 95 % intervals by ranks. The ceiling is the network whose attention returns "
    "a copy of v: no attention between the same projections is faster. Rows that lose quality (fewer pixels, a smaller "
    "model, no attention) decide nothing. Counted is 1 + FLOPs of the cores of attention over all others."
)


@dataclass
class Advice:
    """Result of `linvit.advise`.

    Attributes:
        subject: The network.
        conditions: Under which it was measured.
        sizes: All rows, by image size.
        verdict: The answer.
        smaller: timm's next smaller model, or "none found".
        stopped: Why the measurement ended early; "" if it did not.
        quality: What scores are; "" if quality was not measured.
    """

    subject: Subject
    conditions: dict[str, str]
    sizes: list[Measured] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict("undecided", "Undecided: nothing was measured."))
    smaller: str = ""
    stopped: str = ""
    quality: str = ""
    intercepted: bool = False
    ways: list[tuple[tuple[int, int], Row]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Returns the sentence, then the table."""
        parts = [reflow(self.verdict.sentence)]
        if self.stopped:
            parts.append(f"({self.stopped}: the table has the results so far)")
        last = -1 if self.quality else -2
        rows = [(*row[:2], row[3].replace(" ms", ""), row[last], "") for row in self.rows()]
        parts += ["", *table([("size", "row", "ms", HEAD[last], ""), *rows])]
        if self.quality:
            parts.append(reflow(f"score: {self.quality}"))
        if self.smaller == "none found":
            parts.append("smaller model of the family: none found (--smaller NAME names one)")
        parts += ["", *(reflow(f"{name}: {value}") for name, value in self.conditions.items())]
        parts += [reflow(f"note: {note}") for note in self.all_notes()]
        if self.verdict.winner:
            parts += ["", self.commands()]
        return "\n".join(parts)

    def all_notes(self) -> list[str]:
        """Notes on rows and sizes that were not measured, with reasons."""
        return [*self.notes, *(note for size in self.sizes for note in size.notes)]

    def rows(self) -> list[list[str]]:
        """Returns all rows under `HEAD`, as text."""
        found = []
        for size in self.sizes:
            others = [row for at, row in self.ways if at == size.img_size]
            for row in [*(size.rows or size.ceiling.values()), *others]:
                share = size.share(row) if row.kind == "mechanism" else None
                found.append(
                    [
                        size.size,
                        row.name,
                        "" if row.softmax_blocks is None else str(row.softmax_blocks),
                        milliseconds(row.median),
                        _interval(row.spread(), 1e3, " ms"),
                        str(len(row.seconds)),
                        "" if row.peak is None else f"{row.peak / 2**20:,.0f} MiB",
                        "" if share is None or not share.samples else f"{share.median:.0%}{_percent(share)}",
                        "" if row.score is None else f"{row.score.mean:.3f}",
                    ]
                )
        return found

    def commands(self) -> str:
        """Returns Python code that builds the winner, and the command that trains it."""
        winner, size = self.verdict.winner, self.verdict.from_size
        if winner is None or size is None:
            return ""
        side: Any = size[0] if size[0] == size[1] else size
        code = self.subject.code.replace("{size}", str(side))
        attention: Any = winner.attention or []
        attention = attention[0] if all(spec == attention[0] for spec in attention) else attention
        train = ["linvit", "linearize", "--teacher", self.subject.teacher]
        train += (
            ["--data.source=IMAGES"] if self.subject.teacher.startswith(("timm:", "hf:")) else []
        )  # a run has its own
        train += [f"--model.attention={attention if isinstance(attention, str) else json.dumps(attention)}"]
        train += [] if size == self.subject.own else [f"--data.img_size={json.dumps(side)}"]
        train += ["--data.token_budget=null", "--data.max_tokens=null"] if self.subject.several_sizes else []
        return (
            f"import linvit, timm\n\nmodel = {code}\n"
            f"linvit.replace_attention(model, {attention!r}, img_size={side})\n"
            f"# train it: {shlex.join(train) if self.subject.teacher else 'docs/guides/linearize.md'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain values; estimates are [median, low, high, samples], seconds are per call."""
        sizes = []
        for size in self.sizes:
            rows = [asdict(row) | {"share": size.share(row)} for row in size.rows]
            sizes.append(
                {"img_size": size.img_size, "tokens": size.tokens, "counted": size.counted, "room": size.room}
                | {"ceiling": {kind: asdict(row) for kind, row in size.ceiling.items()}, "rows": rows}
                | {"ways": [asdict(row) for at, row in self.ways if at == size.img_size], "notes": size.notes}
            )
        verdict = asdict(self.verdict)
        verdict["winner"] = self.verdict.winner.name if self.verdict.winner else None
        return {"model": self.subject.name, "verdict": verdict, "conditions": self.conditions, "sizes": sizes} | {
            "smaller": self.smaller,
            "stopped": self.stopped,
            "quality": self.quality or "not measured",
            "sieve_turns": SIEVE,
            "commands": self.commands(),
        }

    def paper_row(self) -> str:
        """Returns a row of a Markdown table, with all conditions."""
        said = "; ".join(f"{name} {value}" for name, value in self.conditions.items())
        return f"| {self.subject.name} | {self.verdict.sentence} | {said} |"

    def plot(self) -> str:
        """Plots score over time as SVG, if there are scores; else time over the image size, of judged rows."""
        curves: dict[str, list[tuple[float, float]]] = {}
        for size in self.sizes:
            rows = size.rows or [*size.ceiling.values()]
            judged = [row for row in rows if row.kind != "mechanism" or row in size.candidates]
            for row in judged:
                name = row.name.partition(" at ")[0] if row.kind == "loses quality" else row.name
                name = f"{name}, 0.75 x the side" if name != row.name else name
                curves.setdefault(name, []).append((float(size.img_size[0]), 1e3 * row.median))
        scored = [row for size in self.sizes for row in size.rows if row.score]
        if scored:
            points = [(1e3 * row.median, row.score.mean) for row in scored if row.score]
            front = [Series(row.name, (point,)) for row, point in zip(scored, points, strict=True)]
            x, y = Axis("ms per call", True), Axis(self.quality.partition(" (")[0])
            return line_plot(self.subject.name, front, x, y, self._note(), front=True)
        series = [Series(name, tuple(points)) for name, points in curves.items()]
        ticks = tuple(float(size.img_size[0]) for size in self.sizes)
        axes = Axis("image side", True, ticks), Axis("ms per call", True)
        return line_plot(self.subject.name, series, *axes, self._note())

    def _note(self) -> str:
        return f"{self.conditions.get('machine', '')}; {self.conditions.get('settings', '')}"

    def page(self) -> Page:
        """Returns the page: sentence, picture, table, conditions, commands."""
        page = Page(f"Does another attention pay for {self.subject.name}?")
        page.paragraph(self.verdict.sentence)
        if self.stopped:
            page.paragraph(f"The measurement was {self.stopped}.")
        if any(size.ceiling for size in self.sizes):
            page.pictures(
                [(self.plot(), "Score over time" if self.quality else "Time per call over the side of the image")]
            )
        bounds = [[size.size, f"{size.tokens:,}", f"{size.counted:.2f}x", _times(size.room)] for size in self.sizes]
        page.table(["size", "tokens", "at most, counted", "at most, measured"], bounds, "Faster without attention")
        page.table(HEAD, self.rows(), ABOUT)
        if self.smaller:
            page.paragraph(f"Next smaller model of the family: {self.smaller}.")
        page.paragraph(f"Score: {self.quality}." if self.quality else "Quality was not measured.")
        for note in self.all_notes():
            page.paragraph(note)
        if self.verdict.winner:
            page.heading("Build the winner")
            page.code(self.commands())
        page.heading("Conditions")
        page.table(["", ""], list(self.conditions.items()))
        page.code(self.paper_row())
        return page

    def write(self, folder: Path) -> None:
        """Writes `advise.json` and `advise.html`; the folder is made."""
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / "advise.json", json.dumps(_finite(self.to_dict()), indent=1) + "\n")
        self.page().write(folder / "advise.html")


def _interval(one: Estimate, factor: float, unit: str) -> str:
    return f"{factor * one.low:.3g} to {factor * one.high:.3g}{unit}" if math.isfinite(one.high) else ""


def _percent(one: Estimate) -> str:
    return f" ({100 * one.low:.0f} to {100 * one.high:.0f})" if math.isfinite(one.high) else ""


def _times(one: Estimate) -> str:
    if not one.samples:
        return "not measured"
    return f"{one.median:.2f}x" + (f" ({one.low:.2f} to {one.high:.2f})" if math.isfinite(one.high) else "")


def _finite(value: Any) -> Any:
    """Replaces infinity and NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
