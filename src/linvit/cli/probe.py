"""`linvit probe`: accuracies of nearest neighbours and linear classifiers on the frozen features of each layer."""

import argparse
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis.probes import STRENGTHS, linear_probe, nearest_neighbours, pooled_features
from linvit.backbones.trained import NAMES, TrainedBackbone, trained_backbone
from linvit.callbacks.report import write_table
from linvit.cli.options import read_options
from linvit.data import ClassificationData
from linvit.data.base import ImageData
from linvit.errors import UserError
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.io.files import check_writable, write_text
from linvit.io.plain_text import markdown_code, markdown_table, markdown_text, shown
from linvit.io.terminal import argument_parser, reflow, table
from linvit.runs.folder import run_of_checkpoint
from linvit.runs.options import Source, read_config, replace_options
from linvit.runs.parser import Config
from linvit.runs.run import Run
from linvit.tasks.pretrained import skip_pretrained

EPILOG = """examples:
  linvit probe RUN            on the images of the run's training
  linvit probe TEACHER STUDENT --random
                              several side by side, and one not trained
  linvit probe timm:vit_small_patch16_dinov3 --data.source=path/to/folder
  linvit probe hf:FOLDER --data.source=path/to/folder
  linvit probe --config mine.yaml --model.pretrained=FILE
                              a backbone with weights of a file

Options of linvit validate set the images (--data.source=FOLDER) and their
preparation; defaults are those of the run's configuration, or of the model of
timm or transformers. The run's folder, or ./probe, gets index.html, with the
scores over depth, probe.md and probe.csv. All features are kept in memory;
--layers=-1 keeps only those of the last layer.
"""
ABOUT = (
    "Features are those of the training split, frozen and without augmentation: the mean of the patches, and the class "
    "token, with the norm of the layer (in a plain transformer the final one). kNN: votes of the nearest, weighted by "
    "exp(cosine similarity / 0.07). Linear: logistic regression of standardised features, trained to "
    "convergence; cross-validation on the training split chooses the C of its regularisation, of {}."
)
Features = dict[tuple[int, str, str], Tensor]
"""Features of a split: (N, C) by position of a layer, its name, and the pooled tokens."""


ProbedModel = tuple[str, nn.Module, ImageData]
"""Name of a network to probe, the network, and its images."""


class ProbeScore(NamedTuple):
    """Accuracies on the tested split, for one feature of one layer; see `linvit.analysis.probes`."""

    network: str
    position: int  # of the layer, from 0
    layer: str
    feature: str  # "mean" or "class token"
    accuracies: tuple[float, ...]  # for each number of neighbours, then of the linear classifier
    strength: float  # C of its regularisation


def main(argv: list[str]) -> int:
    """Runs `linvit probe`; prints a table and the path of the page, and returns 0."""
    parser = argument_parser("linvit probe", __doc__, EPILOG)
    parser.allow_abbrev = False  # the other options are those of validate
    parser.add_argument("networks", nargs="*", metavar="NETWORK", help=f"a run, one of its checkpoints, {NAMES}")
    parser.add_argument("--random", action="store_true", help="also probe the first network with random weights")
    parser.add_argument("--layers", nargs="+", type=int, metavar="N", help="blocks or stages: 0, 1, ... or -1, -2, ...")
    neighbours = "numbers of neighbours of kNN (default: 10 20)"
    parser.add_argument("--neighbours", nargs="+", type=int, metavar="K", default=(10, 20), help=neighbours)
    parser.add_argument("--config", metavar="CONFIG", help="of the images, and of the network if none is given")
    parser.add_argument("--output", type=Path, metavar="DIR", help="output folder (default: RUN/probe, or probe)")
    # argparse would take an option that contains a space for a network
    options = [option for option in argv if option.startswith(("--data", "--model"))]
    args, others = parser.parse_known_args([option for option in argv if option not in options])
    folder = args.output or Path(*[run_of_checkpoint(name) or "" for name in args.networks[:1]], "probe")
    check_writable(folder, "--output")
    options = [*others, *options]
    names = args.networks or [None]
    wanted = [*[(names[0], False)] * args.random, *((name, True) for name in names)]
    subjects = [read_subject(name, args.config, options, trained) for name, trained in wanted]
    if len(sources := {data.source: None for _, _, data in subjects}) > 1:
        raise UserError(f"these networks have different images, {', '.join(sources)}: choose one, --data.source=SOURCE")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scores: list[ProbeScore] = []
    for name, network, data in subjects:
        found, images = probe(name, network.to(device).eval(), data, args)
        scores += found
    about = f"Images of {', '.join(sources)}: {images}; the last split is tested. "
    about += ABOUT.format(", ".join(f"{strength:g}" for strength in STRENGTHS))
    titles = [*(f"kNN, k = {count}" for count in args.neighbours), "linear"]
    rows = [("network", "layer", "feature", *titles, "C")]
    for of, _, layer, feature, accuracies, strength in scores:
        rows.append((of, layer, feature, *(f"{accuracy:.4f}" for accuracy in accuracies), f"{strength:g}"))
    for name in dict.fromkeys(score.network for score in scores):
        own = [rows[0], *(row for row in rows if row[0] == name)]
        print("\n".join([name, *table([("", *row[1:], "") for row in own]), ""]))
    print(reflow(about))
    command = shlex.join(["linvit", "probe", *argv])
    folder.mkdir(parents=True, exist_ok=True)
    parts = [markdown_code(command), markdown_text(about), markdown_table(rows)]
    write_text(folder / "probe.md", "\n\n".join([*parts, ""]))
    write_table(folder / "probe.csv", rows)
    page = Page("Probes")
    page.code(command)
    page.paragraph(about)
    page.table(rows[0], rows[1:])
    page.pictures(plots(scores, titles), width=560)
    page.write(folder / "index.html")
    print(shown(folder / "index.html"))
    return 0


def read_subject(name: str | None, config: str | None, options: Sequence[str], trained: bool) -> ProbedModel:
    """Returns a network and its images.

    The name is that of a run, a checkpoint, or one of `trained_backbone`; None is the network of the configuration and
    options, as in `linvit validate`. If not `trained`, it has random weights.
    """
    folder, own = None, list[Source]()
    if name is not None and (model := trained_backbone(name)) is not None:
        own = [of_model(model)]
    elif name is not None:
        folder = run_of_checkpoint(name) if Path(name).exists() else None
        if folder is None:
            raise UserError(f"'{name}' is neither a run, NAME/version_N, nor a checkpoint in one, nor {NAMES}")
        own = [folder]
    own += [config] if config else []
    run = _run(read_config(own) if own else None, options, name if folder else None)
    if not isinstance(run.data, ClassificationData):  # a dense task, whose backbone is probed
        data = run.data
        if not any(option.startswith("--data.source=") for option in options):
            raise UserError(f"'{data.source}' is for {type(data).__name__}: give labelled images: --data.source=FOLDER")
        images = classification({}, img_size=list(data.size), mean=list(data.mean), std=list(data.std))
        run.data = _run(read_config(images), options).data
    if isinstance(run.data, ClassificationData) and run.data.native is not None:
        raise UserError("linvit probe takes images of one size: set --data.token_budget=null --data.max_tokens=null")
    with nullcontext() if trained else skip_pretrained():
        task = run.trained() if trained and folder is not None else run.task
    return (name or str(task.hparams["backbone"])) + ", random" * (not trained), task.predicting, run.data


def _run(base: Config | None, options: Sequence[str], checkpoint: str | None = None) -> Run:
    """Returns the run of a configuration and of command-line options."""
    config = replace_options(read_options("predict", options, base), {"model.compile": False})
    return Run(config if checkpoint is None else {**config, "ckpt_path": checkpoint}, "predict", quiet=True)


def of_model(model: TrainedBackbone) -> Config:
    """Returns the configuration of a trained model of another library and its images."""
    model.print_images()
    return classification({"backbone": model.spec}, **model.images)


def classification(model: dict[str, Any], **data: Any) -> Config:
    """Returns the configuration of a model for labelled images, and of the images."""
    return {
        "model": {"class_path": "linvit.tasks.ClassificationTask", "init_args": model},
        "data": {"class_path": "linvit.data.ClassificationData", "init_args": data},
    }


def probe(name: str, network: nn.Module, data: ImageData, args: argparse.Namespace) -> tuple[list[ProbeScore], str]:
    """Probes a network; returns a score for each feature of each layer, and a sentence on the images of each split."""
    device = next(network.parameters()).device
    tested = data.data_source.evaluated({*data.splits, "val"})
    read = {split: features_of_split(network, data, split, args.layers, device) for split in ("train", tested)}
    (train, labels), (test, test_labels) = (read[split] for split in ("train", tested))
    scores, classes = [], int(max(own.max() for _, own in read.values())) + 1
    for key in train:
        known, queries = train[key].to(device), test[key].to(device)
        voted = nearest_neighbours(known, labels, queries, args.neighbours)
        fitted = linear_probe(known, labels, classes)
        linear = fitted.correct(queries, test_labels) / len(test_labels)
        accuracies = (*(voted == test_labels).double().mean(1).tolist(), linear)
        scores.append(ProbeScore(name, *key, accuracies, fitted.strength))
    return scores, ", ".join(f"{len(own):,} of {split}" for split, (_, own) in read.items())


@torch.inference_mode()
def features_of_split(
    network: nn.Module, data: ImageData, split: str, layers: Sequence[int] | None, device: torch.device
) -> tuple[Features, Tensor]:
    """Returns all features of a split, prepared as in evaluation, on the CPU, and the labels (N,) on the device."""
    parts: dict[tuple[int, str, str], list[Tensor]] = {}
    labels = []
    for batch in data.evaluation_dataloader(split):
        batch["image"] = batch["image"].to(device)
        data.finish(batch)
        for key, feature in pooled_features(network, batch["image"], layers).items():
            parts.setdefault(key, []).append(feature.float().cpu())
        labels.append(batch["label"].to(device))
    return {key: torch.cat(part) for key, part in parts.items()}, torch.cat(labels)


def plots(scores: Sequence[ProbeScore], titles: Sequence[str]) -> list[tuple[str, str]]:
    """Returns plots of each accuracy over depth with a title: a curve for each feature of each network."""
    depth = Axis("block or stage", ticks=tuple(sorted({score.position for score in scores})))
    curves: dict[tuple[str, str], list[ProbeScore]] = {}
    for score in scores:
        curves.setdefault((score.network, score.feature), []).append(score)
    drawn = []
    for i, title in enumerate(titles):
        series = [
            Series(", ".join(name), tuple((score.position, score.accuracies[i]) for score in curve))
            for name, curve in curves.items()
        ]
        drawn.append((line_plot(title, series, depth, Axis("accuracy")), f"{title}: accuracy over depth"))
    return drawn
