"""Probes of networks on labelled images: kNN and linear classifiers on the features of each layer, as one page."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from linvit.analysis.probes import linear_probes, nearest_neighbours, pooled_features
from linvit.callbacks.report import write_table
from linvit.data.base import ImageData
from linvit.experiments.page import Page
from linvit.experiments.plots import Axis, Series, line_plot
from linvit.files import replacing
from linvit.plain_text import markdown_table

Features = dict[tuple[int, str, str], Tensor]
"""Of a split: (N, C) by position of a layer, its name, and what is pooled."""


class ProbedModel(NamedTuple):
    """A network to probe, and the images as it takes them."""

    name: str
    network: nn.Module
    data: ImageData


class Protocol(NamedTuple):
    """How networks are probed; see `linvit.analysis.probes`."""

    layers: Sequence[int] | None = None  # positions of blocks or stages; None takes all
    neighbours: Sequence[int] = (10, 20)  # how many vote; each number is a score
    lrs: Sequence[float] = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    epochs: int = 100


class ProbeScore(NamedTuple):
    """Accuracies on the tested split, of one feature of one layer."""

    network: str
    position: int  # of the layer, from 0
    layer: str
    feature: str  # "mean" or "class token"
    accuracies: tuple[float, ...]  # for each number of neighbours, then of the linear classifier that val chooses
    lr: float  # of that


def probe(subject: ProbedModel, protocol: Protocol, device: torch.device) -> tuple[list[ProbeScore], str]:
    """Probes a network: a score for each feature of each layer, and the images of each split, in words."""
    data, network = subject.data, subject.network.to(device).eval()
    tested = data.data_source.evaluated({*data.splits, "val"})
    read = {
        split: features_of_split(network, data, split, protocol.layers, device)
        for split in dict.fromkeys(("train", "val", tested))
    }
    (train, labels), (val, val_labels), (test, test_labels) = (read[split] for split in ("train", "val", tested))
    scores, classes = [], int(max(own.max() for _, own in read.values())) + 1
    for key in train:
        known, queries = train[key].to(device), test[key].to(device)
        voted = nearest_neighbours(known, labels, queries, protocol.neighbours)
        probes = linear_probes(known, labels, classes, protocol.lrs, epochs=protocol.epochs)
        best = int(probes.accuracies(val[key].to(device), val_labels).argmax())
        linear = probes.accuracies(queries, test_labels)[best]
        accuracies = (*(voted == test_labels).double().mean(1).tolist(), linear.item())
        scores.append(ProbeScore(subject.name, *key, accuracies, protocol.lrs[best]))
    return scores, ", ".join(f"{len(own):,} of {split}" for split, (_, own) in read.items())


@torch.inference_mode()
def features_of_split(
    network: nn.Module, data: ImageData, split: str, layers: Sequence[int] | None, device: torch.device
) -> tuple[Features, Tensor]:
    """All features of a split, prepared as evaluation does, on the CPU; and the labels (N,) on the device."""
    parts: dict[tuple[int, str, str], list[Tensor]] = {}
    labels = []
    for batch in data.evaluation_dataloader(split):
        batch["image"] = batch["image"].to(device)
        data.finish(batch)
        for key, feature in pooled_features(network, batch["image"], layers).items():
            parts.setdefault(key, []).append(feature.float().cpu())
        labels.append(batch["label"].to(device))
    return {key: torch.cat(part) for key, part in parts.items()}, torch.cat(labels)


def titles(protocol: Protocol) -> list[str]:
    """The names of a score's accuracies."""
    return [*(f"kNN, k = {count}" for count in protocol.neighbours), "linear"]


def table_of(scores: Iterable[ProbeScore], protocol: Protocol) -> list[tuple[str, ...]]:
    """The scores in rows, the titles first."""
    rows = [("network", "layer", "feature", *titles(protocol), "learning rate")]
    for network, _, layer, feature, accuracies, lr in scores:
        rows.append((network, layer, feature, *(f"{accuracy:.4f}" for accuracy in accuracies), f"{lr:g}"))
    return rows


def write(scores: Sequence[ProbeScore], protocol: Protocol, about: str, command: str, folder: Path) -> Path:
    """Writes index.html, whose path it returns, probe.md and probe.csv; `about` is what the reader must know."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = table_of(scores, protocol)
    with replacing(folder / "probe.md") as file:
        file.write("\n\n".join([f"`{command}`", about, markdown_table(rows), ""]).encode())
    write_table(folder / "probe.csv", rows)
    page = Page("Probes")
    page.code(command)
    page.paragraph(about)
    page.table(rows[0], rows[1:])
    depth = Axis("block or stage", ticks=tuple(sorted({score.position for score in scores})))
    curves: dict[tuple[str, str], list[ProbeScore]] = {}
    for score in scores:
        curves.setdefault((score.network, score.feature), []).append(score)
    plots = []
    for i, title in enumerate(titles(protocol)):
        series = [
            Series(", ".join(name), tuple((score.position, score.accuracies[i]) for score in curve))
            for name, curve in curves.items()
        ]
        plots.append((line_plot(title, series, depth, Axis("accuracy")), f"{title}: accuracy over depth"))
    page.pictures(plots, width=560)
    page.write(folder / "index.html")
    return folder / "index.html"


def in_words(protocol: Protocol) -> str:
    """What the scores are, in sentences."""
    return (
        "Features are those of the training split, frozen and without augmentation: the mean of the patches, and the "
        "class token, with the norm of the layer (in a plain transformer the final one). kNN: votes of the nearest, "
        f"weighted by exp(cosine similarity / 0.07). Linear: classifiers of standardised features, {protocol.epochs} "
        f"epochs of SGD with learning rates {', '.join(f'{lr:g}' for lr in protocol.lrs)}, of which the validation "
        "split chooses one."
    )
