"""Scores on sets as a page with pictures, Markdown, CSV and JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from linvit.callbacks.report import write_table
from linvit.evaluation.corruptions import corrupt
from linvit.evaluation.model import EvaluatedModel
from linvit.evaluation.scores import Score, Work, corruption_errors, is_imagenet, mean_corruption_error
from linvit.evaluation.sets import ImageSet
from linvit.experiments.compare.statistics import wilson
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.files import replacing
from linvit.plain_text import markdown_table
from linvit.runs.conditions import conditions

Table = list[tuple[str, ...]]
SHOWN = 3  # the severity of the pictures
ABOUT = (
    "Top-1 is right if one of the image's labels is chosen; 95 %: Wilson's interval over images. Where a set has some "
    "of the network's classes, logits of the others are left out, and beside it stands the clean score on the same "
    "classes. NLL in nats; ECE: expected calibration error, 15 bins. Throughput and memory are those of the network on "
    "one device and a full batch."
)
OURS = "mean error over severities and corruptions, not over AlexNet's, whose errors are of ImageNet at 224 pixels"
PUBLISHED = "mCE, over AlexNet's published errors (Hendrycks and Dietterich 2019)"
DRAWN = "Corruptions are made here, by the formulas of the paper; frost is drawn in place of its photographs."


def top1_by_set(scores: Sequence[Score], model: EvaluatedModel) -> dict[str, float]:
    """Top-1 by the name of a set, with its size where that is another than the network's; see `table_of`."""
    return {
        name + f" {size[0]}x{size[1]}" * ([*size] != [*(model.preprocessing.size or size)]): sum(
            score.top1 for score in own
        )
        / len(own)
        for (name, size), own in _by_set(scores).items()
    }


def table_of(scores: Sequence[Score], model: EvaluatedModel) -> Table:
    """A row per set and size, the titles first; of a corrupted set the mean over all."""
    rows: Table = [("set", "size", "images", "classes", "top-1", "95 %", "on clean", "NLL", "ECE", "images/s", "MiB")]
    for (name, size), own in _by_set(scores).items():
        top1, nll, ece = (sum(each) / len(own) for each in zip(*((s.top1, s.nll, s.ece) for s in own), strict=True))
        clean, speed, memory = own[0].clean, own[0].images_per_second, own[0].peak_memory
        classes = f"{own[0].classes} of {len(model.classes)}"
        low, high = wilson(top1, own[0].images)
        interval = f"{low:.4f}-{high:.4f}" if len(own) == 1 else ""
        what = (name, f"{size[0]}x{size[1]}", str(own[0].images), classes, f"{top1:.4f}", interval)
        costs = (f"{speed:.0f}", "" if memory is None else f"{memory / 2**20:.1f}")
        rows.append((*what, "" if clean is None else f"{clean:.4f}", f"{nll:.4f}", f"{ece:.4f}", *costs))
    return rows


def _by_set(scores: Sequence[Score]) -> dict[tuple[str, tuple[int, int]], list[Score]]:
    sets: dict[tuple[str, tuple[int, int]], list[Score]] = {}
    for score in scores:
        sets.setdefault((score.set, score.size), []).append(score)
    return sets


def corruption_table(scores: Sequence[Score], model: EvaluatedModel) -> tuple[Table, str]:
    """The errors of a corrupted set, by corruption and severity, and what they come to, in words."""
    top1 = {(s.corruption, s.severity): s.top1 for s in scores if s.corruption and s.severity}
    published = is_imagenet(model.classes, scores[0].size)
    errors = corruption_errors(top1, published)
    rows: Table = [("corruption", *map(str, range(1, 6)), "CE" if published else "mean")]
    rows += [(n, *(f"{1 - top1[n, each]:.4f}" for each in range(1, 6)), f"{own:.4f}") for n, own in errors.items()]
    mean = mean_corruption_error(errors)
    said = "" if mean is None else f" {mean:.4f} is the {PUBLISHED if published else OURS}."
    return rows, f"Top-1 errors of {scores[0].set} by severity.{said} {DRAWN}"


def corrupted(work: Work) -> list[ImageSet]:
    """The sets with corruptions."""
    return [each for each in work.others if each.kinds[0] is not None]


def write(scores: Sequence[Score], model: EvaluatedModel, work: Work, name: str, command: str, folder: Path) -> Path:
    """Writes index.html, whose path it returns, evaluation.md, .csv and .json, a list of a record per score."""
    folder.mkdir(parents=True, exist_ok=True)
    columns = [each for each in Score._fields if each != "bins"]
    write_table(folder / "evaluation.csv", [columns, *([getattr(s, each) for each in columns] for s in scores)])
    with replacing(folder / "evaluation.json") as file:
        file.write(json.dumps([{"model": name, **s._asdict()} for s in scores], indent=1).encode())
    rows, measured = table_of(scores, model), ", ".join(f"{key}: {value}" for key, value in conditions().items())
    page, text = Page(f"Evaluation of {name}"), [f"`{command}`", markdown_table(rows), ABOUT, measured]
    page.code(command)
    page.table(rows[0], rows[1:])
    page.paragraph(f"{ABOUT} Measured with {measured}.")
    plain = [score for score in scores if score.corruption is None]
    lines = [Series(f"{s.set} {s.size[0]}, ECE {s.ece:.3f}", tuple((c, a) for _, a, c in s.bins)) for s in plain]
    exact = Series("exact", ((0.0, 0.0), (1.0, 1.0)))
    axes = Axis("probability of the choice"), Axis("accuracy")
    plots = [(line_plot("Reliability", [exact, *lines], *axes), "Below the straight line a network is too sure.")]
    sweep = sorted((score.size[0], score.top1) for score in plain if score.set == "clean")
    if len(sweep) > 1:
        over = line_plot("Resolution", [Series("clean", tuple(sweep))], Axis("side in pixels"), Axis("top-1"))
        plots.append((over, "The clean set at several sizes."))
    page.pictures(plots, width=560)
    for each in corrupted(work):
        errors, said = corruption_table([score for score in scores if score.set == each.name], model)
        page.heading(each.name)
        page.paragraph(said)
        page.table(errors[0], errors[1:])
        text += [said, markdown_table(errors)]
        image = each.images(model.preprocessing.transform)[0]["image"]
        changed = {"as it is": image} | {row[0]: corrupt(image, row[0], SHOWN, 0) for row in errors[1:]}
        pictures = [(Image.fromarray(x.permute(1, 2, 0).numpy()), kind) for kind, x in changed.items()]
        page.pictures(pictures, width=min(160, 4 * image.shape[2]))
    with replacing(folder / "evaluation.md") as file:
        file.write("\n\n".join([*text, ""]).encode())
    page.write(folder / "index.html")
    return folder / "index.html"
