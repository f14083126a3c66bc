"""`result.json` of a finished run: configuration, data, scores and costs; described in docs/reference/result.md."""

import hashlib
import json
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from lightning.pytorch.utilities import rank_zero_info

from linvit.callbacks.save_checkpoints import EPOCHS
from linvit.data.base import ImageData
from linvit.data.sources.splits import HUB
from linvit.errors import UserError
from linvit.image_size import image_size
from linvit.io.files import write_text
from linvit.io.reading import read_regular, read_text
from linvit.runs.folder import EVALUATED, RESULT, RunFolder, finite_or_none

SCHEMA = 1
CONDITIONS = " ".join(f"conditions.{name}" for name in ("date", "machine", "device", "threads", "load", "versions"))
FIELDS: dict[Any, str] = {
    dict: "options data score costs",
    dict | None: "conditions test published",
    dict[str, float]: "data.images scores test.scores evaluation diagnostics",
    list: "exports",
    list | None: "costs.image_size",
    str: f"run configuration data.name score.tag test.split published.metric published.source {CONDITIONS}",
    str | None: "command data.fingerprint",
    int: "seed score.final_epoch score.best_epoch test.images",
    int | None: "data.classes costs.parameters costs.macs",
    float: "published.score",
    float | None: "score.final score.best costs.images_per_second",
}
"""Entries of a record by their types; an entry with a dot is nested and present unless its parent is null."""
PLACES = (
    "data.source.",
    "data.predict_path.",
    "data.num_workers.",
    "trainer.logger.",
    "requeue_exit_code.",
    "attention_rank.",
)
"""Prefixes of options for paths and for starting a run, which do not change the experiment."""
DIAGNOSTICS = ("rank", "effective_rank", "entropy", "start", "teacher", "distance")
SAMPLE = 16  # rows of each split from which the fingerprint of the data is computed
LARGEST = 10 * 2**20  # maximum size in bytes of a file to read


def derive(run: RunFolder, saved: Mapping[str, tuple[float, int]] | None = None) -> dict[str, Any]:
    """Returns the record of a finished run from its folder; unknown entries are None or empty.

    Args:
        run: The run.
        saved: Value and epoch of each metric by which the run kept its best checkpoints; the curves may lack them.
    """
    last = finite(run.last)
    tag = run.score_tag() if run.score_tag() in run.last else EVALUATED
    found, final = run.best_score(tag), run.score(tag)
    value, epoch = (math.nan, run.trained) if final is None else (final.value, final.epoch)
    best, best_epoch = (found.value, found.epoch) if found else (None, epoch)
    saved = saved or {}
    if (kept := _monitored(saved, tag)) is not None:
        own, best_epoch = saved[kept]
        best = own if kept == tag else _beside(run, tag, kept, own, best_epoch)
    score = {"tag": tag, "final": finite_or_none(value), "final_epoch": epoch}
    size, speeds = run.hparams.get("img_size"), run.finite("images/s")
    costs = {"image_size": None if size is None else list(image_size(size)), "parameters": None, "macs": None}
    name, classes = _name(str(run.options().get("data.source"))), run.hparams.get("num_classes")
    return {
        "schema": SCHEMA,
        "run": f"{run.folder.parent.name}/{run.folder.name}",
        "command": None,
        **configuration(run),
        "seed": run.seed,
        "data": {"name": name, "classes": classes, "fingerprint": None, "images": {}},
        "score": score | {"best": best, "best_epoch": best_epoch},
        "scores": {name: value for name, value in last.items() if name.startswith("val/")},
        "test": None,
        "evaluation": {},
        "costs": costs | {"images_per_second": statistics.median(speeds) if speeds else None},
        "conditions": None,
        "published": None,
        "diagnostics": {name: value for name, value in last.items() if name.partition("/")[0] in DIAGNOSTICS},
        "exports": sorted(path.name for path in run.folder.iterdir() if path.suffix in (".onnx", ".pt2")),
    }


def _monitored(saved: Mapping[str, tuple[float, int]], tag: str) -> str | None:
    """Returns the metric that chose the checkpoint whose weights have a score; None if unknown."""
    same = [name for name in saved if ("/ema_" in name) == ("/ema_" in tag)]
    return tag if tag in saved else next(iter([*same, *saved]), None)


def _beside(run: RunFolder, tag: str, monitor: str, value: float, epoch: int) -> float | None:
    """Returns the score at the epoch in which another metric had a value, of several validations in that epoch."""
    scores = [score for score in run.scores(tag) if score.epoch == epoch]
    steps = {step for step, found in run.curves.get(monitor, []) if found == value}
    found = next(iter([*(score for score in scores[::-1] if score.step in steps), *scores[::-1]]), None)
    return None if found is None else finite_or_none(found.value)


def kept_scores(state: Any) -> dict[str, tuple[float, int]]:
    """Returns value and epoch of each metric in a state of `SaveCheckpoints`; none from versions without epochs."""
    epochs = state.get(EPOCHS) if isinstance(state, Mapping) else None
    pairs = {tag: (state.get(tag), epoch) for tag, epoch in epochs.items()} if isinstance(epochs, Mapping) else {}
    return {tag: (value, epoch) for tag, (value, epoch) in pairs.items() if _is(value, float) and _is(epoch, int)}


def configuration(run: RunFolder) -> dict[str, Any]:
    """Returns the complete configuration as `options`, with a hash that is equal for runs that differ only in seed."""
    options = _plain(run.options())
    return {"configuration": _hash(json.dumps(options).encode()), "options": options}


def portable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options without those in `PLACES`, so that runs on two machines can be equal; the source by its name."""
    kept = {name: value for name, value in options.items() if not f"{name}.".startswith(PLACES)}
    return kept | {name: _name(str(options[name])) for name in ("data.source",) if options.get(name) is not None}


def _plain(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in options.items() if not f"{name}.".startswith(PLACES)}
    found: dict[str, Any] = json.loads(json.dumps(kept, default=str, sort_keys=True), parse_constant=str)  # also NaN
    return found


def data_facts(data: ImageData) -> dict[str, Any]:
    """Returns name, classes and images of each split, and a fingerprint that does not depend on the data's location."""
    source, facts = data.data_source, {"name": _name(data.source), "classes": data.num_classes}
    if data.stream_options is not None:
        return facts | {"fingerprint": None, "images": {}}
    made = None if source.options is None else (source.options, data.size)
    parts = [repr((data.class_names, made, None if "val" in source.splits else data.val_fraction)).encode()]
    for name, rows in sorted(source.splits.items()):
        parts.append(repr((name, len(rows))).encode())
        chosen = [number * len(rows) // SAMPLE for number in range(SAMPLE if len(rows) else 0)]
        table = rows.with_format("arrow")
        parts += [_content(value) for at in chosen for value in table[at : at + 1].to_pylist()[0].values()]
    return facts | {"fingerprint": _hash(*parts), "images": {name: len(rows) for name, rows in source.splits.items()}}


def finite(scores: Mapping[str, float]) -> dict[str, float]:
    """Returns the finite scores: JSON has neither NaN nor infinity."""
    return {name: value for name, value in scores.items() if math.isfinite(value)}


def write(path: Path, record: Mapping[str, Any]) -> None:
    """Writes a record atomically."""
    write_text(path, json.dumps(record, indent=1, allow_nan=False) + "\n")


def add_test(
    run: RunFolder,
    checkpoint: str,
    options: Mapping[str, Any],
    data: ImageData,
    scores: Mapping[str, float],
    images: int,
) -> None:
    """Adds the scores of `linvit test` to the record of a run.

    They are added if they belong to its best checkpoint and its data, with the `options` of data and evaluation of
    its training.
    """
    path = run.folder / RESULT
    record = read(path)
    before, now = record["options"], _plain(options)
    same = {*before} & {*now} - {"data.batch_size"}  # a run of another version may have different options
    changed = [name for name in sorted(same) if before[name] != now[name]]
    other = "other data" if record["data"] != data_facts(data) else f"another {changed[0]}" if changed else ""
    if not run.is_best(checkpoint):
        rank_zero_info(f"these scores are not added to {path}, which belongs to {run.best[0]}")
    elif other:
        rank_zero_info(f"these scores are not added to {path}, whose run has {other}")
    else:
        split = "test" if "test" in data.splits else "val"
        write(path, record | {"test": {"split": split, "images": images, "scores": finite(scores)}})


def read(path: Path) -> dict[str, Any]:
    """Returns the record in a file from any source; raises a `UserError` unless it has all `FIELDS`."""
    try:
        record = json.loads(read_text(path, LARGEST))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"'{path}' cannot be read: {error}") from error
    record = {"evaluation": {}, **record} if isinstance(record, dict) else {}
    schema = record.get("schema")
    if schema != SCHEMA:
        raise UserError(f"'{path}' has schema {schema!r}, and this linvit reads {SCHEMA}: write it with this version")
    for kind, field in ((kind, field) for kind, names in FIELDS.items() for field in names.split()):
        parent, _, name = field.rpartition(".")
        holder = record.get(parent) if parent else record
        if holder is not None and not _is(holder.get(name), kind):
            raise UserError(f"'{path}' is not a record of schema {SCHEMA}: its {field} is missing or of another type")
    return record


def _is(value: Any, kind: Any) -> bool:
    """Returns True if a value has a type; an integer is also a float; a bool, NaN or infinity is not a number."""
    if get_origin(kind) is dict:
        return isinstance(value, dict) and all(_is(one, get_args(kind)[1]) for one in value.values())
    if type(value) in (int, float):
        return abs(value) < 1e300 and (isinstance(value, kind) or isinstance(1.0, kind))
    return type(value) is not bool and isinstance(value, kind)


def _hash(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]


def _name(source: str) -> str:
    """Returns a data source without its parent folders."""
    return source if source.startswith(HUB) else Path(source).name


def _content(value: Any) -> bytes:
    """Returns the bytes of an image, from a file or the table, or any other value of a row as text."""
    if isinstance(value, dict) and {*value} == {"bytes", "path"}:
        return bytes(value["bytes"] or read_regular(value["path"] or ""))
    return repr(value).encode()
