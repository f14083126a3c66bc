"""Records of runs of any machines as tables and Pareto fronts, one for each data set; the same records, the same files.

A row is a configuration on its data: mean and spread over the seeds of its runs. Latency and memory are those that
`linvit compare` has measured of that configuration. Each machine has a column, a plot and a front of its own.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from linvit.callbacks.report import write_table
from linvit.errors import UserError
from linvit.experiments.compare.results import differing, option_text, outermost
from linvit.experiments.compare.statistics import spread
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.files import replacing
from linvit.plain_text import markdown_table, printable
from linvit.runs import result
from linvit.runs.folder import CONFIG, COSTS, CURVES, RESULT, RunFolder, shown

NAME = "leaderboard"
SCRIPT = Path(__file__).with_suffix(".js")
"""Sorts a table by the column whose title is clicked, and hides rows that lack a word of the box at the top."""
FRONTS, NO_BREAK = "on the front of", "\u00a0"
NAMED = ("model.backbone", "model.head", "model.attention")
LONGEST, SHORT = 60, 36  # characters that one option adds to the name of a row, and of a row in a plot
AXES = {
    "parameters": ("parameters (M)", 1e6),
    "macs": ("MACs (M)", 1e6),
    "latency_seconds": ("latency {} (ms)", 1e-3),
    "memory_bytes": ("memory {} (MiB)", 2.0**20),
}
NOTES = (
    "Score: of the last epoch, mean and standard deviation over seeds. Best: the highest of all epochs, chosen by the "
    "set that scores it. Test: by linvit test. Front: the costs over which no other run has at least the score of a "
    "row for at most its cost. Published figures were not measured here: they are in no front, and hollow in plots. "
    "Latency is that of a forward pass per image, in batches of two, and memory that of a forward and a backward pass "
    "of two, both by linvit compare; those of two machines (M1, M2) are never in one front."
)


class Row(NamedTuple):
    """A configuration on its data; or what its authors published of it, if `published` says where."""

    configuration: str  # in words
    score: float  # mean over seeds
    deviation: float | None
    seeds: int | None
    best: float | None
    test: float | None
    costs: dict[str, float]  # by axis, such as "latency M1 (ms)"
    published: str = ""


class Section(NamedTuple):
    """The rows of one data set, the best first."""

    title: str
    facts: str  # of the data
    rows: list[Row]

    @property
    def axes(self) -> list[str]:
        """Over which there are fronts."""
        return list(dict.fromkeys(axis for row in self.rows for axis in row.costs))

    def fronts(self, row: Row) -> list[str]:
        """The costs on whose front a row is: no other that was trained has at least its score for at most its cost."""

        def beaten(axis: str) -> bool:
            own = row.costs[axis], -row.score
            others = [(one.costs[axis], -one.score) for one in self.rows if axis in one.costs and not one.published]
            return any(x <= own[0] and y <= own[1] and (x, y) != own for x, y in others)

        return [axis.partition(" (")[0] for axis in row.costs if not row.published and not beaten(axis)]

    def cells(self, number: int, row: Row) -> dict[str, Any]:
        """By the titles of columns; rows are counted from 1."""
        cells = {"configuration": row.configuration, "row": number, "score": row.score}
        cells |= {"±": row.deviation, "seeds": row.seeds}
        cells |= {"best": row.best, "test": row.test, **{axis: row.costs.get(axis) for axis in self.axes}}
        return cells | {FRONTS: ", ".join(self.fronts(row)), "published": row.published}


class Leaderboard(NamedTuple):
    """Sections, machines by the names that they have there, and what is left out, and why."""

    sections: list[Section]
    machines: dict[str, str]
    measured: list[str]  # when, and at which load
    left_out: list[str]


def collect(folders: Sequence[Path]) -> Leaderboard:
    """Reads records in files and below folders; a run without one, of an older linvit, says what its folder tells."""
    runs: list[dict[str, Any]] = []
    measured: list[dict[str, Any]] = []
    left_out: list[str] = []
    for path in sorted({path.resolve() for folder in folders for path in _files(folder)}):
        try:
            if path.name == COSTS:
                measured.append(result.read(path, result.COSTS_FIELDS))
            else:
                runs.append(_record(path))
        except Exception as error:  # files of any content
            kind = "" if isinstance(error, UserError) else f"'{path}' cannot be read: {type(error).__name__}: "
            left_out.append(f"{kind}{error}")
    kept: dict[Any, dict[str, Any]] = {}
    for record in sorted(runs, key=_order):
        key = _place(record), record["configuration"], record["seed"]
        if key in kept and kept[key]["score"] != record["score"]:
            left_out.append(f"{kept[key]['run']}: a newer run has its configuration, data and seed")
        kept[key] = record
    wheres = sorted({_where(one) for one in measured})
    machines = {where: f"M{number}" for number, where in enumerate(wheres, 1)}
    costs: dict[str, dict[str, float]] = {}
    for one in sorted(measured, key=lambda one: (_where(one), *_order(one))):
        for configuration, found in one["costs"].items():
            costs.setdefault(configuration, {}).update(_axes(found, machines[_where(one)]))
    places = sorted({place for place, *_ in kept})
    sections = [_section(place, [one for key, one in kept.items() if key[0] == place], costs) for place in places]
    when = [
        f"{machines[_where(one)]}: measured {{date}}, load {{load}}".format(**one["conditions"]) for one in measured
    ]
    return Leaderboard(sections, {name: where for where, name in machines.items()}, sorted({*when}), left_out)


def write(board: Leaderboard, folder: Path) -> str:
    """Writes `leaderboard.md`, `.csv` and `.html` into a folder, which is made; returns the tables as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    page, parts = Page("Leaderboard", SCRIPT.read_text(encoding="utf-8")), ["# Leaderboard"]
    numbers: list[dict[str, Any]] = []
    for section in board.sections:
        cells = [section.cells(number, row) for number, row in enumerate(section.rows, 1)]
        titles = [title for title in cells[0] if any(one.get(title) for one in cells)]
        table = [[_text(title, one.get(title)) for title in titles] for one in cells]
        page.heading(section.title)
        page.paragraph(section.facts)
        spaces = [NO_BREAK if title == FRONTS else " " for title in titles]
        page.table(titles, [[c.replace(" ", space) for c, space in zip(row, spaces, strict=True)] for row in table])
        page.pictures([(_plot(section, axis, board), f"score over {axis}") for axis in section.axes], 460)
        parts += [f"## {section.title}", printable(section.facts, lines=False), markdown_table([titles, *table])]
        numbers += [{"data": section.title, "facts": section.facts, **one} for one in cells]
    for note in (NOTES, *(f"{name}: {where}" for name, where in board.machines.items()), *board.measured):
        page.paragraph(note)
        parts.append(note)
    columns = list(dict.fromkeys(name for one in numbers for name in one))
    head = [_in_full(name, board.machines) for name in columns]
    write_table(folder / f"{NAME}.csv", [head, *([one.get(name) for name in columns] for one in numbers)])
    page.write(folder / f"{NAME}.html")
    with replacing(folder / f"{NAME}.md") as file:
        file.write("\n\n".join([*parts, ""]).encode())
    return "\n\n".join(parts[1:])


def _files(folder: Path) -> Iterator[Path]:
    """Records, measured costs, and configurations of runs that have no record."""
    if not folder.exists():
        raise UserError(f"there is no '{folder}': name run folders, folders of them, or files {RESULT} and {COSTS}")
    if folder.is_file():
        yield folder
    for name in (RESULT, COSTS, CONFIG):
        yield from (path for path in folder.rglob(name) if name != CONFIG or not path.with_name(RESULT).exists())


def _record(path: Path) -> dict[str, Any]:
    """The record of a run; a `UserError` if it is not finished, as after a resume."""
    run, own = RunFolder(path.parent), path.name == CONFIG
    known = own or all(path.with_name(name).exists() for name in (CONFIG, CURVES))  # a record may have come alone
    if known and not run.complete:
        raise UserError(f"{shown(run.folder)} is not finished: {run.progress}. Continue it with: {run.command}")
    return result.derive(run) if own else result.read(path)


def _place(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What the records of one section have in common: the data, the task, and what it calls its score."""
    data, options = record["data"], record["options"]
    task, metric = (str(options.get(f"model.{name}") or "") for name in ("class_path", "score"))
    return data["name"], data["fingerprint"] or "unknown", task.rpartition(".")[2], metric


def _order(one: Mapping[str, Any]) -> tuple[str, str]:
    """By date, and then by content: the order of folders does not matter."""
    return (one["conditions"] or {}).get("date", ""), json.dumps(one, sort_keys=True)


def _where(one: Mapping[str, Any]) -> str:
    """The machine, and what else times depend on."""
    where = "{machine}; {device}; threads: {threads}; {versions}".format(**one["conditions"])
    return printable(where, lines=False)


def _axes(found: Mapping[str, float | None], machine: str = "") -> dict[str, float]:
    """Costs by the names of axes, in their units."""
    known = ((*AXES[name], cost) for name in AXES if (cost := found.get(name)) is not None)
    return {title.format(machine): cost / unit for title, unit, cost in known}


def _section(place: Sequence[str], records: Sequence[dict[str, Any]], costs: Mapping[str, dict[str, float]]) -> Section:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        groups.setdefault(record["configuration"], []).append(record)
    keys = [*NAMED, *outermost(differing(own[0]["options"] for own in groups.values()))]
    names = {configuration: _name(own[0]["options"], keys) for configuration, own in groups.items()}
    rows = []
    for configuration, own in groups.items():
        name = names[configuration]
        name += printable(f", {configuration[:6]}", lines=False) * ([*names.values()].count(name) > 1)
        found = _axes(own[0]["costs"]) | costs.get(configuration, {})
        scores, tag = [one["score"]["final"] for one in own], own[0]["score"]["tag"].replace("val/", "test/")
        tests = [one["test"]["scores"] for one in own if one["test"] and one["test"]["split"] == "test"]
        test = [one[tag] for one in tests if tag in one]
        deviation, best = spread(scores) if len(own) > 1 else None, statistics.fmean(o["score"]["best"] for o in own)
        mean = statistics.fmean(scores), deviation, len(own), best, statistics.fmean(test) if test else None
        rows.append(Row(name, *mean, found))
        if told := own[0]["published"]:
            source = f"{told['metric']}: {told['source']}"
            rows.append(Row(f"{name} (published)", told["score"], None, None, None, None, found, source))
    data = records[0]["data"]
    facts = [f"{name} {number:,.0f} images" for name, number in sorted(data["images"].items())]
    facts += [f"{data['classes']} classes", f"fingerprint {place[1]}"]
    title = printable(", ".join(filter(None, [place[0], *place[2:]])), lines=False)
    return Section(title, ", ".join(facts), sorted(rows, key=lambda row: (-row.score, row.configuration)))


def _name(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Backbone, head and attention, and by their names the other options that differ."""
    texts = {key: printable(option_text(options, key), lines=False)[:LONGEST] for key in keys}
    named = {key: text if key in NAMED else f"{key.rpartition('.')[2]}={text}" for key, text in texts.items()}
    return ", ".join(named[key] for key, text in texts.items() if text != "-")


def _text(title: str, cell: Any) -> str:
    """How a cell is read."""
    if cell is None or isinstance(cell, str):
        return cell or "-"
    if title in ("score", "±", "best", "test"):
        return f"{cell:.4f}"
    return f"{cell:.3g}" if cell < 100 else f"{cell:,.0f}"


def _in_full(column: str, machines: Mapping[str, str]) -> str:
    """A title of the CSV file, which has no other place for the machine."""
    name, space, unit = column.rpartition(" (")
    kind, _, machine = name.partition(" ")
    return f"{kind} on {machines[machine]}{space}{unit}" if machine in machines else column


def _plot(section: Section, axis: str, board: Leaderboard) -> str:
    series = []
    for number, row in enumerate(section.rows, 1):
        if (cost := row.costs.get(axis)) is not None:
            bar = row.score - (row.deviation or 0), row.score + (row.deviation or 0)
            name, label = f"{number}: {row.configuration}"[:SHORT], (str(number),)
            series.append(Series(name, ((cost, row.score),), (bar,), label, bool(row.published)))
    costs = [x for one in series for x, _ in one.points]
    machine = board.machines.get(axis.partition(" (")[0].rpartition(" ")[2], "")
    note = f"grey: the Pareto front; bars: one standard deviation over seeds; hollow: published\n{machine}"
    title, scale = f"{section.title}: score over {axis}", Axis(axis, log=max(costs) > 10 * min(costs) > 0)
    return line_plot(title, series, scale, Axis("score"), note, front=True)
