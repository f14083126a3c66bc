"""Writes scores on sets as a page with pictures, Markdown, CSV and JSON."""

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from PIL import Image

from linvit.callbacks.report import write_table
from linvit.evaluation.corruptions import ALEXNET, SEVERITIES
from linvit.evaluation.model import EvaluatedModel
from linvit.evaluation.scores import Score, corruption_errors, is_imagenet
from linvit.evaluation.sets import ImageSet
from linvit.experiments.compare.statistics import wilson
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.io.files import write_text
from linvit.io.plain_text import markdown_code, markdown_table, markdown_text
from linvit.runs.conditions import conditions

Table = list[tuple[str, ...]]
SHOWN = 3  # severity of the pictures
ABOUT = (
    "Top-1 is right if one of the image's labels is chosen; 95 %: Wilson's interval over images. Where a set has some "
    "of the network's classes, logits of the others are left out, and the clean score on the same classes is given "
    "beside it. NLL in nats; ECE: expected calibration error, 15 bins. Throughput and memory are of the network on "
    "one device and a full batch."
)
OURS = "mean error over severities and corruptions, not over AlexNet's: that is for all 15 corruptions at 224 pixels"
PUBLISHED = "mCE, over AlexNet's published errors (Hendrycks and Dietterich 2019)"


def top1_by_set(scores: Sequence[Score], model: EvaluatedModel) -> dict[str, float]:
    """Returns top-1 by the name of a set, with its size if that differs from the network's; see `table_of`."""
    found = {}
    for (name, size), group in groupby(scores, lambda score: (score.set, score.size)):
        own, nominal = [score.top1 for score in group], model.preprocessing.size
        found[name if tuple(nominal or size) == size else f"{name} {size[0]}x{size[1]}"] = sum(own) / len(own)
    return found


def table_of(scores: Sequence[Score], model: EvaluatedModel) -> Table:
    """Returns a row per set and size, preceded by the titles; for a corrupted set, the mean over all corruptions."""
    rows: Table = [("set", "size", "images", "classes", "top-1", "95 %", "on clean", "NLL", "ECE", "images/s", "MiB")]
    for (name, size), group in groupby(scores, lambda score: (score.set, score.size)):
        own = [*group]
        first, classes = own[0], f"{own[0].classes} of {len(model.classes)}"
        top1, nll, ece = (sum(getattr(s, each) for s in own) / len(own) for each in ("top1", "nll", "ece"))
        interval = "" if first.corruption else "{:.4f}-{:.4f}".format(*wilson(top1, first.images))
        clean = "" if first.clean is None else f"{first.clean:.4f}"
        costs = f"{first.images_per_second:.0f}", f"{first.peak_memory / 2**20:.1f}" if first.peak_memory else ""
        what = (name, f"{size[0]}x{size[1]}", str(first.images), classes, f"{top1:.4f}", interval, clean)
        rows.append((*what, f"{nll:.4f}", f"{ece:.4f}", *costs))
    return rows


def corruption_tables(scores: Iterable[Score], model: EvaluatedModel) -> dict[str, tuple[Table, str]]:
    """Returns for each corrupted set the errors by corruption and severity, and a sentence with their mean."""
    tables = {}
    for name, group in groupby((score for score in scores if score.corruption), lambda score: score.set):
        own = [*group]
        top1 = {(str(score.corruption), score.severity or 0): score.top1 for score in own}
        published = is_imagenet(model.classes, own[0].size) and ALEXNET.keys() == {kind for kind, _ in top1}
        errors = corruption_errors(top1, published)
        rows: Table = [("corruption", *map(str, SEVERITIES), "CE" if published else "mean")]
        rows += [(n, *(f"{1 - top1[n, each]:.4f}" for each in SEVERITIES), f"{own:.4f}") for n, own in errors.items()]
        mean = f"{sum(errors.values()) / len(errors):.4f} is the {PUBLISHED if published else OURS}"
        tables[name] = rows, f"Top-1 errors of {name} by severity. {mean}."
    return tables


def write(
    scores: Sequence[Score], model: EvaluatedModel, sets: Iterable[ImageSet], name: str, command: str, folder: Path
) -> Path:
    """Writes index.html, whose path it returns, evaluation.md, .csv and .json, a list of a record per score."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [each for each in Score._fields if each != "bins"]
    write_table(folder / "evaluation.csv", [columns, *([getattr(s, each) for each in columns] for s in scores)])
    write_text(folder / "evaluation.json", json.dumps([{"model": name, **s._asdict()} for s in scores], indent=1))
    rows, measured = table_of(scores, model), ", ".join(f"{key}: {value}" for key, value in conditions().items())
    page, text = Page(f"Evaluation of {name}"), [markdown_code(command), markdown_table(rows), ABOUT, measured]
    page.code(command)
    page.table(rows[0], rows[1:])
    page.paragraph(f"{ABOUT} Measured with {measured}.")
    plain = [score for score in scores if score.corruption is None]
    lines = [Series(f"{s.set} {s.size[0]}, ECE {s.ece:.3f}", tuple((c, a) for _, a, c in s.bins)) for s in plain]
    exact = Series("exact", ((0.0, 0.0), (1.0, 1.0)))
    axes = Axis("probability of the choice"), Axis("accuracy")
    plots = [(line_plot("Reliability", [exact, *lines], *axes), "Below the straight line a network is overconfident.")]
    sweep = sorted((score.size[0], score.top1) for score in plain if score.set == "clean")
    if len(sweep) > 1:
        over = line_plot("Resolution", [Series("clean", tuple(sweep))], Axis("side in pixels"), Axis("top-1"))
        plots.append((over, "The clean set at several sizes."))
    page.pictures(plots, width=560)
    pictures = {each.kind: each for each in sets if each.kind is not None and each.kind[1] == SHOWN}
    for corrupted, (errors, said) in corruption_tables(scores, model).items():
        page.heading(corrupted)
        page.paragraph(said)
        page.table(errors[0], errors[1:])
        text += [markdown_text(said), markdown_table(errors)]
        shown = [(row[0], pictures[row[0], SHOWN].images(model.preprocessing.transform)[0]) for row in errors[1:]]
        found = [(Image.fromarray(one["image"].permute(1, 2, 0).numpy()), kind) for kind, one in shown]
        page.pictures(found, width=160)
    write_text(folder / "evaluation.md", "\n\n".join([*text, ""]))
    page.write(folder / "index.html")
    return folder / "index.html"
