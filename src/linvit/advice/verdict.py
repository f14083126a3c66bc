"""The verdict on a network: a pure function of measured rows, so that it can be tested without timing anything."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from linvit.experiments.measure import Estimate, Timing

ROOM = 1.15
"""Speed-up below which a network has no room for another attention."""
JUDGED = 3
"""Mechanisms per size whose interval is judged: three one-sided errors of 1.6 % (six turns) are less than 5 %."""
SIEVE = 2
"""Turns by which rows are chosen. They are left out of the turns that judge the chosen ones."""
UNCHANGED = "the unchanged network"
"""Name of the row of the network as it is."""
RESAMPLES = 1000
KEPT = 0.9
"""Share of the unchanged network's score below which a mechanism does not count."""
BUSY = 1.2
"""Clock over processor time above which a machine is busy."""

Kind = Literal["now", "softmax", "windows", "ceiling", "mechanism", "loses quality"]
Answer = Literal["no", "room", "yes", "undecided"]


@dataclass
class Score:
    """Quality of a network after training, on images that were held out.

    Attributes:
        values: By image, the same images for all rows: 1 where the class is right, else 0; or a cosine.
        agreement: Share of images whose nearest other one is that of the unchanged network; None with labels.
        steps: Of training.
        trained: Seconds of training.
    """

    values: list[float]
    agreement: float | None = None
    steps: int = 0
    trained: float = 0.0

    @property
    def mean(self) -> float:
        """The score."""
        return sum(self.values) / len(self.values)

    def over(self, other: "Score") -> Estimate:
        """Returns the difference to another score, with its 95 % interval by a paired bootstrap over images."""
        draws, count = random.Random(0), len(self.values)
        differences = [a - b for a, b in zip(self.values, other.values, strict=True)]
        means = sorted(sum(draws.choices(differences, k=count)) / count for _ in range(RESAMPLES))
        cut = round(0.025 * RESAMPLES)
        return Estimate(sum(differences) / count, means[cut], means[-1 - cut], count)


@dataclass
class Row:
    """A network that was measured at one size.

    Attributes:
        kind: "now", as it is; "softmax", the same executed in another way; "windows"; "ceiling", without the cores of
            its attention; "mechanism", with another attention; "loses quality", a rival that has to be scored.
        softmax_blocks: Blocks with softmax attention; None where it is not known.
        placement: Blocks that have the mechanism, such as "last 2"; "" for other rows.
        sieved: True if the first turns have chosen this row, so that they do not count for its intervals.
        img_size: Size of its images if it is another than that of the other rows.
        model: Name of a smaller model.
    """

    name: str
    kind: Kind
    softmax_blocks: int | None = None
    seconds: list[float] = field(default_factory=list)
    sieved: bool = False
    peak: int | None = None  # bytes
    compile_seconds: float | None = None
    note: str = ""
    attention: list[object] | None = None  # specs, one per block
    img_size: tuple[int, int] | None = None
    model: str = ""
    score: Score | None = None
    placement: str = ""

    @property
    def median(self) -> float:
        """Seconds; NaN if it was not measured."""
        return Timing(tuple(self.seconds)).median if self.seconds else math.nan

    def spread(self) -> Estimate:
        """Seconds with their interval."""
        return Estimate.of(self.seconds)


@dataclass
class Measured:
    """All rows of one size.

    Attributes:
        counted: Speed-up without cores if time goes with FLOPs.
        ceiling: Rows "now" and "ceiling" in the precision and execution that were asked for, measured alone.
        rows: Rows that were measured together, rivals and mechanisms.
    """

    img_size: tuple[int, int]
    counted: float
    tokens: int = 0
    ceiling: dict[str, Row] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> str:
        """The size as one writes it."""
        height, width = self.img_size
        return f"{height} x {width}"

    @property
    def room(self) -> Estimate:
        """Time as it is over time without the cores of attention."""
        if not {"now", "ceiling"} <= self.ceiling.keys():
            return Estimate.of([])
        return ratio(self.ceiling["now"], self.ceiling["ceiling"])

    @property
    def rivals(self) -> list[Row]:
        """Softmax attention in all ways that keep the quality, and in windows."""
        return [row for row in self.rows if row.kind in ("now", "softmax", "windows") and row.seconds]

    @property
    def candidates(self) -> list[Row]:
        """Mechanisms that are judged, the quickest of the first turns first."""
        measured = [row for row in self.rows if row.kind == "mechanism" and len(row.seconds) > SIEVE]
        return sorted(measured, key=lambda row: Timing(tuple(row.seconds[:SIEVE])).median)[:JUDGED]

    @property
    def best_rival(self) -> Row | None:
        """The quickest rival."""
        return min(self.rivals, key=lambda row: row.median, default=None)

    def share(self, row: Row) -> Estimate | None:
        """Returns the share of the ceiling's gain that a row reaches; None where there may be no room."""
        rows = {each.kind: each for each in self.rows if each.kind in ("now", "ceiling")}
        softmax = [each for each in self.rows if each.kind == "softmax" and each.seconds]
        now = min((rows.get("now"), *softmax), key=lambda one: one.median if one and one.seconds else math.inf)
        if now is None or "ceiling" not in rows or not ratio(now, rows["ceiling"]).low >= ROOM:
            return None
        parts = zip(judged(now), judged(row), judged(rows["ceiling"]), strict=False)
        return Estimate.of([(a - b) / (a - c) for a, b, c in parts if a > c])


@dataclass
class Verdict:
    """An answer with its reasons.

    Attributes:
        answer: "no"; "room", the ceiling is above `ROOM`; "yes", a mechanism is quicker than all rivals; "undecided".
        from_size: Smallest size (H, W) from which on the answer is "room" or "yes".
        below: Largest size below it that was measured and is not.
        winner: The row that wins at the largest size that was measured.
    """

    answer: Answer
    sentence: str
    from_size: tuple[int, int] | None = None
    below: tuple[int, int] | None = None
    winner: Row | None = None


def judged(row: Row) -> list[float]:
    """Seconds of the turns that judge."""
    return row.seconds[SIEVE:]


def ratio(slow: Row, quick: Row) -> Estimate:
    """Returns the speed-up of the second row over the first, by ratios within a turn."""
    first = SIEVE if slow.sieved or quick.sieved else 0
    return Timing(tuple(slow.seconds[first:])).over(Timing(tuple(quick.seconds[first:])))


def room_of(size: Measured) -> Literal["open", "closed", "unclear"]:
    """Returns the state of the ceiling: "closed" if at most 15 % can be gained, "open" if more, else "unclear"."""
    room = size.room
    return "closed" if room.high < ROOM else "open" if room.low >= ROOM else "unclear"


def gain(size: Measured, candidate: Row) -> Estimate:
    """Returns the speed-up of a mechanism over the rival that is nearest to it."""
    return min((ratio(rival, candidate) for rival in size.rivals), key=lambda one: one.median)


def state_of(size: Measured) -> Literal["closed", "pays", "loses", "open", "unclear"]:
    """Returns the state of a size: "pays" or "loses" if mechanisms were judged beside rivals, else that of its room."""
    if not size.candidates or not size.rivals:
        return room_of(size)
    gains = [[ratio(rival, one) for rival in size.rivals] for one in size.candidates]
    if any(all(each.low > 1 for each in own) for own in gains):
        return "pays"
    if all(any(each.high < 1 for each in own) for own in gains):
        return "loses"
    return room_of(size)


def decide(name: str, sizes: Sequence[Measured], busy: float = 1.0) -> Verdict:
    """Returns the verdict on a network from its measurements.

    Args:
        name: Name of the network.
        sizes: Measurements at each size, in any order; sizes without a ceiling do not count.
        busy: Clock over processor time, about 1 on an idle machine.
    """
    known = sorted((one for one in sizes if one.room.samples), key=lambda one: math.prod(one.img_size))
    if not known:
        counted = "; ".join(f"{one.counted:.2f}x at {one.size}" for one in sizes)
        return Verdict("undecided", f"Undecided. {name}: no size was measured. Counted: at most {counted}.")
    states = [state_of(one) for one in known]
    load = f" The machine was busy: clock {busy:.1f} x processor time." if busy > BUSY else ""
    last = max((i for i, one in enumerate(known) if one.candidates), default=-1)
    first = next((i for i in range(last + 1) if all(state == "pays" for state in states[i : last + 1])), None)
    if first is not None and "closed" not in states[last:]:
        return _yes(name, known, first, last, states, load)
    if all(state == "closed" for state in states):
        said = "; ".join(_ceiling(one) for one in known)
        return Verdict("no", f"No. {name}: {said}. No attention can make it more than 15 % faster here.{load}")
    if all(state in ("closed", "loses") for state in states):
        return _beaten(name, known, states, load)
    open_at = [i for i in range(len(known)) if all(state in ("open", "pays", "loses") for state in states[i:])]
    if open_at and states[-1] != "loses":
        return _room(name, known, open_at[0], states, load)
    return _undecided(name, known, states, busy)


def decide_by_score(name: str, size: Measured, about: str, load: str = "") -> Verdict:
    """Returns the verdict at a size whose rows have scores: does a mechanism stand on the front of score over time?

    It must be faster than the unchanged network, keep most of its score, and no rival may be both as fast and as good.
    All of this must hold by the intervals, of ratios within turns and of a paired bootstrap over images.
    """
    scored = [row for row in size.rows if row.score]
    now = next(row for row in scored if row.kind == "now")
    rivals = [row for row in scored if row.kind in ("now", "softmax", "windows", "loses quality")]
    found: list[Row] = []
    beaten: list[tuple[Row, Row | None]] = []
    mechanisms = [row for row in scored if row.kind == "mechanism"]
    for row in mechanisms:
        faster = ratio(now, row)
        worse = _of(row).mean < KEPT * _of(now).mean or faster.high < 1
        better = [one for one in rivals if ratio(row, one).low >= 1 and _of(one).over(_of(row)).low > 0]
        if worse or better:
            beaten.append((row, better[0] if better else None))
        elif faster.low > 1 and all(ratio(one, row).low > 1 or _of(row).over(_of(one)).low > 0 for one in rivals):
            found.append(row)
    at = f"{size.size}. {name}"
    if found:
        winner = max(found, key=lambda row: _of(row).mean)
        said = f"{winner.name} is {_times(ratio(now, winner))} as fast as {now.name}; {_loss(winner, now, about)}"
        sentence = f"Yes at {at}: {said}. No rival is as fast and as good.{load}"
        return Verdict("yes", sentence, size.img_size, None, winner)
    if len(beaten) == len(mechanisms):
        best = max(beaten, key=lambda pair: _of(pair[0]).mean)
        if best[1] is None:
            said = f"{best[0].name}, the best mechanism, is {_times(ratio(now, best[0]))} as fast"
            said += f" as {now.name}; {_loss(best[0], now, about)}"
        else:
            said = f"{best[1].name} is {_times(ratio(best[0], best[1]))} as fast as {best[0].name}, the best "
            said += f"mechanism; {_loss(best[1], best[0], about)}"
        return Verdict("no", f"No at {at}: {said}.{load}")
    open_ones = [row for row in mechanisms if all(row is not pair[0] for pair in beaten)]
    best_row = max(open_ones, key=lambda row: _of(row).mean)
    said = f"{best_row.name} is {_times(ratio(now, best_row))} as fast as {now.name}; {_loss(best_row, now, about)}"
    sentence = f"Undecided at {at}: {said}, within the noise of a rival. More --hours and --minutes may decide.{load}"
    return Verdict("undecided", sentence)


def _of(row: Row) -> Score:
    assert row.score is not None
    return row.score


def _loss(row: Row, other: Row, about: str) -> str:
    change = _of(row).over(_of(other))
    values = f"{_of(row).mean:.3f} against {_of(other).mean:.3f}"
    return f"{about.partition(' (')[0]} {values} ({change.median:+.3f}, {change.low:+.3f} to {change.high:+.3f})"


def _yes(name: str, sizes: Sequence[Measured], first: int, last: int, states: Sequence[str], load: str) -> Verdict:
    parts = []
    for size in (sizes[first], sizes[last])[: 1 + (first < last)]:
        winner = max(size.candidates, key=lambda one: gain(size, one).low)
        rival = min(size.rivals, key=lambda one: ratio(one, winner).median)
        parts.append(f"at {size.size} {winner.name} is {_times(gain(size, winner))} as fast as {rival.name}")
    below = sizes[first - 1] if first else None
    if below is None:
        edge = "It is the smallest size that was measured."
    elif not below.candidates and states[first - 1] != "closed":
        edge = f"At {below.size} no mechanism was measured; more --minutes measure it."
    elif states[first - 1] in ("loses", "closed"):
        edge = f"At {below.size} it does not pay."
    else:
        edge = f"At {below.size} it is undecided."
    if last < len(sizes) - 1:
        edge += f" Above {sizes[last].size} no mechanism was measured; more --minutes measure it."
    winner = max(sizes[last].candidates, key=lambda one: gain(sizes[last], one).low)
    sentence = f"Yes from {sizes[first].size}. {name}: {'; '.join(parts)}. {edge} Quality not measured.{load}"
    return Verdict("yes", sentence, sizes[first].img_size, below.img_size if below else None, winner)


def _beaten(name: str, known: Sequence[Measured], states: Sequence[str], load: str) -> Verdict:
    said = []
    for size in (one for one, state in zip(known, states, strict=True) if state == "loses"):
        rival, best = size.best_rival, min(size.candidates, key=lambda one: one.median)
        assert rival is not None
        said.append(f"at {size.size} {rival.name} is {_times(ratio(best, rival))} as fast as {best.name}, the best")
    return Verdict("no", f"No. {name}: {'; '.join(said)} mechanism.{load}")


def _room(name: str, known: Sequence[Measured], first: int, states: Sequence[str], load: str) -> Verdict:
    said = ", ".join(f"{_times(one.room)} at {one.size}" for one in known[first:])
    compared = any(one.candidates for one in known[first:])
    why = (
        "Mechanisms and rivals are within the noise of one another; more --minutes may decide."
        if compared
        else "No mechanism was measured beside the rivals; more --minutes measure them."
    )
    below = known[first - 1] if first else None
    return Verdict(
        "room",
        f"Room from {known[first].size}. {name}: at most {said}. {why}{load}",
        known[first].img_size,
        below.img_size if below else None,
    )


def _undecided(name: str, known: Sequence[Measured], states: Sequence[str], busy: float) -> Verdict:
    said = []
    for size, state in zip(known, states, strict=True):
        width = (size.room.high - size.room.low) / size.room.median
        doubt = f"uncertain by {width:.0%}" if math.isfinite(width) else f"{size.room.samples} turns, six are needed"
        told = {"pays": "another attention pays", "loses": "no other attention pays", "closed": "no room"}.get(state)
        said.append(f"at {size.size} {told or f'{size.room.median:.2f}x, counted {size.counted:.2f}x, {doubt}'}")
    way = f"Clock {busy:.1f} x processor time: repeat on an idle machine" if busy > BUSY else "Give it more --minutes"
    return Verdict("undecided", f"Undecided. {name}: {'; '.join(said)}. {way}.")


def _ceiling(size: Measured) -> str:
    now, without = size.ceiling["now"].median, size.ceiling["ceiling"].median
    return (
        f"at {size.size} {milliseconds(without)} without attention, {milliseconds(now)} with it "
        f"({size.room.median:.2f}x, counted {size.counted:.2f}x)"
    )


def _times(one: Estimate) -> str:
    ends = f" ({one.low:.3g} to {one.high:.3g})" if one.samples and math.isfinite(one.high) else ""
    return f"{one.median:.3g}x{ends}"


def milliseconds(seconds: float) -> str:
    """Formats three digits, as "194 ms"."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{1e3 * seconds:,.0f} ms"
