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
from linvit.experiments.compare.options import differing, option_text, outermost
from linvit.experiments.compare.statistics import spread
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot, pareto
from linvit.files import write_text
from linvit.plain_text import markdown_table, printable
from linvit.runs import result
from linvit.runs.folder import CONFIG, COSTS, CURVES, RESULT, RunFolder, files

NAME = "leaderboard"
SCRIPT = Path(__file__).with_suffix(".js")  # sorts a table by the title that is clicked, and filters rows by words
WHEN = "measured {date}, load {load}"
FRONTS, SCORES = "on the front of", ("score", "±", "best", "test", "top-1 on ")
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
    "set that scores it. Test: by linvit test of all images. Top-1 on a set: by linvit evaluate. Front: the costs "
    "over which no other run has at least the score of a row for at most its cost. Published figures were not "
    "measured here: they are in no front, and hollow in plots. Latency is that of a forward pass per image, in "
    "batches of two, and memory that of a forward and a backward pass of two, both by linvit compare; where a size of "
    "images is said, both are by linvit bench backbone, memory is that of a training step, and the head has 1,000 "
    "classes. Those of two machines (M1, M2) are never in one front."
)


class Section(NamedTuple):
    """A table of one data set, the best row first; cells by the titles of columns, those of `axes` are costs."""

    title: str
    facts: str  # of the data
    rows: list[dict[str, Any]]
    axes: list[str]


class Leaderboard(NamedTuple):
    """Sections, short names of the machines in their titles, when was measured, and what is left out, and why."""

    sections: list[Section]
    machines: dict[str, str]
    measured: list[str]
    left_out: list[str]

    def short(self, text: str) -> str:
        """A text with the short names of machines."""
        for machine in sorted(self.machines, reverse=True):
            text = text.replace(machine, self.machines[machine])
        return text


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
            reason = " ".join(str(error).split())
            left_out.append(reason if isinstance(error, UserError) else f"'{path}' cannot be read: {error!r}")
    kept: dict[Any, dict[str, Any]] = {}
    for record in sorted(runs, key=_order):
        key = _place(record), record["configuration"], record["seed"]
        if key in kept and kept[key]["score"] != record["score"]:
            left_out.append(f"{kept[key]['run']}: a newer run has its configuration, data and seed")
        kept[key] = record
    costs: dict[str, dict[str, float]] = {}
    for one in sorted(measured, key=lambda one: (_machine(one), *_order(one))):
        for configuration, found in one["costs"].items():
            costs.setdefault(configuration, {}).update(_axes(found, _machine(one)))
    machines = {where: f"M{number}" for number, where in enumerate(sorted({*map(_machine, measured)}), 1)}
    when = [f"{machines[_machine(one)]}: " + WHEN.format(**one["conditions"]) for one in measured]
    places = sorted({place for place, *_ in kept})
    sections = [_section(place, [one for key, one in kept.items() if key[0] == place], costs) for place in places]
    return Leaderboard(sections, machines, sorted({*when}), left_out)


def write(board: Leaderboard, folder: Path) -> str:
    """Writes `leaderboard.md`, `.csv` and `.html` into a folder, which is made; returns the tables as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    page, parts = Page("Leaderboard", SCRIPT.read_text(encoding="utf-8")), ["# Leaderboard"]
    for title, facts, rows, axes in board.sections:
        titles = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
        head, *table = [[board.short(cell) for cell in row] for row in (titles, *_texts(titles, rows))]
        page.heading(title)
        page.paragraph(facts)
        page.table(head, [[*cells, last.replace(" ", "\u00a0")] for *cells, last in table])  # fronts, in one line
        page.pictures([(_plot(title, rows, axis, board), board.short(f"score over {axis}")) for axis in axes], 460)
        parts += [f"## {title}", printable(facts, lines=False), markdown_table([head, *table])]
    for note in (NOTES, *(f"{name}: {machine}" for machine, name in board.machines.items()), *board.measured):
        page.paragraph(note)
        parts.append(note)
    cells = [{"data": one.title, "facts": one.facts, **row} for one in board.sections for row in one.rows]
    columns = list(dict.fromkeys(name for row in cells for name in row))
    write_table(folder / f"{NAME}.csv", [columns, *([row.get(name) for name in columns] for row in cells)])
    page.write(folder / f"{NAME}.html")
    write_text(folder / f"{NAME}.md", "\n\n".join([*parts, ""]))
    return "\n\n".join(parts[1:])


def _files(folder: Path) -> Iterator[Path]:
    """Records, measured costs, and configurations of runs that have no record."""
    if not folder.exists():
        raise UserError(f"there is no '{folder}': name run folders, folders of them, or files {RESULT} and {COSTS}")
    if folder.is_file():
        yield folder
    for name in (RESULT, COSTS, CONFIG):
        yield from (path for path in files(folder, name) if name != CONFIG or not path.with_name(RESULT).exists())


def _record(path: Path) -> dict[str, Any]:
    """The record of a run; a `UserError` if it is not finished, as after a resume."""
    run, own = RunFolder(path.parent), path.name == CONFIG
    known = own or all(path.with_name(name).exists() for name in (CONFIG, CURVES))  # a record may have come alone
    if known:
        run.check_complete()
    return result.derive(run) if own else result.read(path)


def _place(record: Mapping[str, Any]) -> tuple[str, ...]:
    """What the records of one section have in common: the data, the task, and what it calls its score."""
    data, options = record["data"], record["options"]
    task, metric = (str(options.get(f"model.{name}") or "") for name in ("class_path", "score"))
    return data["name"], data["fingerprint"] or "unknown", task.rpartition(".")[2], metric


def _order(one: Mapping[str, Any]) -> tuple[str, str]:
    """By date, and then by content: the order of folders does not matter."""
    return (one["conditions"] or {}).get("date", ""), json.dumps(one, sort_keys=True)


def _machine(one: Mapping[str, Any]) -> str:
    return printable("{machine} / {device} / {threads} threads / {versions}".format(**one["conditions"]), lines=False)


def _axes(found: Mapping[str, float | None], machine: str = "") -> dict[str, float]:
    """Costs by the names of axes, in their units."""
    axes = {}
    for name, (title, unit) in AXES.items():
        for key, cost in found.items():  # of `linvit bench` with the size of images
            if cost is not None and key.partition(" ")[0] == name:
                axes[title.format(machine + key.removeprefix(name))] = cost / unit
    return axes


def _section(place: Sequence[str], records: Sequence[dict[str, Any]], costs: Mapping[str, dict[str, float]]) -> Section:
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in sorted(records, key=lambda record: record["seed"]):
        groups.setdefault(record["configuration"], []).append(record)
    keys = [*NAMED, *outermost(differing(own[0]["options"] for own in groups.values()))]
    names = {configuration: _name(own[0]["options"], keys) for configuration, own in groups.items()}
    found = {
        one: _axes(own[0]["costs"]) | costs.get(one, {}) | costs.get(result.model_hash(own[0]["options"]), {})
        for one, own in groups.items()
    }
    axes = list(dict.fromkeys(axis for own in found.values() for axis in own))
    sets = sorted({name for record in records for name in record["evaluation"]})
    rows: list[dict[str, Any]] = []
    fewer: list[str] = []
    for configuration, own in groups.items():
        name, clash = names[configuration], [*names.values()].count(names[configuration]) > 1
        scores, tag = [one["score"]["final"] for one in own], own[0]["score"]["tag"].replace("val/", "test/")
        test = [one["test"]["scores"][tag] for one in own if _tested(one) and tag in one["test"]["scores"]]
        name += printable(f", {configuration[:6]}", lines=False) * clash
        row: dict[str, Any] = {"configuration": name, "row": 0}
        row |= {"score": statistics.fmean(scores), "±": spread(scores) if len(own) > 1 else None, "seeds": len(own)}
        row |= {"best": statistics.fmean(one["score"]["best"] for one in own)}
        others = {"test": test}
        for one in sets:
            found_on = [record["evaluation"][one] for record in own if one in record["evaluation"]]
            others[f"top-1 on {printable(one, lines=False)}"] = found_on
        row |= {title: statistics.fmean(values) if values else None for title, values in others.items()}
        fewer += [f"{t} of {name} ({len(v)} of {len(own)})" for t, v in others.items() if 0 < len(v) < len(own)]
        rows.append(row | {axis: found[configuration].get(axis) for axis in axes} | {"published": "", FRONTS: ""})
        if told := own[0]["published"]:
            known = {"configuration": f"{name} (published)", "score": told["score"]}
            known |= dict.fromkeys(name for name in row if name not in known)
            rows.append(rows[-1] | known | {"published": f"{told['metric']}: {told['source']}"})
    rows.sort(key=lambda row: (-row["score"], row["configuration"]))
    trained = [row for row in rows if not row["published"]]
    fronts = {axis: pareto([(row[axis], row["score"]) for row in trained if row[axis] is not None]) for axis in axes}
    for number, row in enumerate(rows, 1):
        on = [axis.rpartition(" (")[0] for axis in axes if (row[axis], row["score"]) in fronts[axis]]
        row |= {"row": number, FRONTS: "; ".join(on) * (not row["published"])}
    data = records[0]["data"]
    facts = [f"{name} {number:,.0f} images" for name, number in sorted(data["images"].items())]
    facts += [f"{data['classes']} classes", f"fingerprint {place[1]}"]
    if len({record["score"]["tag"] for record in records}) > 1:
        averaged = [name for one, name in names.items() if "ema" in groups[one][0]["score"]["tag"]]
        which = "; ".join(averaged)
        facts.append(f"Warning: the scores of {which} are of a moving average of the weights, those of others are not")
    if fewer:
        facts.append(f"Warning: means of fewer seeds than the score's: {'; '.join(fewer)}")
    title = printable(", ".join(filter(None, [place[0], *place[2:]])), lines=False)
    return Section(title, ", ".join(facts), rows, axes)


def _tested(one: Mapping[str, Any]) -> bool:
    """Whether a run was tested on all images of a test split, which `limit_test_batches` may have cut."""
    test, known = one["test"], one["data"]["images"]
    return bool(test) and test["split"] == "test" and test["images"] == known.get("test", test["images"])


def _name(options: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Backbone, head and attention, and by their names the other options that differ."""
    texts = {key: printable(option_text(options, key), lines=False) for key in keys}
    texts = {key: text if len(text) <= LONGEST else f"{text[:LONGEST]}…" for key, text in texts.items()}
    named = {key: text if key in NAMED else f"{key.rpartition('.')[2]}={text}" for key, text in texts.items()}
    return ", ".join(named[key] for key, text in texts.items() if text != "-")


def _texts(titles: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    def text(title: str, cell: Any) -> str:
        if cell is None or isinstance(cell, str):
            return cell or "-"
        return f"{cell:.4f}" if title.startswith(SCORES) else f"{cell:.3g}" if cell < 100 else f"{cell:,.0f}"

    return [[text(title, row[title]) for title in titles] for row in rows]


def _plot(title: str, rows: Sequence[Mapping[str, Any]], axis: str, board: Leaderboard) -> str:
    series, note = [], "grey: the Pareto front; bars: one standard deviation over seeds; hollow: published\n"
    for row in (row for row in rows if row[axis] is not None):
        name, point = f"{row['row']}: {row['configuration']}"[:SHORT], (row[axis], row["score"])
        series.append(Series(name, (point,), (row["±"] or 0,), (str(row["row"]),), bool(row["published"])))
    costs, label = [x for one in series for x, _ in one.points], board.short(axis)
    note += next((machine for machine in board.machines if machine in axis), "")
    scale = Axis(label, log=max(costs) > 10 * min(costs) > 0)
    return line_plot(f"{title}: score over {label}", series, scale, Axis("score"), note, front=True)
